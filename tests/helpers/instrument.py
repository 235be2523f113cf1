"""The calls that change the disk, replaced by ones that count; at the chosen one the process dies or the call fails."""

import contextlib
import errno
import functools
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import safetensors.torch
from power_loss import REAL, note_durable
from safetensors import SafetensorError

from fedlesam.core import disk
from fedlesam.data import splits
from fedlesam.engines.signals import StopFlag
from fedlesam.runs import folder as folders
from fedlesam.runs.checkpoint import Checkpoints

if TYPE_CHECKING:
    from harness import Case


@dataclass(frozen=True)
class Plan:
    """What happens at the `nth` event of a process whose label has this pattern in it."""

    pattern: str = ""
    nth: int = 1
    role: str = "leader"
    do: Literal["kill", "kill me", "fail", "full"] = "kill"
    """`kill me` kills only this process, be it a worker; `full` makes all later writes fail too."""
    errno: int = errno.ENOSPC


SAVE_FILE = safetensors.torch.save_file
WRITE_TEXT = pathlib.Path.write_text
WRITE_PARTS = disk.write_parts
NEEDS_SPACE = ("link", "mkdir", "create", "pwrite", "write_text", "save_file", "write_parts")


class Instrument:
    """In the process that is to fail, and in the workers it forks."""

    def __init__(self, case: "Case", plan: Plan | None) -> None:
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
        disk.write_parts = self._write_parts
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

    def _write_parts(self, path: Path, parts: Any) -> disk.FileDigest:
        where = self.named(path)
        self.event(f"before write_parts {where}")
        digest = WRITE_PARTS(path, parts)
        self.event(f"half write_parts {where}", lambda: os.truncate(path, digest.size // 2))
        self.event(f"after write_parts {where}")
        return digest
