"""Work in processes of its own, and the command line as one of them."""

import contextlib
import io
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlesam import cli
from fedlesam.runs import job

PATIENCE = 120
"""Seconds after which a process counts as hanging."""


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
    """The command line in a fork, its current folder and what it prints in `place`."""
    return in_fork(place, cli.main, ["fedlesam", *arguments], environment)


def in_fork(place: Path, main: Callable[[], Any], argv: list[str], environment: dict[str, str]) -> Command:
    """A program's main function in a fork, which spares its imports."""
    place.mkdir(parents=True, exist_ok=True)

    def work() -> None:
        os.chdir(place)
        os.environ.update(environment)
        tempfile.tempdir = None
        for number, name in ((1, "out"), (2, "err")):
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(handle, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        sys.argv = argv
        main()

    return Command(fork(work), place)


class ForkedJob:
    """Stands for the `Popen` of a sweep's job: a process of its own that need not import PyTorch again."""

    def __init__(self, _: list[str], *, pass_fds: list[int], stdout: Any, **__: Any) -> None:
        (handle,) = pass_fds
        said = stdout.fileno()
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            os.dup2(said, 1)
            os.dup2(said, 2)
            for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if number > 2 and number != handle:
                    with contextlib.suppress(OSError):
                        os.close(number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
            job.main(handle)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self) -> int:
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def wait_for(condition: Callable[[], Any], process: Forked | None = None) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never happened"
        assert process is None or process.alive(), "the process has ended before"
        time.sleep(0.02)
