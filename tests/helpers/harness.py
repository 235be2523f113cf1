"""Faults on purpose: a run in a process of its own that dies, or whose disk fails, at a chosen call.

The process is forked, so it costs no import. In it the calls that change the disk are replaced by ones that count, and
at the chosen one it is killed with SIGKILL, or the call fails. What had been synced until then is kept in a ledger, so
that a power loss can be played afterwards: what never was synced is gone, or half there.
"""

import functools
import json
import os
import random
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instrument import Instrument, Plan
from power_loss import Loss, Remains, note_durable
from processes import Ended, fork

from fedlesam.data.dataset import DataSet
from fedlesam.runs import config as configs
from fedlesam.runs import runner
from fedlesam.runs.build import load_data
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder

SMALL: dict[str, Any] = {
    "clients": 6,
    "active": 3,
    "rounds": 6,
    "epochs": 1,
    "batch_size": 60,
    "model": "mlp:hidden=4",
    "threads": 1,
    "checkpoint_every": 1,
}

MORE = ("workers", "store", "memory", "keep", "lr")


MARKS = ("loaded", "committed")


def small(algorithm: str = "fedlesam-s", **change: Any) -> RunConfig:
    return configs.resolve(RunConfig(**{"algorithm": algorithm, "keep_last": False, **SMALL, **change}))


@functools.cache
def digits() -> DataSet:
    return load_data(RunConfig())


@dataclass
class Case:
    """A folder for a run, what is known of its processes, and what a power loss would leave of it."""

    path: Path
    config: RunConfig
    attempts: int = 0
    committed: int = 0
    """Rounds of which a checkpoint was promised."""
    loaded: int = 0
    """Rounds the last process began with."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        for folder in (self.path, self.ledger, self.path / "tmp"):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger"

    @property
    def log(self) -> Path:
        return self.path / f"log{self.attempts}"

    @property
    def events(self) -> list[tuple[str, str]]:
        """Of the last process: who, and what."""
        lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        return [(role, label) for role, _, label in (line.partition("\t") for line in lines)]

    def labels(self, role: str = "leader") -> list[str]:
        return [label for who, label in self.events if who == role]

    def attempt(self, plan: Plan | None = None, config: RunConfig | None = None) -> "Ended":
        """One process that runs the command; it must go on from what was promised."""
        self.attempts += 1
        ended = fork(functools.partial(self._work, plan, config or self.config)).wait()
        found = {kind: [int(label.split()[1]) for label in self.labels() if label.startswith(kind)] for kind in MARKS}
        self.loaded = found["loaded"][0] if found["loaded"] else 0
        if found["loaded"]:
            assert self.loaded >= self.committed, f"the checkpoint of round {self.committed} is lost: {self.path}"
        self.committed = max([self.committed, *found["committed"]])
        return ended

    def _work(self, plan: Plan | None, config: RunConfig) -> None:
        tempfile.tempdir = str(self.path / "tmp")
        Instrument(self, plan).install()
        try:
            runner.execute(config, self.run, data=digits())
        except Exception as error:
            (self.path / "error").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
            if not isinstance(error, OSError | ValueError | RuntimeError):
                traceback.print_exc()
            os._exit(2 if isinstance(error, OSError | ValueError) else 4)

    @property
    def error(self) -> str:
        return (self.path / "error").read_text(encoding="utf-8")

    @property
    def finished(self) -> bool:
        return self.run.exists() and RunFolder(self.run).is_finished()

    def lose_power(self, loss: Loss) -> None:
        """Put the folder where it would be after a power loss."""
        if loss == "nothing" or not self.run.exists():
            self._strike_off()
            return
        after = self.path / "after"
        after.mkdir()
        Remains(self, loss).of_folder(self.path.stat().st_ino, self.path, after)
        shutil.rmtree(self.run)
        if (after / "run").exists():
            (after / "run").rename(self.run)
        shutil.rmtree(after)
        shutil.rmtree(self.ledger)
        self.ledger.mkdir()
        self._write_off()

    def _strike_off(self) -> None:
        """Files that are gone with the process that had them open: their numbers may be used again."""
        there = {path.stat().st_ino for path in (self.path, self.run, *self.run.rglob("*")) if path.exists()}
        for ledger in self.ledger.iterdir():
            if not ledger.name.isdigit() or int(ledger.name) not in there:
                ledger.unlink()
        for path in (self.path, self.run, *self.run.rglob("*")):
            ledger = self.ledger / str(path.stat().st_ino) if path.is_dir() else None
            if ledger is not None and ledger.exists():
                entries = json.loads(ledger.read_bytes())
                ledger.write_text(json.dumps({name: entry for name, entry in entries.items() if entry[0] in there}))

    def _write_off(self) -> None:
        """All that is there after a restart is lasting."""
        for path in (self.path, *self.run.rglob("*"), self.run):
            if path.exists():
                handle = os.open(path, os.O_RDONLY)
                note_durable(self, handle)
                os.close(handle)


def flags(config: RunConfig) -> list[str]:
    """The flags of a run that is `small`."""
    changed = {"algorithm": config.algorithm, **{name: getattr(config, name) for name in (*SMALL, *MORE)}}
    words = [part for name, value in changed.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return words if config.keep_last else [*words, "--no-keep"]


# What comes out


@dataclass(frozen=True)
class Result:
    """All that a run leaves, but for the seconds."""

    model: bytes
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    files: list[str]


def result(path: Path) -> Result:
    folder = RunFolder(path)
    return Result(
        folder.model.read_bytes(),
        [{**record, "seconds": 0} for record in folder.read_metrics()],
        {**folder.read_summary(), "seconds": 0},
        sorted(str(file.relative_to(path)) for file in path.rglob("*")),
    )


class References:
    """The results of runs that nothing interrupts, each computed once, on one worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, Result] = {}

    def __call__(self, config: RunConfig) -> Result:
        key = configs.fingerprint(config)
        if key not in self.known:
            alone = configs.update(config, {"workers": 1, "store": "shared", "memory": RunConfig().memory})
            runner.execute(alone, self.path / key[:16], data=digits())  # in this process: its forks are quicker then
            self.known[key] = result(self.path / key[:16])
        return self.known[key]


def inside(labels: list[str]) -> Iterator[tuple[int, str]]:
    """The events from the first local step to the one that makes the run a finished one, with their numbers."""
    begun = False
    for number, label in enumerate(labels, 1):
        if label == "before replace summary.json":
            return
        begun = begun or label == "step"
        if begun and not label.startswith(MARKS):
            yield number, label
