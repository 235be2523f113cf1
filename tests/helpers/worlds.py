"""Tiny federations to test on: unequal clients, mini-batches, different numbers of epochs, a fixed participation."""

import copy
import dataclasses
import itertools
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedlesam import algorithms
from fedlesam.algorithms import Algorithm
from fedlesam.core import seeds
from fedlesam.core.batches import ClientData
from fedlesam.core.client import LocalStep, drain, local_update
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import ClientResult, Memory
from fedlesam.engines.settings import Execution, FailurePolicy
from fedlesam.federation import Federation

SIZES = (7, 12, 5, 9, 16, 3)
SCHEDULE = ((0, 3), (1, 2, 5), (0, 1, 4), (3,), (0, 2, 5), (1, 4), (0, 3, 5), (1, 2, 4))
"""Partial participation: client 3 rests for two rounds, client 5 for two, and so on."""
PAPER = [make.__name__.replace("_", "-") for make in algorithms.PAPER]
"""The names of the paper's methods."""


def slow_unless(quick: bool) -> list[pytest.MarkDecorator]:
    """The marks of a combination of settings: heavy ones are for `make test-slow`."""
    return [] if quick else [pytest.mark.slow]


def epochs(round: int, client: int) -> int:
    return 1 + (round + client) % 3


def steps_of(size: int, batch_size: int, epochs: int) -> int:
    """E_i of algorithms.md: epochs x ceil(n_i / batch)."""
    return epochs * -(-size // batch_size)


def mlp(widths: Sequence[int] = (5, 4, 3), dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Linear layers with tanh between; the weights are float32 numbers, so that both precisions start equal."""
    draw = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw) * 0.7)
    return model.to(dtype)


def samples(
    sizes: Sequence[int] = SIZES,
    features: int = 5,
    classes: int = 3,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[tuple[Tensor, Tensor]]:
    """Clients that differ in the place of their inputs and in their favourite class."""
    draw = torch.Generator().manual_seed(seed + 1)
    clients = []
    for i, size in enumerate(sizes):
        x = torch.randn(size, features, generator=draw) + torch.randn(features, generator=draw)
        y = torch.randint(classes, (size,), generator=draw)
        y[: size // 2] = i % classes
        clients.append((x.to(dtype), y))
    return clients


class Listed(Dataset[tuple[Tensor, Tensor]]):
    """A map-style Dataset that makes its samples one by one."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def training(**settings: Any) -> LocalTraining:
    """A local loop in which every setting matters."""
    tiny = {"lr": 0.2, "lr_decay": 0.9, "epochs": epochs, "batch_size": 4, "weight_decay": 0.05, "clip": 0.6}
    return LocalTraining(**{**tiny, **settings})


FAILURES = {"on_client_error": "on_error", "dropout": "dropout", "max_update_norm": "max_update_norm"}


def federate(*args: Any, **settings: Any) -> Federation:
    """A Federation whose failures and execution are given as plain settings; a client's error raises unless dropped."""
    failures = {new: settings.pop(old) for old, new in FAILURES.items() if old in settings}
    names = {field.name for field in dataclasses.fields(Execution)}
    execution = {name: settings.pop(name) for name in names if name in settings}
    policy = FailurePolicy(**{"on_error": "stop", **failures})
    return Federation(*args, failures=policy, execution=Execution(**execution), **settings)


def federation(
    algorithm: str | Algorithm,
    *,
    model: nn.Module | None = None,
    clients: Sequence[ClientData] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 7,
    local: LocalTraining | None = None,
    **settings: Any,
) -> Federation:
    return federate(
        mlp(dtype=dtype) if model is None else model,
        samples(dtype=dtype) if clients is None else clients,
        algorithms.example(algorithm) if isinstance(algorithm, str) else algorithm,
        local or training(),
        seed=seed,
        **settings,
    )


def play(fed: Federation, schedule: Sequence[Sequence[int]] = SCHEDULE) -> Federation:
    for active in schedule:
        fed.round(active)
    return fed


def answer_of(fed: Federation, client: int) -> ClientResult:
    """What a client would answer now, computed beside the federation."""
    with seeds.preserve_rng(torch.device("cpu")):
        return drain(steps_in(fed, client))


def steps_in(fed: Federation, client: int, flat: FlatModel | None = None) -> Generator[LocalStep, None, ClientResult]:
    """The local loop of one client in the federation's next round, on a model of its own."""
    return local_update(
        flat or FlatModel(copy.deepcopy(fed.model)),
        fed.clients[client],
        fed.algorithm,
        fed.local,
        fed.state.sent(fed.algorithm),
        fed.memories.get(client, Memory()),
        client=client,
        seed=fed.seed,
    )


def states(fed: Federation) -> dict[str, Tensor]:
    """Everything the federation knows, by name."""
    state = fed.state
    known: dict[str, Tensor] = {"round": torch.tensor(state.round), "weights": state.weights}

    def put(where: str, named: Mapping[str, Tensor]) -> None:
        known.update({f"{where}.{name}": tensor for name, tensor in named.items()})

    for slot in ("buffers", "perturbation", "correction", "server"):
        put(slot, getattr(state, slot))
    for client, memory in fed.memories.items():
        put(f"client {client}.perturbation", memory.perturbation)
        put(f"client {client}.correction", memory.correction)
    return known


def snapshot(fed: Federation) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in states(fed).items()}


def assert_same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name], other[name]), name
