"""What state the runs of a folder are in."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlesam.core.checks import is_number
from fedlesam.runs import lock
from fedlesam.runs.evaluated import evaluated_on
from fedlesam.runs.folder import RunFolder


@dataclass(frozen=True)
class Overview:
    path: Path
    algorithm: str
    state: str
    """running, finished, interrupted, stopped; or damaged, where the folder cannot be read."""
    why: str
    round: int
    """Rounds done."""
    rounds: int
    accuracy: float | None
    """Of the last evaluation."""
    accuracy_round: int | None
    """Rounds done at that evaluation."""
    evaluated_on: str
    """test, or held-out; empty where the folder cannot be read."""
    seconds_left: float | None
    checkpoint_bytes: int


def find_runs(folder: Path) -> Iterator[Overview]:
    """Every run folder in a folder, in the order of their paths."""
    for config in sorted(folder.rglob("config.toml")):
        yield read_overview(RunFolder(config.parent))


def read_overview(folder: RunFolder) -> Overview:
    try:
        config, summary, records = folder.read_config(), folder.read_summary(), folder.read_metrics()
        holder = lock.holder(folder.path)
        done = len(records)
        state = "running" if holder is not None else str(summary.get("state", "interrupted"))
        tested = [(r["test_accuracy"], r["round"] + 1) for r in records if r.get("test_accuracy") is not None]
        accuracy, at = tested[-1] if tested else (None, None)
        return Overview(
            path=folder.path,
            algorithm=config.algorithm,
            state=state,
            why=str(summary.get("why", "")) if state == "stopped" else "",
            round=done,
            rounds=config.rounds,
            accuracy=accuracy,
            accuracy_round=at,
            evaluated_on=evaluated_on(config),
            seconds_left=None if holder is None else _seconds_left(holder, done, config.rounds),
            checkpoint_bytes=size_of(folder.checkpoints),
        )
    except (ValueError, OSError) as error:
        return Overview(
            folder.path, "?", "damaged", str(error), 0, 0, None, None, "", None, size_of(folder.checkpoints)
        )


def _seconds_left(holder: dict[str, Any], done: int, rounds: int) -> float | None:
    since, first = holder.get("since", ""), holder.get("round", "")
    if not (is_number(since) and is_number(first)) or not first < done < rounds:
        return None
    return float((rounds - done) * (time.time() - since) / (done - first))


def size_of(folder: Path) -> int:
    """Bytes on disk; a file with two names counts once."""
    sizes = {}
    for path in folder.rglob("*"):
        try:
            found = path.stat()
        except OSError:
            continue
        if path.is_file():
            sizes[found.st_ino] = found.st_size
    return sum(sizes.values())
