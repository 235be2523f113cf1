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
from fedlesam.runs.config import RunConfig
from fedlesam.runs.evaluated import accuracy_of, evaluated_on
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.methods import is_centralised, method_name


@dataclass(frozen=True)
class Measurement:
    """A line of probes.jsonl."""

    round: int
    """Rounds done at that state."""
    probe: str
    values: dict[str, float]
    metadata: dict[str, Any]
    """With which radius, on how many samples, and so on."""
    missing: str = ""
    """What could not be read, and why."""


@dataclass(frozen=True)
class Surface:
    """The loss along one or two directions through the final model; `y` has no length along one."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    loss: NDArray[np.float64]
    """len(x) values, or len(y) rows of len(x)."""
    accuracy: NDArray[np.float64]
    """On the same samples, a share; NaN where there are no classes."""
    metadata: dict[str, Any]

    @property
    def dims(self) -> int:
        return self.loss.ndim


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
    def measurements(self) -> list[Measurement]:
        """What probes found, in the order of rounds; of a state probed twice in the same way, the last."""
        path = RunFolder(self.path).probes
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        found = {}
        for i, line in enumerate(lines):
            try:
                entry = json.loads(line)
                values = {k: float(v) for k, v in entry["values"].items() if isinstance(v, int | float)}
                metadata, missing = entry.get("metadata") or entry.get("about") or {}, str(entry.get("missing") or "")
                one = Measurement(int(entry["round"]), str(entry["probe"]), values, dict(metadata), missing)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if i == len(lines) - 1 and not line.endswith("}"):
                    break  # cut off by a crash
                raise ValueError(f"{path}, line {i + 1}: is not a probe's result: {error!r}") from error
            found[one.round, one.probe, json.dumps(one.metadata, sort_keys=True)] = one
        return sorted(found.values(), key=lambda one: one.round)

    @property
    def probes(self) -> list[str]:
        """Those that read something."""
        return list(dict.fromkeys(one.probe for one in self.measurements if one.values))

    def series(self, probe: str) -> list[Measurement]:
        """Of the way in which it was measured most often: a final model measured again is no point of a curve."""
        ways: dict[str, list[Measurement]] = {}
        for one in self.measurements:
            if one.probe == probe and one.values:
                ways.setdefault(json.dumps(one.metadata, sort_keys=True), []).append(one)
        return max(ways.values(), key=len, default=[])

    def surface(self, dimensions: int) -> Surface | None:
        path = RunFolder(self.path).surface(dimensions)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="np") as file:
                header = file.metadata() or {}
                metadata = json.loads(header.get("metadata") or header.get("about") or "{}")
                x, loss, accuracy = (
                    np.asarray(file.get_tensor(name), dtype=np.float64) for name in ("x", "loss", "accuracy")
                )
                y = np.asarray(file.get_tensor("y"), dtype=np.float64) if dimensions == 2 else np.empty(0)
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(f"{path}: is not a loss surface: {error}") from error
        shape = (len(y), len(x)) if dimensions == 2 else (len(x),)
        if not loss.shape == accuracy.shape == shape:
            raise ValueError(f"{path}: is not a loss surface: loss has the shape {loss.shape}, not {shape}")
        return Surface(x, y, loss, accuracy, metadata if isinstance(metadata, dict) else {})


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
