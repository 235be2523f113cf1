"""Recorded steps and rules of stacks: the same bits as unrecorded ones, and nobody's own Python is frozen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedlesam as fl
from fedlesam.algorithms import CATALOGUE, example
from fedlesam.core.slots import Correction
from fedlesam.engines import _mapped, _replay
from fedlesam.federation import Federation

NEVER = 10**9


def federation(method: Any, sizes: tuple[int, ...], **more: Any) -> Federation:
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)) for n in sizes]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    local = fl.LocalTraining(lr=0.2, epochs=2, batch_size=5, **more.pop("local", {}))
    how = fl.Execution(engine="stacked", threads=1)
    return Federation(model, clients, method, local, active=4, execution=how, **more)


def record(monkeypatch: pytest.MonkeyPatch, from_the_first: bool) -> None:
    monkeypatch.setattr(_mapped, "FROM", 0 if from_the_first else NEVER)
    monkeypatch.setattr(_replay, "AGAIN", 1 if from_the_first else NEVER)


def bits(made: Federation, rounds: int = 4) -> list[Tensor]:
    for _ in range(rounds):
        made.round()
    kept = [t for client in sorted(made.memories) for t in made.memories[client].tensors()]
    return [made.weights, *made.state.flatten().values(), *kept]


@pytest.mark.parametrize("sizes", [(10,) * 6, (10, 7, 12, 5, 10, 9)], ids=["one-size", "sizes"])
@pytest.mark.parametrize("method", CATALOGUE)
def test_the_same_bits_recorded_or_not(method: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for recorded in (True, False):
        with monkeypatch.context() as patch:
            record(patch, recorded)
            found.append(bits(federation(example(method), sizes)))
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("local", [{"momentum": 0.5}, {"optimizer": "adamw"}, {"clip": 0.3, "clip_scope": "corrected"}])
@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedlesam"])
def test_the_same_bits_with_other_local_training(
    method: str, local: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for recorded in (True, False):
        with monkeypatch.context() as patch:
            record(patch, recorded)
            found.append(bits(federation(method, (10,) * 6, local=local)))
    assert all(map(torch.equal, *found))


def programs(made: Federation) -> int:
    return len(made._local_engine.step._programs)  # type: ignore[attr-defined]


def test_a_step_is_recorded_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mapped, "FROM", 8)
    made = federation("fedavg", (10,) * 6)
    counts = [(made.round(), programs(made))[1] for _ in range(4)]
    assert counts == [0, 0, 1, 1]


class Counting(nn.Module):
    """A model of somebody's own, which counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x) * (1.0 if self.calls < 20 else 0.5)
        return out


class Own(Correction):
    """A rule of somebody's own."""


def falling() -> Callable[[Tensor, Tensor], Tensor]:
    calls = iter(range(NEVER))
    return lambda outputs, y: F.cross_entropy(outputs, y) / (1 + next(calls))


@pytest.mark.parametrize("whose", ["model", "loss", "rule", "hook"])
def test_what_is_somebodys_own_is_not_recorded(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python may do another thing in the next step."""
    monkeypatch.setattr(_mapped, "FROM", 0)
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(10, 6, generator=draw), torch.randint(0, 3, (10,), generator=draw)) for _ in range(4)]
    torch.manual_seed(0)
    model: nn.Module = Counting() if whose == "model" else nn.Sequential(nn.Linear(6, 3))
    if whose == "hook":
        model.register_forward_hook(lambda *_: None)
    method = fl.Algorithm(correction=Own()) if whose == "rule" else fl.Algorithm()
    task = fl.Task.supervised(falling()) if whose == "loss" else None
    how = fl.Execution(engine="stacked", threads=1)
    local = fl.LocalTraining(epochs=2, batch_size=5)
    made = Federation(model, clients, method, local, execution=how, **({} if task is None else {"task": task}))
    for _ in range(3):
        made.round()
    assert programs(made) == 0
