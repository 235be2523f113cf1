"""A run folder: what is in it, and what state it is in. Imports no PyTorch."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fedlesam.core import disk
from fedlesam.core.checks import is_number
from fedlesam.runs import config as configs
from fedlesam.runs import lock
from fedlesam.runs.config import RunConfig
from fedlesam.runs.evaluated import plain

State = Literal["finished", "interrupted", "stopped"]

NUMBERS = ("train_loss", "test_loss", "test_accuracy", "lr", "seconds", "backward_passes", "bytes_down", "bytes_up")
"""Of a record, where it has them."""
TABLES = ("accuracy", "per_client", "held_out_accuracy", "held_out_per_client")
"""Of a summary: numbers by name."""


@dataclass(frozen=True)
class RunFolder:
    """config.toml, versions.json, split.safetensors, metrics.jsonl, model.safetensors and summary.json.

    While the run is not finished also checkpoints/, and run.lock with who works on it.
    """

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def versions(self) -> Path:
        return self.path / "versions.json"

    @property
    def split(self) -> Path:
        return self.path / "split.safetensors"

    @property
    def memory(self) -> Path:
        """What clients remember beyond the memory budget, during the run."""
        return self.path / "memory"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def probes(self) -> Path:
        """What probes measured, a line each."""
        return self.path / "probes.jsonl"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def surface(self, dims: int) -> Path:
        """The loss around the final model along one or two directions."""
        return self.path / f"surface-{dims}d.safetensors"

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.summary, self.model, self.metrics, self.probes, self.split, self.versions, self.config)

    def read_config(self) -> RunConfig:
        return configs.update(RunConfig(), configs.read(self.config))

    def read_summary(self) -> dict[str, Any]:
        """Empty during the run, or where it was killed."""
        if not self.summary.exists():
            return {}
        try:
            summary = json.loads(self.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.summary}: is not a summary of a run: {error}") from error
        if not isinstance(summary, dict) or not _is_summary(summary):
            raise ValueError(f"{self.summary}: is not a summary of a run")
        if "left_out" in summary:  # its name in older folders
            summary["dropped"] = summary.pop("left_out")
        return summary

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records of all rounds, by the names of a Record; a last line cut off by a crash is dropped."""
        if not self.metrics.exists():
            return []
        records = []
        try:
            lines = self.metrics.read_bytes().splitlines()
        except OSError as error:
            raise ValueError(f"{self.metrics}: cannot be read: {error.strerror}") from error
        for i, line in enumerate(lines):
            try:
                records.append(_record(json.loads(line), i))
            except (ValueError, RecursionError) as error:
                if i == len(lines) - 1 and not isinstance(error, _NotRecord):
                    break
                raise ValueError(f"{self.metrics}, line {i + 1}: is not a record of a round: {error}") from error
        return records

    def needs_run(self, config: RunConfig, overwrite: bool) -> bool:
        """Whether this run still has to be trained or resumed here; refuses what holds something else."""
        if self.is_empty():
            return True
        if not self.config.exists():
            raise ValueError(f"{self.path}: is not empty and not a run folder; choose another with --out")
        for file in self.files:
            if file.is_dir():
                raise ValueError(f"{file}: is a folder, but a file of the run goes there; move it away")
        theirs = self.read_config()
        changed = configs.differences(config, theirs)
        if not changed and self.is_finished():
            return False
        if changed and not overwrite:
            raise ValueError(
                f"{self.path}: holds another run ({'; '.join(changed)}); "
                "choose another folder with --out, or replace it with --overwrite"
            )
        return True

    def is_empty(self) -> bool:
        """Nothing is there but what a start that was cut off leaves."""
        if not self.path.exists():
            return True
        if not self.path.is_dir():
            raise ValueError(f"{self.path}: is a file; choose a folder with --out")
        return all(path.name == lock.NAME or path.name.endswith(disk.PART) for path in self.path.iterdir())

    def is_finished(self) -> bool:
        return self.read_summary().get("state") == "finished"

    def has_leftovers(self) -> bool:
        """Of a finished run: it was killed before it had cleaned up."""
        return self.checkpoints.exists() or self.memory.exists()

    def clear(self) -> None:
        """Remove a run: first what could be resumed, last what says which run it is."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        shutil.rmtree(self.memory, ignore_errors=True)
        surfaces = (*self.path.glob("surface-*"), *self.path.glob(".surface-*"))
        for file in (*surfaces, *self.files):
            file.unlink(missing_ok=True)


def _is_summary(summary: dict[str, Any]) -> bool:
    tables = [summary.get(name, {}) for name in TABLES]
    numbers = all(isinstance(table, dict) and all(map(is_number, table.values())) for table in tables)
    return numbers and summary.get("state", "interrupted") in get_args(State)


class _NotRecord(ValueError):
    """JSON, and so not cut off, but of something else."""


def _record(record: Any, round: int) -> dict[str, Any]:
    if not isinstance(record, dict) or record.get("round") != round:
        raise _NotRecord(f"it is not of round {round}")
    known = plain(record)
    for name in NUMBERS:
        if name in known and not is_number(known[name]):
            raise _NotRecord(f"{name} is not a number")
    return known


def versions() -> dict[str, str]:
    """What made the numbers: packages, interpreter, machine, and the commit where this is a checkout."""
    import platform
    import subprocess
    from importlib.metadata import version

    found = {name: version(name) for name in ("fedlesam", "torch", "numpy", "safetensors")}
    home = Path(__file__).resolve().parents[2]
    commit = ""
    if (home / ".git").exists():
        try:
            git = ["git", "-C", str(home)]
            commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True, stderr=subprocess.DEVNULL).strip()
            if subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], text=True).strip():
                commit += " with changes"
        except (OSError, subprocess.CalledProcessError):
            commit = ""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return {**found, "python": platform.python_version(), "machine": machine, "commit": commit or "not a checkout"}
