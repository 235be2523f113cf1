"""The rendezvous of a cluster run: a common store, a name for this start, and the host of every rank."""

import contextlib
import datetime
import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

LOG_EVERY = 60.0
"""Seconds between two log lines about missing processes."""

GIVE_UP = 1800.0
"""Seconds of waiting after which the rendezvous fails, as in PyTorch."""

log = logging.getLogger("fedlesam")


class WorkerLost(RuntimeError):
    """A process of the run has died, is stopped or cannot be reached."""


def _place() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


class _Waiting:
    """Logs now and then what is missing, and raises WorkerLost in the end."""

    def __init__(self) -> None:
        self.began, self.logged = time.monotonic(), 0.0

    def check(self, who: str) -> None:
        waited = time.monotonic() - self.began
        if waited > GIVE_UP:
            raise WorkerLost(f"{who} did not come to {_place()} within {GIVE_UP / 60:g} minutes; start the run again")
        if waited - self.logged > LOG_EVERY:
            self.logged = waited
            log.warning("waiting for %s at %s, for %.0f s now", who, _place(), waited)


def open_store(size: int) -> Any:
    """Connect to the store that torchrun or rank 0 serves at MASTER_ADDR.

    Args:
        size: the number of processes.
    """
    with _logging(f"all {size} processes of this run"):
        try:
            return next(rendezvous("env://", timeout=datetime.timedelta(seconds=GIVE_UP)))[0]
        except dist.DistError as error:
            first = str(error).splitlines()[0]
            raise WorkerLost(f"the {size} processes of this run did not all come to {_place()} ({first})") from error


@contextlib.contextmanager
def _logging(who: str) -> Iterator[None]:
    """Log while this thread waits in a library."""
    done, waiting = threading.Event(), _Waiting()

    def watch() -> None:
        with contextlib.suppress(WorkerLost):
            while not done.wait(LOG_EVERY / 10):
                waiting.check(who)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def agree(store: Any, rank: int, size: int) -> tuple[str, list[str]]:
    """Agree on a name for this start of the run, and exchange the hosts of all ranks.

    After a restart torchrun's store still has what the former processes wrote into it. So the leader chooses a name and
    every process signs it; one that signed an old name is not among its signatures.

    Args:
        store: from `open_store`.
        rank: of this process.
        size: the number of processes.
    """
    signature, waiting = f"{uuid.uuid4().hex} {platform.node()}", _Waiting()
    if rank == 0:
        name = signature.split()[0]
        store.set("fedlesam", name)
        missing = list(range(1, size))
        while missing := [other for other in missing if not store.check([f"{name}/{other}"])]:
            if _exists(store, f"{name}/{missing[0]}"):
                continue
            numbers = ", ".join(str(other) for other in missing[:10]) + (" and others" if len(missing) > 10 else "")
            waiting.check(f"process {numbers} of {size}")
        signed = [signature, *(store.get(f"{name}/{other}").decode() for other in range(1, size))]
        store.set(f"{name}/signed", json.dumps(signed))
        return name, _hosts(signed)
    while True:
        if _exists(store, "fedlesam"):
            name = store.get("fedlesam").decode()
            store.set(f"{name}/{rank}", signature)
            if _exists(store, f"{name}/signed"):
                signed = json.loads(store.get(f"{name}/signed"))
                if signature in signed:
                    return name, _hosts(signed)
                time.sleep(0.1)
        waiting.check(f"process 0 of {size}, or another one it waits for,")


def _exists(store: Any, key: str) -> bool:
    """Whether the store has a key within a second."""
    try:
        store.wait([key], datetime.timedelta(seconds=1))
    except dist.DistStoreError:
        return False
    return True


def _hosts(signed: list[str]) -> list[str]:
    return [entry.partition(" ")[2] for entry in signed]
