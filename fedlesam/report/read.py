"""Finished or unfinished runs as the report sees them: what is in their folders and nothing else."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from fedlesam.config import RunConfig
from fedlesam.runs import RunFolder


@dataclass(frozen=True)
class Run:
    path: Path
    config: RunConfig
    summary: dict[str, Any]
    records: list[dict[str, Any]]

    @property
    def algorithm(self) -> str:
        return self.config.algorithm

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
        return dict(self.summary.get("accuracy", {}))

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
            raise ValueError(f"{split}: is damaged: {error}") from error
        return counts


def read_run(path: Path) -> Run:
    folder = RunFolder(path)
    if not folder.config.exists():
        raise ValueError(f"{path}: is not a run folder, it has no config.toml")
    return Run(path, folder.read_config(), folder.read_summary(), folder.read_metrics())
