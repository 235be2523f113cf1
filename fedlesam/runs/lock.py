"""One process per run folder. The lock is the system's, so it goes with the process that holds it, however it ends."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAME = "run.lock"
PATIENCE = 10
"""Tries, a tenth of a second apart: somebody may just be looking (`holder`), or dying."""
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)

_held: set[int] = set()


def _let_go() -> None:
    """A forked worker must not hold its parent's lock beyond the parent's death."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def locked(folder: Path, other: str = "choose another --out") -> Iterator[Callable[[int], None]]:
    """Hold a folder, or refuse it and name its holder. What it yields records the round from which on it works.

    Args:
        folder: The folder.
        other: What the user can do to have another one.
    """
    try:
        handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written to: {error.strerror}; {other}") from error
    _held.add(handle)
    try:
        _take(handle, folder, other)

        def tell(round: int) -> None:
            metadata = {"pid": os.getpid(), "host": platform.node(), "since": time.time(), "round": round}
            with contextlib.suppress(OSError):  # only a courtesy
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(metadata).encode(), 0)

        tell(0)
        yield tell
    finally:
        _held.discard(handle)
        os.close(handle)


def holder(folder: Path) -> dict[str, Any] | None:
    """The process that holds a folder: pid, host, and since when and which round it works. None if nobody does.

    Args:
        folder: The run folder.
    """
    with contextlib.suppress(OSError), (folder / NAME).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_holder(file.fileno())
    return None


def _take(handle: int, folder: Path, other: str) -> None:
    for attempt in range(PATIENCE):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt < PATIENCE - 1:
                time.sleep(0.1)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            logging.getLogger("fedlesam").warning(
                "%s: this file system has no locks; make sure that no second process uses the folder", folder
            )
            return
    who = _read_holder(handle)
    place = f" by process {who['pid']} on {who['host']}" if "pid" in who and "host" in who else ""
    raise ValueError(f"{folder}: is in use{place}; wait for it, stop it, or {other}")


def _read_holder(handle: int) -> dict[str, Any]:
    try:
        metadata = json.loads(os.pread(handle, 4096, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}
