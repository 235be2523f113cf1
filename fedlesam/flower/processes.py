"""Child processes that end with this one, however it ends, and with all that they have started."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

GRACE = 8.0
"""Seconds that processes have to end after SIGTERM."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Of Linux's prctl: a signal when the parent dies; orphans below this process become its children."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


class Child:
    """A process with its output in a file.

    Args:
        name: for messages.
        command: the program and its arguments.
        log: the file of its output.
        environment: its variables.
        piped: whether its standard output is read here, in place of the file.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str], piped: bool = False
    ) -> None:
        self.name, self.log = name, log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command],
                env={**environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else out,
                stderr=out,
                start_new_session=True,  # the terminal's Ctrl-C is for this process, which ends the others
                preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
            )

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def tail(self, lines: int = 12) -> str:
        """The last lines of its output.

        Args:
            lines: how many.
        """
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(line for line in text.splitlines()[-lines:])


@contextlib.contextmanager
def no_orphans(children: list[Child]) -> Iterator[None]:
    """End some processes, and everything below this one that they have left behind, at the end of the block.

    Args:
        children: may grow inside the block.
    """
    before = _descendants(os.getpid())
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in signals}
        _end(children, before)
        _prctl(PR_SET_CHILD_SUBREAPER, 0)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _end(children: Sequence[Child], before: set[int]) -> None:
    for child in children:
        if not child.ended:
            child.process.terminate()
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and not all(child.ended for child in children):
        time.sleep(0.1)
    while left := _descendants(os.getpid()) - before:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for child in children:
            child.process.poll()
        for process in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)
        time.sleep(0.05)
    for child in children:
        child.process.wait()
        if child.process.stdout is not None:
            child.process.stdout.close()


def _descendants(process: int) -> set[int]:
    """The processes below one, from /proc; empty where there is none."""
    found: set[int] = set()
    waiting = [process]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                below = {int(child) for child in (task / "children").read_text().split()} - found
                found |= below
                waiting += below
    return found
