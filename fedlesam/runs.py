"""A run folder: what is in it, what state it is in, and writing it so that no reader ever sees half a file."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedlesam import config as configs
from fedlesam.config import RunConfig

State = Literal["finished", "interrupted", "stopped"]


@dataclass(frozen=True)
class RunFolder:
    """config.toml, versions.json, split.safetensors, metrics.jsonl, model.safetensors and summary.json."""

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
        """What clients remember beyond the memory budget, while the run goes on."""
        return self.path / "memory"

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

    def read_config(self) -> RunConfig:
        return configs.update(RunConfig(), configs.read(self.config))

    def read_summary(self) -> dict[str, Any]:
        """Empty while the run goes on, or where it was killed."""
        if not self.summary.exists():
            return {}
        try:
            summary = json.loads(self.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.summary}: is not a summary of a run: {error}") from error
        if not isinstance(summary, dict):
            raise ValueError(f"{self.summary}: is not a summary of a run")
        return summary

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records of all rounds; a last line cut off by a crash is left out."""
        if not self.metrics.exists():
            return []
        records = []
        lines = self.metrics.read_text(encoding="utf-8").splitlines()
        for i, line in enumerate(lines):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                if i == len(lines) - 1:
                    break
                raise ValueError(f"{self.metrics}, line {i + 1}: is not a record of a round: {error}") from error
        return records

    def claim(self, config: RunConfig, overwrite: bool) -> bool:
        """Whether this run still has to be done here; refuses where the folder holds something else."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return True
        if not self.config.exists():
            raise ValueError(f"{self.path}: is not empty and not a run folder; choose another with --out")
        theirs = self.read_config()
        finished = self.read_summary().get("state") == "finished"
        changed = configs.differences(config, theirs)
        if finished and not changed:
            return False
        if overwrite:
            return True
        if changed:
            raise ValueError(
                f"{self.path}: holds another run ({'; '.join(changed)}); "
                "choose another folder with --out, or replace it with --overwrite"
            )
        raise ValueError(f"{self.path}: holds this run, unfinished; start it again with --overwrite")

    def clear(self) -> None:
        """Make the folder, without what an earlier run left."""
        self.path.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.memory, ignore_errors=True)
        old = (self.summary, self.model, self.metrics, self.probes, self.split, self.versions, self.config)
        for file in (*old, *self.path.glob("surface-*"), *self.path.glob(".surface-*")):
            file.unlink(missing_ok=True)


def write_text(path: Path, content: str) -> None:
    """Written beside, synced, then renamed: a reader sees the old file or the new one."""
    beside = path.with_name(path.name + ".part")
    with beside.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def write_json(path: Path, content: object) -> None:
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def versions() -> dict[str, str]:
    """What made the numbers: packages, interpreter, machine, and the commit where this is a checkout."""
    import platform
    import subprocess
    from importlib.metadata import version

    found = {name: version(name) for name in ("fedlesam", "torch", "numpy", "safetensors")}
    home = Path(__file__).resolve().parent.parent
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
