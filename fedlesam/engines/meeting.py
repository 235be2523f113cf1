"""How the processes of a cluster run find each other: a store, a name for this meeting, and who is on which host."""

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

SPEAK = 60.0
"""Seconds of waiting after which, and then as often, it is said who is missing."""

GIVE_UP = 1800.0
"""Seconds of waiting after which the others are taken not to come, as in PyTorch."""

log = logging.getLogger("fedlesam")


class WorkerLost(RuntimeError):
    """A process of the run is gone."""


def place() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


class Patience:
    """Says now and then who is waited for, and gives up at last."""

    def __init__(self) -> None:
        self.began, self.said = time.monotonic(), 0.0

    def wait_for(self, who: str) -> None:
        waited = time.monotonic() - self.began
        if waited > GIVE_UP:
            raise WorkerLost(f"{who} did not come to {place()} within {GIVE_UP / 60:g} minutes; start the run again")
        if waited - self.said > SPEAK:
            self.said = waited
            log.warning("waiting for %s at %s, for %.0f s now", who, place(), waited)


def open_store(size: int) -> Any:
    """The store that torchrun or rank 0 keeps at MASTER_ADDR."""
    with _speaking(f"all {size} processes of this run"):
        try:
            return next(rendezvous("env://", timeout=datetime.timedelta(seconds=GIVE_UP)))[0]
        except dist.DistError as error:
            first = str(error).splitlines()[0]
            raise WorkerLost(f"the {size} processes of this run did not all come to {place()} ({first})") from error


@contextlib.contextmanager
def _speaking(who: str) -> Iterator[None]:
    """While this thread waits in a library."""
    there, patience = threading.Event(), Patience()

    def speak() -> None:
        with contextlib.suppress(WorkerLost):
            while not there.wait(SPEAK / 10):
                patience.wait_for(who)

    threading.Thread(target=speak, daemon=True).start()
    try:
        yield
    finally:
        there.set()


def agree(store: Any, rank: int, size: int) -> tuple[str, list[str]]:
    """A name for this meeting and the hosts of all ranks.

    After a restart torchrun's store still has all that the processes before wrote into it. The leader makes the name
    and everyone signs; one that signed an old name is not among its signatures.
    """
    mine, patience = f"{uuid.uuid4().hex} {platform.node()}", Patience()
    if rank == 0:
        name = mine.split()[0]
        store.set("fedlesam", name)
        missing = list(range(1, size))
        while missing := [other for other in missing if not store.check([f"{name}/{other}"])]:
            if _there(store, f"{name}/{missing[0]}"):
                continue
            numbers = ", ".join(str(other) for other in missing[:10]) + (" and others" if len(missing) > 10 else "")
            patience.wait_for(f"process {numbers} of {size}")
        signed = [mine, *(store.get(f"{name}/{other}").decode() for other in range(1, size))]
        store.set(f"{name}/signed", json.dumps(signed))
        return name, _hosts(signed)
    while True:
        if _there(store, "fedlesam"):
            name = store.get("fedlesam").decode()
            store.set(f"{name}/{rank}", mine)
            if _there(store, f"{name}/signed"):
                signed = json.loads(store.get(f"{name}/signed"))
                if mine in signed:
                    return name, _hosts(signed)
                time.sleep(0.1)
        patience.wait_for(f"process 0 of {size}, or another one it waits for,")


def _there(store: Any, key: str) -> bool:
    """Within a second."""
    try:
        store.wait([key], datetime.timedelta(seconds=1))
    except dist.DistStoreError:
        return False
    return True


def _hosts(signed: list[str]) -> list[str]:
    return [signature.partition(" ")[2] for signature in signed]
