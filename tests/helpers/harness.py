"""Faults on purpose: a run in a process of its own that dies, or whose disk fails, at a chosen call.

The process is forked, so it costs no import. In it the calls that change the disk are replaced by ones that count, and
at the chosen one it is killed with SIGKILL, or the call fails. What had been synced until then is kept in a ledger, so
that a power loss can be played afterwards: what never was synced is gone, or half there.
"""

import contextlib
import errno
import functools
import io
import json
import os
import pathlib
import random
import re
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from safetensors import SafetensorError

from fedlesam import cli
from fedlesam.data import splits
from fedlesam.data.dataset import DataSet
from fedlesam.engines.signals import StopFlag
from fedlesam.runs import config as configs
from fedlesam.runs import folder as folders
from fedlesam.runs import runner
from fedlesam.runs.build import load_data
from fedlesam.runs.checkpoint import Checkpoints
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder

PATIENCE = 120
"""Seconds after which a process counts as hanging."""

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

Loss = Literal["nothing", "all", "some"]
"""What a power loss takes of what was not synced."""


def small(algorithm: str = "fedlesam-s", **change: Any) -> RunConfig:
    return configs.resolve(RunConfig(**{"algorithm": algorithm, **SMALL, **change}))


@functools.cache
def digits() -> DataSet:
    return load_data(RunConfig())


@dataclass(frozen=True)
class Plan:
    """What happens at the `nth` event of a process whose label has this pattern in it."""

    pattern: str = ""
    nth: int = 1
    role: str = "leader"
    do: Literal["kill", "kill me", "fail", "full"] = "kill"
    """`kill me` kills only this process, be it a worker; `full` makes all later writes fail too."""
    errno: int = errno.ENOSPC


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


MARKS = ("loaded", "committed")


# What is lasting


def note_durable(case: Case, handle: int) -> dict[str, list[int]]:
    """Copy what an open file or folder is now into the ledger; a folder's entries are returned."""
    about = os.fstat(handle)
    entries: dict[str, list[int]] = {}
    if stat.S_ISDIR(about.st_mode):
        with os.scandir(handle) as found:
            for entry in found:
                if about.st_ino != case.path.stat().st_ino or entry.name == case.run.name:
                    with contextlib.suppress(FileNotFoundError):
                        entries[entry.name] = [entry.inode(), int(entry.is_dir(follow_symlinks=False))]
        content = json.dumps(entries).encode()
    else:
        with open(f"/proc/self/fd/{handle}", "rb") as file:  # noqa: PTH123 - Path.open may be watched
            content = file.read()
    beside = case.ledger / f"{about.st_ino}.{os.getpid()}"
    with open(beside, "wb") as file:  # noqa: PTH123
        file.write(content)
    REAL["replace"](beside, case.ledger / str(about.st_ino))
    return entries


class Remains:
    """What a power loss leaves: of a folder the entries when it was last synced, of a file its bytes then.

    `all` that was not synced is gone. Of `some` each entry and each file may have made it to the disk all the same.
    """

    def __init__(self, case: Case, loss: Loss) -> None:
        self.case, self.loss, self.rng = case, loss, case.rng
        self.now = {path.stat().st_ino: path for path in (case.run, *case.run.rglob("*"))}
        self.known: dict[int, bytes] = {}

    def of_folder(self, ino: int, now: Path | None, target: Path) -> None:
        ledger = self.case.ledger / str(ino)
        durable: dict[str, list[int]] = json.loads(ledger.read_bytes()) if ledger.exists() else {}
        current = {}
        if now is not None:
            for path in now.iterdir():
                if now != self.case.path or path == self.case.run:
                    current[path.name] = [path.stat().st_ino, int(path.is_dir())]
        for name in sorted({*durable, *current}):
            sides = [durable.get(name)] + ([current.get(name)] if self.loss == "some" else [])
            entry = self.rng.choice(sides)
            if entry is None:
                continue
            if entry[1]:
                (target / name).mkdir()
                self.of_folder(entry[0], self.now.get(entry[0]), target / name)
            else:
                (target / name).write_bytes(self.of_file(entry[0]))

    def of_file(self, ino: int) -> bytes:
        if ino not in self.known:
            ledger, now = self.case.ledger / str(ino), self.now.get(ino)
            current = now.read_bytes() if now is not None else b""
            torn = [b"", bytes(len(current)), current[: len(current) // 2]]
            sides = [ledger.read_bytes()] if ledger.exists() else torn
            self.known[ino] = self.rng.choice(sides + ([current] if self.loss == "some" and now is not None else []))
        return self.known[ino]


# The calls that are watched

REAL: dict[str, Callable[..., Any]] = {
    name: getattr(os, name)
    for name in (
        "fsync",
        "sync",
        "replace",
        "link",
        "unlink",
        "rmdir",
        "mkdir",
        "open",
        "ftruncate",
        "pwrite",
    )
}
SAVE_FILE = safetensors.torch.save_file
WRITE_TEXT = pathlib.Path.write_text
NEEDS_SPACE = ("link", "mkdir", "create", "pwrite", "write_text", "save_file")


class Instrument:
    """In the process that is to fail, and in the workers it forks."""

    def __init__(self, case: Case, plan: Plan | None) -> None:
        self.case, self.plan, self.leader = case, plan, os.getpid()
        self.log = REAL["open"](case.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.seen = 0
        self.full = False
        self.held: dict[int, int] = {}
        """Open files by inode, so that none is used again for another file."""

    @property
    def role(self) -> str:
        return "leader" if os.getpid() == self.leader else "worker"

    def event(self, label: str, spoil: Callable[[], Any] | None = None) -> None:
        os.write(self.log, f"{self.role}\t{label}\n".encode())
        plan = self.plan
        if plan is None or plan.role != self.role:
            return
        if plan.pattern in label:
            self.seen += 1
            if self.seen == plan.nth:
                if spoil is not None:
                    spoil()
                self.strike(label)
        if self.full and label.startswith(("before", "half")) and label.split()[1] in NEEDS_SPACE:
            self.fail(label, errno.ENOSPC)

    def strike(self, label: str) -> None:
        assert self.plan is not None
        if self.plan.do in ("kill", "kill me"):
            os.kill(self.leader if self.plan.do == "kill" else os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(60)  # a worker goes with its leader
        self.full = self.plan.do == "full"
        self.fail(label, self.plan.errno)

    def fail(self, label: str, number: int) -> None:
        if label.split()[1] == "save_file":
            raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")
        raise OSError(number, os.strerror(number))

    def install(self) -> None:
        for path in (self.case.path, self.case.run, *self.case.run.rglob("*")):
            if path.exists():
                self.hold(path.stat().st_ino, str(path))
        for name in REAL:
            setattr(os, name, functools.partial(getattr(self, f"_{name}", None) or self._plain, name))
        for module in (safetensors.torch, splits):
            module.save_file = self._save_file
        pathlib.Path.write_text = lambda path, *args, **kwargs: self._write_text(path, *args, **kwargs)  # type: ignore[method-assign,assignment]
        folders.versions = lambda: {"versions": "are not what is tested"}
        self._mark(StopFlag, "check", "step")
        save, load = Checkpoints.save, Checkpoints.load

        def saved(these: Checkpoints, federation: Any, *more: Any) -> None:
            save(these, federation, *more)
            self.event(f"committed {federation.state.round}")

        def loaded(these: Checkpoints, federation: Any) -> int:
            found = load(these, federation)
            self.event(f"loaded {found}")
            return found

        Checkpoints.save, Checkpoints.load = saved, loaded  # type: ignore[method-assign]

    def _mark(self, owner: Any, name: str, label: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.event(label)
            return real(*args, **kwargs)

        setattr(owner, name, call)

    def named(self, path: Any, dir_fd: int | None = None) -> str | None:
        """A path inside the run folder without what is random in it; None for others'."""
        if isinstance(path, int):
            path = str(Path(f"/proc/self/fd/{path}").readlink()).removesuffix(" (deleted)")
        if dir_fd is not None:
            path = Path(f"/proc/self/fd/{dir_fd}").readlink() / path
        text = os.path.abspath(os.fspath(path))  # noqa: PTH100
        if text == str(self.case.path):
            return "."
        if not text.startswith(str(self.case.run)):
            return None
        return re.sub(r"\.[0-9a-f]{8}(\.part)+$", ".part", text.removeprefix(str(self.case.run)).lstrip("/")) or "run"

    def _plain(self, name: str, path: Any, *args: Any, **kwargs: Any) -> Any:
        real = REAL[name]
        where = self.named(args[0] if name in ("replace", "link") else path, kwargs.get("dir_fd"))
        if where is None:
            return real(path, *args, **kwargs)
        if name == "open" and args and args[0] & os.O_CREAT:
            name = "create"
        self.event(f"before {name} {where}")
        result = real(path, *args, **kwargs)
        self.event(f"after {name} {where}")
        return result

    def _fsync(self, name: str, handle: int) -> None:
        where = self.named(handle)
        if where is not None:
            self.event(f"before {name} {where}")
        if where is None:
            REAL[name](handle)
        else:
            self.keep(handle)  # the ledger is the disk: the real one would take its time
            self.event(f"after {name} {where}")

    def _sync(self, name: str) -> None:
        self.event(f"before {name} all")
        for path in (self.case.path, self.case.run, *self.case.run.rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                handle = REAL["open"](path, os.O_RDONLY)
                self.keep(handle)
                os.close(handle)
        self.event(f"after {name} all")

    def keep(self, handle: int) -> None:
        self.hold(os.fstat(handle).st_ino, f"/proc/self/fd/{handle}")
        for entry, (ino, _) in note_durable(self.case, handle).items():
            self.hold(ino, f"/proc/self/fd/{handle}/{entry}")

    def hold(self, ino: int, path: str) -> None:
        if ino not in self.held:
            with contextlib.suppress(FileNotFoundError):
                self.held[ino] = REAL["open"](path, os.O_RDONLY)

    def _pwrite(self, name: str, handle: int, line: bytes, offset: int) -> int:
        where = self.named(handle)
        if where is None or where == "run.lock":
            written: int = REAL[name](handle, line, offset)
            return written
        self.event(f"before {name} {where}")
        self.event(f"half {name} {where}", lambda: REAL[name](handle, line[: len(line) // 2], offset))
        written = REAL[name](handle, line, offset)
        self.event(f"after {name} {where}")
        return written

    def _write_text(self, path: Path, text: str, *args: Any, **kwargs: Any) -> int:
        where = self.named(path)
        if where is None:
            return WRITE_TEXT(path, text, *args, **kwargs)
        self.event(f"before write_text {where}")
        self.event(f"half write_text {where}", lambda: WRITE_TEXT(path, text[: len(text) // 2], *args, **kwargs))
        written = WRITE_TEXT(path, text, *args, **kwargs)
        self.event(f"after write_text {where}")
        return written

    def _save_file(self, tensors: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        where = self.named(path)
        self.event(f"before save_file {where}")
        SAVE_FILE(tensors, path, *args, **kwargs)
        size = os.stat(path).st_size  # noqa: PTH116
        self.event(f"half save_file {where}", lambda: os.truncate(path, size // 2))
        self.event(f"after save_file {where}")


# Processes


@dataclass(frozen=True)
class Ended:
    status: int

    @property
    def killed(self) -> bool:
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL

    @property
    def code(self) -> int:
        """As a shell says it."""
        return os.waitstatus_to_exitcode(self.status) % 256 if os.WIFEXITED(self.status) else -1


@dataclass(frozen=True)
class Forked:
    pid: int
    pipe: int
    """Open in the process and in whatever it started, so at its end when none of them is left."""

    def wait(self) -> Ended:
        """Until it and all that it started are gone."""
        try:
            self.until_gone()
        finally:
            ended = self.end()
        return ended

    def alive(self) -> bool:
        return not select.select([self.pipe], [], [], 0)[0]

    def end(self) -> Ended:
        """At once, where it has not ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pipe)
        return Ended(status)

    def until_gone(self) -> None:
        ready, _, _ = select.select([self.pipe], [], [], PATIENCE)
        assert ready, f"process {self.pid}, or one it started, hangs"
        assert os.read(self.pipe, 1) == b""


def fork(work: Callable[[], Any]) -> Forked:
    """A process of its own, and a group of its own, that does some work and exits with 0, or 1 after an error."""
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, io.UnsupportedOperation):
            stream.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Forked(pid, reading)
    code = 1
    try:
        os.setsid()
        os.close(reading)
        os.set_inheritable(writing, True)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass
class Command:
    """`fedlesam ARGUMENTS` as a process of its own."""

    process: Forked
    folder: Path

    def wait(self) -> tuple[int, str, str]:
        """Its exit code, and what it said."""
        ended = self.process.wait()
        return ended.code, self.said("out"), self.said("err")

    def said(self, where: str) -> str:
        return (self.folder / where).read_text(encoding="utf-8")


def fedlesam(place: Path, *arguments: str, **environment: str) -> Command:
    """The command line in a fork, its current folder and what it says in `place`."""
    place.mkdir(parents=True, exist_ok=True)

    def work() -> None:
        os.chdir(place)
        os.environ.update(environment)
        tempfile.tempdir = None
        for number, name in ((1, "out"), (2, "err")):
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(handle, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        sys.argv = ["fedlesam", *arguments]
        cli.main()

    return Command(fork(work), place)


def flags(config: RunConfig) -> list[str]:
    """The flags of a run that is `small`."""
    changed = {"algorithm": config.algorithm, **{name: getattr(config, name) for name in (*SMALL, *MORE)}}
    return [part for name, value in changed.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def wait_for(condition: Callable[[], Any], process: Forked | None = None) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never happened"
        assert process is None or process.alive(), "the process has ended before"
        time.sleep(0.02)


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
