"""A run folder: its only reader and writer. Imports no PyTorch until a model or a split is written."""

import dataclasses
import filecmp
import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedlesam.core import disk
from fedlesam.core.checks import is_number
from fedlesam.core.names import file_name, one_line
from fedlesam.runs import config as configs
from fedlesam.runs import config_file, lock, order
from fedlesam.runs.config import RunConfig
from fedlesam.runs.evaluated import NAMES, SCORES, is_over_clients, plain
from fedlesam.runs.versions import versions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from fedlesam.data.dataset import DataSet
    from fedlesam.data.splits import Split
    from fedlesam.probes.readings import Reading, Surface

log = logging.getLogger("fedlesam")

State = Literal["finished", "interrupted", "stopped"]

NUMBERS = (
    "train_loss",
    "test_loss",
    "test_accuracy",
    "lr",
    "seconds",
    "backward_passes",
    "bytes_down",
    "bytes_up",
    "epsilon",
)
"""Of a record, where it has them."""
TABLES = (*SCORES, "per_client", "held_out_per_client")
"""Of a summary: numbers by name."""


class RunFolder:
    """config.toml, versions.json, split.safetensors, metrics.jsonl, model.safetensors and summary.json.

    While the run is not finished also checkpoints/, and run.lock with who works on it. Probes add probes.jsonl and
    surface-1d.safetensors or surface-2d.safetensors.

    Args:
        path: The folder, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.versions = path / "config.toml", path / "versions.json"
        self.split, self.model = path / "split.safetensors", path / "model.safetensors"
        self.metrics, self.probes, self.summary = path / "metrics.jsonl", path / "probes.jsonl", path / "summary.json"
        self.checkpoints, self.memory = path / "checkpoints", path / "memory"
        """What clients remember beyond the memory budget, during the run."""
        self.files = (self.summary, self.model, self.metrics, self.probes, self.split, self.versions, self.config)
        """In the order in which they are removed: last what says which run it is."""

    def surface(self, dims: int) -> Path:
        """The file of the loss around the final model along one or two directions.

        Args:
            dims: 1 or 2.
        """
        return self.path / f"surface-{dims}d.safetensors"

    def read_config(self) -> RunConfig:
        """The settings that the run was begun with."""
        if not self.config.exists():
            raise ValueError(f"{self.path}: is not a run folder, it has no config.toml")
        return configs.update(RunConfig(), config_file.read(self.config))

    def read_summary(self) -> dict[str, Any]:
        """Empty during the run, or where it was killed."""
        try:
            summary = json.loads(self.summary.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.summary}: is not a summary of a run: {error}") from error
        if not isinstance(summary, dict) or not _is_summary(summary):
            raise ValueError(f"{self.summary}: is not a summary of a run")
        if "left_out" in summary:  # its name in older folders
            summary["dropped"] = summary.pop("left_out")
        return summary

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records of all rounds, by the names of a Record; a last line cut off by a crash is dropped."""
        records = []
        try:
            lines = self.metrics.read_bytes().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return []
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

    def read_versions(self) -> dict[str, str]:
        """What made the numbers; empty where the folder does not say."""
        try:
            found = json.loads(self.versions.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    def read_readings(self) -> "list[Reading]":
        """What probes found, in the order of rounds; of a state probed twice in the same way, the last."""
        from fedlesam.probes import readings

        found = {(r.round, r.probe, json.dumps(r.metadata, sort_keys=True)): r for r in readings.read(self.probes)}
        return sorted(found.values(), key=lambda reading: reading.round)

    def read_surface(self, dims: int) -> "Surface | None":
        """The loss surface of one or two dimensions; None where none was measured.

        Args:
            dims: 1 or 2.
        """
        from fedlesam.probes.readings import read_surface

        path = self.surface(dims)
        if not path.exists():
            return None
        found = read_surface(path)
        if found.dims != dims:
            raise ValueError(f"{path}: is not a loss surface of {dims} dimensions, but of {found.dims}")
        return found

    def read_class_counts(self) -> "NDArray[np.int64] | None":
        """Samples by client and class; None where the folder has no split."""
        import numpy as np
        from safetensors import SafetensorError, safe_open

        if not self.split.exists():
            return None
        try:
            with safe_open(self.split, framework="np") as file:
                counts: NDArray[np.int64] = file.get_tensor("class_counts")
                sizes = file.get_tensor("sizes") if "sizes" in file.keys() else counts.sum(1)  # noqa: SIM118
            whole = counts.ndim == 2 and counts.dtype == np.int64 and counts.min() >= 0
            if not whole or not np.array_equal(counts.sum(1), sizes):
                raise ValueError("its classes do not add up")
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise ValueError(one_line(f"{self.split}: is damaged: {error}")) from error
        return counts

    def load_model(self, module: "nn.Module") -> None:
        """Put the weights of the folder into a module.

        Args:
            module: One made from the folder's config.
        """
        from safetensors import SafetensorError

        from fedlesam.core.saving import load_trained

        if not self.model.exists():
            remedy = "let it train, or interrupt it"
            raise ValueError(f"{self.path}: has no checkpoint and no model.safetensors yet; {remedy}")
        try:
            load_trained(module, self.model)
        except (SafetensorError, RuntimeError, OSError, ValueError) as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"{self.model}: is not the model of {self.config}: {why}") from error

    def write_config(self, config: RunConfig) -> None:
        """Where there is none, or one of fewer rounds or other metrics.

        Args:
            config: Resolved settings.
        """
        known = self.read_config() if self.config.exists() else None
        if known is None or known.rounds < config.rounds or known.hyper != config.hyper:
            disk.write_text(self.config, configs.write(config))

    def write_versions(self, done: int) -> None:
        """What makes the numbers; on resume with other versions also those, since the bits may differ then.

        Args:
            done: Rounds done before.
        """
        now, began = versions(), self.read_versions() if done else {}
        if done and not began and self.versions.exists():
            log.warning("%s: is damaged, so the versions with which the run began are not known", self.versions)
        if not began:
            disk.write_json(self.versions, now)
            return
        changed = [f"{name} {began.get(name)}, now {value}" for name, value in now.items() if began.get(name) != value]
        if changed:
            began_with = "%s: the run began with %s; the results may differ in the last bits"
            log.warning(began_with, self.path, "; ".join(changed))
            whole = json.loads(self.versions.read_text(encoding="utf-8"))
            disk.write_json(self.versions, {**whole, f"since round {done}": now})

    def write_split(self, split: "Split", data: "DataSet") -> None:
        """Nothing is read from the file, so a damaged one would stay: it is always written.

        Args:
            split: The split.
            data: What it divides.
        """
        from fedlesam.data.splits import save_split

        with disk.replacing(self.split) as beside:
            save_split(split, data, beside)
            if self.split.exists() and not filecmp.cmp(beside, self.split, shallow=False):
                log.warning("%s: is not this run's split; written anew", self.split)

    def write_end(self, module: "nn.Module", summary: dict[str, Any], keep: bool = False) -> None:
        """The model and the summary; a finished run keeps nothing to resume from, unless it is to be extended.

        Weights that are frozen are not written: what makes the model brings them.

        Args:
            module: The global model.
            summary: With `state`.
            keep: Whether a finished run keeps its last checkpoint.
        """
        from fedlesam.core.saving import save_trained

        with disk.replacing(self.model) as beside:
            save_trained(module, beside)
        disk.write_json(self.summary, summary)
        self.remove_memory()
        if summary["state"] == "finished" and not keep:
            self.remove_checkpoints()

    def remove_memory(self) -> None:
        """What a process that ended left of its clients' memory: nothing can use it."""
        shutil.rmtree(self.memory, ignore_errors=True)

    def remove_checkpoints(self) -> None:
        """Nothing is left to resume from."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def needs_run(self, config: RunConfig, overwrite: bool) -> bool:
        """Whether this run still has to be trained or resumed here; refuses what holds something else.

        Args:
            config: Resolved settings.
            overwrite: Whether to replace what the folder holds.
        """
        if self.is_empty():
            return True
        if not self.config.exists():
            raise ValueError(f"{self.path}: is not empty and not a run folder; choose another with --out")
        for file in self.files:
            if file.is_dir():
                raise ValueError(f"{file}: is a folder, but a file of the run goes there; move it away")
        known = self.read_config()
        changed = configs.differences(config, known)
        longer = dataclasses.replace(known, rounds=max(known.rounds, config.rounds))
        if changed and not overwrite and not configs.differences(config, longer):
            return self._can_go_on(known.rounds)
        if not changed and self.is_finished():
            return False
        if changed and not overwrite:
            shorter = len(changed) == 1 and config.rounds < known.rounds
            raise ValueError(
                f"{self.path}: holds another run ({'; '.join(changed)}); "
                f"{'a run can be extended, not shortened: ' if shorter else ''}"
                "choose another folder with --out, or replace it with --overwrite"
            )
        return True

    def _can_go_on(self, rounds: int) -> bool:
        if self.is_finished() and not self.checkpoints.exists():
            raise ValueError(
                f"{self.path}: holds a finished run of {rounds} rounds without a checkpoint to resume from (a run "
                "keeps its last unless --no-keep); choose another folder with --out, or train again with --overwrite"
            )
        return True

    def is_empty(self) -> bool:
        """Nothing is there but what a start that was cut off leaves."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path}: is a file; choose a folder with --out")
        there = self.path.iterdir() if self.path.exists() else ()
        return all(path.name == lock.NAME or path.name.endswith(disk.PART) for path in there)

    def is_finished(self) -> bool:
        """Whether all rounds are done and the model is written."""
        return self.read_summary().get("state") == "finished"

    def has_leftovers(self) -> bool:
        """Of a finished run: it was killed before it had cleaned up."""
        return self.memory.exists() or (self.checkpoints.exists() and not self.read_config().keep_last)

    def clear(self) -> None:
        """Remove a run: first what could be resumed, last what says which run it is."""
        self.remove_checkpoints()
        self.remove_memory()
        for file in (*self.path.glob("surface-*"), *self.path.glob(".surface-*"), *self.files):
            file.unlink(missing_ok=True)


def _is_summary(summary: dict[str, Any]) -> bool:
    tables = [summary.get(name, {}) for name in TABLES]
    numbers = all(isinstance(table, dict) and all(map(_is_score, table.items())) for table in tables)
    shape = summary.get("shape", [1, 1, 1])
    sizes = [*shape, summary.get("classes", 1)] if isinstance(shape, list) and len(shape) == 3 else [0]
    own = summary.get("sample_shape", [])
    sizes += own if isinstance(own, list) else [0]
    split = summary.get("split") or {}
    return (
        numbers
        and is_over_clients(summary.get("test_clients", {}))
        and isinstance(split, dict)
        and isinstance(split.get("hash", ""), str)
        and all(type(size) is int and size > 0 for size in sizes)
        and summary.get("state", "interrupted") in get_args(State)
    )


def _is_score(item: tuple[str, Any]) -> bool:
    return isinstance(item[1], str) if item[0] in NAMES else is_number(item[1])


class _NotRecord(ValueError):
    """JSON, and so not cut off, but of something else."""


def _record(record: Any, round: int) -> dict[str, Any]:
    if not isinstance(record, dict) or record.get("round") != round:
        raise _NotRecord(f"it is not of round {round}")
    known = plain(record)
    for name in NUMBERS:
        if name in known and not is_number(known[name]):
            raise _NotRecord(f"{name} is not a number")
    metrics = known.get("metrics", {})
    if not isinstance(metrics, dict) or not all(value is None or is_number(value) for value in metrics.values()):
        raise _NotRecord("metrics are not numbers")
    if not is_over_clients(known.get("test_clients", {})):
        raise _NotRecord("test_clients are not numbers")
    if not isinstance(known.get("smaller", []), list):
        raise _NotRecord("smaller is not a list")
    return known


def default_folder(config: RunConfig) -> Path:
    """Made from the settings, so that repeating a command finds its folder again.

    Args:
        config: Resolved settings.
    """
    return Path("runs") / file_name(f"{config.algorithm}-{config.data}-{configs.identity(config)}")


def find_folders(paths: Iterable[Path]) -> list[RunFolder]:
    """Run folders, and those in folders of run folders (a comparison, a sweep), each once.

    Args:
        paths: Run folders, or folders that hold some at any depth.
    """
    found: dict[Path, RunFolder] = {}
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path}: there is no such folder")
        inside = folders_in(path)
        if not inside:
            makers = "`fedlesam run`, `compare` and `tune` make them"
            raise ValueError(f"{path}: is not a run folder, and holds none; {makers}")
        for folder in inside:
            found.setdefault(folder.path.resolve(), folder)
    return list(found.values())


def folders_in(path: Path) -> list[RunFolder]:
    """Every run folder in a folder, at any depth, in the order the user gave, else by their paths.

    Args:
        path: A folder, which may be a run folder itself.
    """
    return [RunFolder(run) for run in order.arranged(config.parent for config in path.rglob("config.toml"))]
