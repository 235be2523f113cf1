"""The work every system does, and how it is measured. Imported in each system's own environment; needs torch only.

The driver writes a job, a JSON file that the environment variable PEERS_JOB names. Every process of a run that imports
this module counts its backward passes into one file, a byte each, whichever system calls them.
"""

import functools
import itertools
import json
import os
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lenet import PARAMETERS, lenet, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLIENTS, ACTIVE, WORKERS = 20, 10, 2
BATCHES = {"lenet": 50, "mlp": 10}
LR, WEIGHT_DECAY, CLIP, RHO = 0.1, 1e-3, 10.0, 0.05


@dataclass(frozen=True)
class Job:
    folder: str
    """x.npy, y.npy, active.npy and order.npy."""
    out: str
    """Without its suffix: .json for the times, .npy for the last model, .steps for the count of backward passes."""
    rounds: int
    channels_last: bool
    flower_cpus: int = 1
    """Cores, and so threads, of each of Flower's clients."""
    method: str = "fedavg"
    model: str = "lenet"
    stacked: bool = False
    """Of ours: the stacked engine, in one process."""


@functools.cache
def job() -> Job:
    return Job(**json.loads(Path(os.environ["PEERS_JOB"]).read_text()))


@functools.cache
def data() -> tuple[Tensor, Tensor]:
    """Normalised pictures, clients x samples x 3 x 32 x 32, and their labels."""
    folder = Path(job().folder)
    return torch.from_numpy(np.load(folder / "x.npy")), torch.from_numpy(np.load(folder / "y.npy"))


@functools.cache
def active() -> list[list[int]]:
    """Who trains in each round, as our own package draws it, so that all systems train the same clients."""
    return np.load(Path(job().folder) / "active.npy").tolist()


@functools.cache
def orders() -> Tensor:
    """rounds x clients x samples: the order in which a client visits its samples."""
    return torch.from_numpy(np.load(Path(job().folder) / "order.npy"))


def batch_size() -> int:
    return BATCHES[job().model]


def make_model(name: str | None = None) -> nn.Module:
    name = name or job().model
    model = {"lenet": lenet, "mlp": mlp}[name]()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    return model


def first_model(name: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    return make_model(name)


def in_layout(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if job().channels_last else x


def loader(round: int, client: int) -> DataLoader[Any]:
    """What tutorials do, with the order given instead of shuffle=True, which costs the same."""
    x, y = data()
    return DataLoader(TensorDataset(x[client], y[client]), batch_size(), sampler=orders()[round, client].tolist())


def step(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Of plain SGD, or of SAM."""
    optimiser.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if job().method == "fedsam":
        parameters = list(model.parameters())
        with torch.no_grad():
            scale = RHO / (nn.utils.get_total_norm([p.grad for p in parameters]) + 1e-7)
            ascent = [p.grad * scale for p in parameters]
            torch._foreach_add_(parameters, ascent)
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, ascent)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimiser.step()
    return loss


def train(model: nn.Module, round: int, client: int) -> float:
    """One epoch, as a user of a system without a local loop of its own writes it."""
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), LR, weight_decay=WEIGHT_DECAY)
    losses = 0.0
    batches = loader(round, client)
    for x, y in batches:
        losses += step(model, optimiser, in_layout(x), y).item()
    return losses / len(batches)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


_marks: list[tuple[float, int]] = []


def mark() -> None:
    """Call once before the first round and after each."""
    steps = Path(f"{job().out}.steps")
    _marks.append((time.perf_counter(), steps.stat().st_size if steps.exists() else 0))


def finish(weights: Tensor, *packages: str) -> None:
    """Write what was measured."""
    pairs = list(itertools.pairwise(_marks))
    result = {
        "rounds": [after[0] - before[0] for before, after in pairs],
        "steps": [after[1] - before[1] for before, after in pairs],
        "versions": {name: version(name) for name in ("torch", *packages)},
    }
    np.save(f"{job().out}.npy", weights.numpy())
    Path(f"{job().out}.json").write_text(json.dumps(result))


def count(passes: int) -> None:
    """For a system whose backward passes are not those of autograd."""
    with Path(f"{job().out}.steps").open("ab") as file:
        file.write(b"." * passes)


def _count_backward_passes() -> None:
    backward = torch.autograd.backward
    file = os.open(f"{job().out}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @functools.wraps(backward)
    def counted(*arguments: Any, **named: Any) -> None:
        backward(*arguments, **named)
        os.write(file, b".")

    torch.autograd.backward = counted


if "PEERS_JOB" in os.environ:
    _count_backward_passes()
    torch.set_num_threads(1)
