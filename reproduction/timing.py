"""Seconds per round of several methods, which take turns: a busy machine then slows them alike."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from fedlesam.core import disk
from fedlesam.runs import config as configs
from fedlesam.runs.build import build, load_data
from fedlesam.runs.config import RunConfig

TURNS = 5
"""Rounds of each that count, after one that does not."""


def per_round(methods: Mapping[str, RunConfig], file: Path) -> dict[str, float]:
    """The median round of each method, training and aggregation; kept in `file`, measured once."""
    keys = {name: configs.fingerprint(config) for name, config in methods.items()}
    known: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not all(key in known for key in keys.values()):
        found = _take_turns(methods)
        known |= {keys[name]: seconds for name, seconds in found.items()}
        disk.write_json(file, known)
    return {name: known[key] for name, key in keys.items()}


def _take_turns(methods: Mapping[str, RunConfig]) -> dict[str, float]:
    data = load_data(next(iter(methods.values())))
    federations = {
        name: build(dataclasses.replace(config, evaluate_every=config.rounds, workers=1), data).federation
        for name, config in methods.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(1 + TURNS):
        for name, federation in federations.items():
            seconds[name].append(federation.round().seconds)
    return {name: median(some[1:]) for name, some in seconds.items()}
