"""Finished or unfinished runs as the report sees them: what is in their folders and nothing else."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from fedlesam.core.names import one_line
from fedlesam.probes import readings
from fedlesam.probes.readings import Reading, Surface
from fedlesam.runs.config import RunConfig
from fedlesam.runs.evaluated import accuracy_of, evaluated_on
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.methods import is_centralised, method_name


@dataclass(frozen=True)
class Run:
    path: Path
    config: RunConfig
    summary: dict[str, Any]
    records: list[dict[str, Any]]

    @property
    def algorithm(self) -> str:
        return self.config.algorithm

    @property
    def method(self) -> str:
        """For readers: training with all data in one place is not called by a federated method's name."""
        return method_name(self.config.algorithm, self.config.split)

    @property
    def centralised(self) -> bool:
        return is_centralised(self.method)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Rounds done and values, of the rounds that have one."""
        points = [(r["round"] + 1, r[name]) for r in self.records if r.get(name) is not None]
        return [x for x, _ in points], [y for _, y in points]

    def total(self, name: str) -> float:
        try:
            return float(sum(r[name] for r in self.records))
        except KeyError as error:
            raise ValueError(f"{RunFolder(self.path).metrics}: a round has no {error}") from error

    @cached_property
    def accuracy(self) -> dict[str, float]:
        """By the summary; of a run under way, or killed, by its records so far."""
        if not self.summary and self.records:
            from fedlesam.runs.runner import accuracies

            return dict(accuracies(self.records).get("accuracy", {}))
        return accuracy_of(self.summary, self.records)

    @property
    def evaluated_on(self) -> str:
        """test, or held-out."""
        return evaluated_on(self.config)

    @property
    def finished(self) -> bool:
        return self.summary.get("state") == "finished"

    @cached_property
    def versions(self) -> dict[str, str]:
        """Empty where the folder does not say."""
        try:
            found = json.loads(RunFolder(self.path).versions.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    def class_counts(self) -> NDArray[np.int64] | None:
        """Clients x classes, or None where the folder has no split."""
        split = RunFolder(self.path).split
        if not split.exists():
            return None
        try:
            with safe_open(split, framework="np") as file:
                counts: NDArray[np.int64] = file.get_tensor("class_counts")
                sizes = file.get_tensor("sizes") if "sizes" in file.keys() else counts.sum(1)  # noqa: SIM118
            if (
                counts.ndim != 2
                or counts.dtype != np.int64
                or counts.min() < 0
                or not np.array_equal(counts.sum(1), sizes)
            ):
                raise ValueError("its classes do not add up")
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise ValueError(one_line(f"{split}: is damaged: {error}")) from error
        return counts

    @cached_property
    def measurements(self) -> list[Reading]:
        """What probes measured, in the order of rounds; of a state measured twice in the same way, the last."""
        found = readings.read(RunFolder(self.path).probes)
        last = {(one.round, one.probe, json.dumps(one.metadata, sort_keys=True)): one for one in found}
        return sorted(last.values(), key=lambda one: one.round)

    @property
    def probes(self) -> list[str]:
        """Those that read something."""
        return list(dict.fromkeys(one.probe for one in self.measurements if one.values))

    def series(self, probe: str) -> list[Reading]:
        """Of the way in which it was measured most often: a final model measured again is no point of a curve."""
        ways: dict[str, list[Reading]] = {}
        for one in self.measurements:
            if one.probe == probe and one.values:
                ways.setdefault(json.dumps(one.metadata, sort_keys=True), []).append(one)
        return max(ways.values(), key=len, default=[])

    def surface(self, dims: int) -> Surface | None:
        """The loss around the final model along one or two directions; None if it was not measured."""
        path = RunFolder(self.path).surface(dims)
        if not path.exists():
            return None
        found = readings.read_surface(path)
        if found.dims != dims:
            raise ValueError(f"{path}: is not a loss surface of {dims} dimensions, but of {found.dims}")
        return found


def read_run(path: Path) -> Run:
    folder = RunFolder(path)
    if not folder.config.exists():
        raise ValueError(f"{path}: is not a run folder, it has no config.toml")
    return Run(path, folder.read_config(), folder.read_summary(), folder.read_metrics())


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """Of run folders, and of folders of run folders, each once."""
    found: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path}: there is no such folder")
        inside = _inside(path)
        if not inside:
            raise ValueError(
                f"{path}: is not a run folder, and holds none; `fedlesam run`, `compare` and `tune` make them"
            )
        for folder in inside:
            found.setdefault(folder.resolve(), read_run(folder))
    return list(found.values())


def _inside(path: Path) -> list[Path]:
    """A run's own folder, those of a comparison, or those of a sweep, which are in its `runs`."""
    if RunFolder(path).config.exists():
        return [path]
    return sorted(p.parent for pattern in ("*/config.toml", "runs/*/config.toml") for p in path.glob(pattern))
