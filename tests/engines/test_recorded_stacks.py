"""Recorded steps and rules of stacks: the same bits as unrecorded ones, and nobody's own Python is frozen."""

import gc
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedlesam as fl
from fedlesam.algorithms import CATALOGUE, example
from fedlesam.core.slots import AffineStep, Correction
from fedlesam.engines import _mapped, _replay
from fedlesam.engines.stacked import StackedEngine
from fedlesam.federation import Federation
from fedlesam.rules import DualBias, GlobalAscent

NEVER = 10**9


def federation(
    method: Any, sizes: tuple[int, ...], model: nn.Module | None = None, engine: Any = "stacked", **more: Any
) -> Federation:
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)) for n in sizes]
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    local = fl.LocalTraining(**{"lr": 0.2, "epochs": 2, "batch_size": 5, **more.pop("local", {})})
    how = fl.Execution(engine=engine, threads=1)
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
    engine = made._local_engine
    assert isinstance(engine, StackedEngine)
    return sum(program.run is not None for program in engine.step._programs)


def test_a_step_is_recorded_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mapped, "FROM", 8)
    made = federation("fedavg", (10,) * 6)
    counts = [(made.round(), programs(made))[1] for _ in range(4)]
    assert counts == [0, 0, 1, 1]


def test_rows_that_come_in_another_order_are_not_mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a client remembers anything, its rule gives no bias: then e comes first among the rows, later the bias."""
    record(monkeypatch, True)
    method = fl.Algorithm(perturbation=GlobalAscent(rho=0.05), correction=DualBias(lam=0.1))
    local = {"lr": 0.1, "epochs": 2}
    plain, stacked = (federation(method, (10,) * 6, local=local, engine=engine) for engine in ("plain", "stacked"))
    for _ in range(6):
        plain.round(), stacked.round()
        torch.testing.assert_close(stacked.weights, plain.weights, rtol=0, atol=1e-4)


def test_what_is_kept_for_a_recording_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, True)
    made = federation("scaffold", (10,) * 6)
    first = weakref.ref(made.state.weights.untyped_storage())
    for _ in range(4):
        made.round()
    gc.collect()
    assert first() is None


def test_not_more_forms_are_kept_than_are_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks of many sizes; those that come back are recorded, and used again."""
    monkeypatch.setattr(_mapped, "FROM", 4)
    monkeypatch.setattr(_mapped, "MOST", 2)
    made = federation("fedavg", (10,) * 6)
    for number in range(12):
        made.round(list(range(2 + number % 5)) if number < 8 else [0, 1, 2])
    engine = made._local_engine
    assert isinstance(engine, StackedEngine)
    assert len(engine.step._programs) == 2 and engine.step._programs[-1].run is not None


class Reading(Correction):
    """A rule of ours, as far as the engine can tell, that reads a number: a map allows it, a recording does not."""

    __module__ = "fedlesam.rules"

    def next_client_state(self, before: Any, broadcast: Any, result: Any) -> dict[str, Tensor]:
        return {"c": result.update * (1.0 if float(result.lr) > 0 else 2.0)}


def test_what_cannot_be_recorded_is_just_called(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for recorded in (True, False):
        with monkeypatch.context() as patch:
            record(patch, recorded)
            found.append(bits(federation(fl.Algorithm(correction=Reading()), (10,) * 6)))
    assert all(map(torch.equal, *found))


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
    """A rule of somebody's own, with a number that somebody changes."""

    scale: ClassVar[list[float]] = [0.0]

    def prepare(self, anchor: Tensor, client_state: Any, server_state: Any) -> Any:
        return AffineStep(1.0, 0.0, torch.full_like(anchor, self.scale[0]))


def falling() -> Callable[[Tensor, Tensor], Tensor]:
    calls = iter(range(NEVER))
    return lambda outputs, y: F.cross_entropy(outputs, y) / (1 + next(calls))


def own_model(whose: str) -> nn.Module:
    torch.manual_seed(0)
    if whose == "model":
        return Counting()
    layers = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.1), nn.Linear(8, 3))
    if whose == "graph":
        return torch.fx.symbolic_trace(layers)
    if whose == "forward":
        layers.forward = MethodType(lambda self, x: nn.Sequential.forward(self, x), layers)  # type: ignore[method-assign]
    if whose == "hook":
        layers.register_forward_hook(lambda *_: None)
    return layers


@pytest.mark.parametrize("whose", ["model", "loss", "loss-object", "rule", "hook", "global-hook", "forward", "graph"])
def test_what_is_somebodys_own_is_not_recorded(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python may do another thing in the next step."""
    record(monkeypatch, True)
    torch.manual_seed(0)
    method = fl.Algorithm(correction=Own()) if whose == "rule" else fl.Algorithm()
    losses = {"loss": falling(), "loss-object": nn.CrossEntropyLoss(label_smoothing=0.1)}
    task = fl.Task.supervised(losses[whose]) if whose in losses else fl.Task.classification()
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: None) if whose == "global-hook" else None
    try:
        made = federation(method, (10,) * 6, model=own_model(whose), task=task)
        for _ in range(3):
            made.round()
    finally:
        if everywhere is not None:
            everywhere.remove()
    assert programs(made) == 0


def test_a_rule_of_ones_own_is_asked_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, True)
    monkeypatch.setattr(Own, "scale", [0.0])
    plain, stacked = (
        federation(fl.Algorithm(correction=Own()), (10,) * 6, engine=engine) for engine in ("plain", "stacked")
    )
    for number in range(4):
        Own.scale[0] = 0.1 * number
        plain.round(), stacked.round()
    torch.testing.assert_close(stacked.weights, plain.weights, rtol=0, atol=1e-5)


def test_a_setting_that_changes_is_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, True)
    plain, stacked = (federation("fedavg", (10,) * 6, model=own_model(""), engine=e) for e in ("plain", "stacked"))
    for made in (plain, stacked):
        made.round()
        made._flat.module[1].negative_slope = 0.9  # type: ignore[index]
        made.round()
    torch.testing.assert_close(stacked.weights, plain.weights, rtol=0, atol=1e-5)
    assert programs(stacked) == 2
