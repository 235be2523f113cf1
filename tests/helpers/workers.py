"""Federations on several workers, and the processes that these are."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from worlds import SCHEDULE, assert_same_bits, federation, mlp, samples, snapshot

from fedlesam.federation import Federation

PATIENCE = 120
"""Seconds until a real process counts as stuck; the machine may be busy."""


def children(parent: int) -> set[int]:
    """The living processes that `parent` started."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, father = stat.read_text().rpartition(")")[2].split()[:2]
            if int(father) == parent and state != "Z":
                found.add(int(stat.parent.name))
    return found


def trackers() -> set[int]:
    """multiprocessing's resource tracker lives as long as this process."""
    found = set()
    for pid in children(os.getpid()):
        with contextlib.suppress(OSError):
            if b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(true: Any, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def network(seed: int = 0) -> nn.Module:
    """BatchNorm and dropout: what a worker could get wrong."""
    hidden = mlp((5, 6), torch.float32, seed)
    return nn.Sequential(hidden, nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh(), mlp((6, 3), torch.float32, seed + 1))


TEST = samples((4300,), dtype=torch.float32)[0]
"""Nine batches of evaluation."""
EVERYBODY = range(6)


def make(name: str = "fedlesam-s", **settings: Any) -> Federation:
    given = {"model": network(), "clients": samples(dtype=torch.float32), "test": TEST, "per_client": True}
    return federation(name, **{**given, "threads": 1, **settings})


def rounds(fed: Federation, schedule: Any = (*SCHEDULE[:4], EVERYBODY, EVERYBODY)) -> list[dict[str, Any]]:
    with fed:
        return [{**fed.round(active).as_dict(), "seconds": None} for active in schedule]


def same(one: Federation, other: Federation) -> None:
    """The global model and the server's state; pinned memories are not all here."""
    left, right = snapshot(one), snapshot(other)
    shared = [name for name in left if not name.startswith("client")]
    assert_same_bits({name: left[name] for name in shared}, {name: right[name] for name in shared})
    assert_same_bits({name: left[name] for name in right}, right)
