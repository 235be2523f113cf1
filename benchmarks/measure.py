"""Timing by ratio: candidates take turns in one process, so that a busy machine slows them alike."""

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds, and the ratio to the first candidate's in the same turn; medians over the turns."""

    name: str
    seconds: float
    ratio: float
    low: float
    high: float
    """Quartiles of the ratio."""


def take_turns(candidates: dict[str, Callable[[], object]], turns: int, warm_up: int = 1) -> list[Timing]:
    """The first candidate is the unit. Every turn runs all of them, in alternating order."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(-warm_up, turns):
        for name in candidates if turn % 2 else reversed(candidates):
            began = time.perf_counter()
            candidates[name]()
            if turn >= 0:
                times[name].append(time.perf_counter() - began)
    unit = times[next(iter(candidates))]
    rows = []
    for name, seconds in times.items():
        ratios = sorted(mine / its for mine, its in zip(seconds, unit, strict=True))
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        rows.append(Timing(name, statistics.median(seconds), statistics.median(ratios), quartiles[0], quartiles[2]))
    return rows


def machine() -> str:
    today = datetime.date.today().isoformat()
    return f"{platform.machine()}, {os.cpu_count()} cores, PyTorch {torch.__version__}, {today}"


def table(title: str, timings: list[Timing], note: str = "") -> str:
    lines = [f"### {title}", "", "| | seconds | ratio | quartiles |", "|---|---|---|---|"]
    lines += [f"| {t.name} | {t.seconds:.4f} | {t.ratio:.3f} | {t.low:.3f} to {t.high:.3f} |" for t in timings]
    return "\n".join([*lines, *(["", note] if note else []), ""])
