"""A model that does something on its way, for tests that start the command as a user does: `--model faulty:Net`.

FAULT="what at" in the environment says what it does at which forward pass of the process that made it, or of a worker
that was forked from it (FAULT_IN=worker).
"""

import contextlib
import os
import signal
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

PASSES: Counter[int] = Counter()
"""By process."""


class Net(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        inputs = 1
        for size in shape:
            inputs *= size
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 4), nn.ReLU(), nn.Linear(4, classes))
        self.home = os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        here = "leader" if os.getpid() == self.home else "worker"
        if "FAULT" in os.environ and here == os.environ.get("FAULT_IN", "leader"):
            PASSES[os.getpid()] += 1
            what, _, at = os.environ["FAULT"].partition(" ")
            if PASSES[os.getpid()] == int(at):
                FAULTS[what]()
        return output


class Normed(nn.Module):
    """Its buffers, BatchNorm's statistics, are part of what a run must not lose."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        inputs = int(torch.tensor(shape).prod())
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def stop(signum: int) -> None:
    os.kill(os.getpid(), signum)


def stop_group(signum: int) -> None:
    """As a terminal does on Ctrl-C, and a cluster to every process of a job."""
    os.killpg(0, signum)


def wait() -> None:
    """Until killed; a sleep that signals do not end. MARK is a file that says so."""
    Path(os.environ["MARK"]).touch()
    while True:
        time.sleep(60)


def fill() -> None:
    """Write to FILL until the disk is full."""
    with contextlib.suppress(OSError), Path(os.environ["FILL"]).open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with contextlib.suppress(OSError):
                while file.write(b"0" * size):
                    pass


def die_once() -> None:
    """In one process of torchrun, unless MARK says that it has happened."""
    mark = Path(os.environ["MARK"])
    if os.environ.get("RANK") == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {
    "SIGINT": lambda: stop(signal.SIGINT),
    "SIGTERM": lambda: stop(signal.SIGTERM),
    "SIGINT-all": lambda: stop_group(signal.SIGINT),
    "SIGTERM-all": lambda: stop_group(signal.SIGTERM),
    "wait": wait,
    "fill": fill,
    "die-once": die_once,
}
