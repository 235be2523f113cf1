"""Weights of convolutions in channels-last inside the model's vector: nobody else sees it. A CPU stands for a GPU."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from replayed import TapeRecorder
from torch import Tensor, nn
from worlds import assert_same_bits, federation, play, states, steps_in, training

from fedlesam.algorithms import CATALOGUE
from fedlesam.core import flat_model
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.graphs import Graphs
from fedlesam.core.order import Order
from fedlesam.core.slots import Algorithm
from fedlesam.federation import Federation
from fedlesam.probes.replay import lockstep
from fedlesam.rules.perturbation import LocalAscent
from fedlesam.runs.checkpoint import Checkpoints

SCHEDULE = [[0, 1], [0, 3], [1, 3]]


def convolutions(method: str = "") -> nn.Module:
    """Privacy refuses statistics, which would be sent without noise."""
    torch.manual_seed(2)
    norm = nn.GroupNorm(2, 4) if method.startswith("dp-") else nn.BatchNorm2d(4)
    tail = nn.Conv2d(4, 5, (2, 3)), nn.Flatten(), nn.Linear(30, 3)
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Tanh(), *tail).double()


def pictures() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 2, 6, 6, generator=draw, dtype=torch.float64), torch.randint(3, (n,), generator=draw))
        for n in (6, 9, 8, 12)
    ]


def made(method: Any, **given: Any) -> Federation:
    model = convolutions(method if isinstance(method, str) else "")
    return federation(method, model=model, clients=pictures(), local=training(epochs=2, momentum=0.5), **given)


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_model, "REORDERED", {"cpu"})


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("method", CATALOGUE)
def test_all_that_is_known_is_that_of_the_plain_order(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding: norms add in another order."""
    plain = made(method)
    assert plain._flat.order is None
    monkeypatch.setattr(flat_model, "REORDERED", {"cpu"})
    other = made(method)
    any_order = not any(rule.requires_order for rule in other.algorithm.rules)
    assert (other._flat.order is not None) is any_order
    assert any(not torch.equal(a, b) for a, b in [(plain._flat.weights, other._flat.weights)]) is any_order
    close(states(play(plain, SCHEDULE)), states(play(other, SCHEDULE)))


@pytest.mark.usefixtures("turned")
@pytest.mark.parametrize("method", ["fedavg", "fedsmoo", "fedlesam-s", "fedsol", "random-step"])
def test_recorded_steps_have_the_bits_of_steps(method: str) -> None:
    one, other = made(method), made(method)
    other._flat.graphs = graphs = Graphs(other._flat.device, other._flat.state, TapeRecorder)
    for fed in (one, other):
        play(fed, SCHEDULE)
    assert_same_bits(states(one), states(other))
    assert graphs.recorded


@pytest.mark.usefixtures("turned")
def test_weights_and_gradients_are_channels_last_and_never_move() -> None:
    fed = made("fedsam")
    flat, places = fed._flat, set()
    play(fed, [[0, 1]])
    for client in (0, 1):
        steps = steps_in(fed, client, flat)
        for _ in range(2):
            next(steps)
            kernels = [p for p in flat.parameters if p.ndim == 4]
            assert len(kernels) == 2
            for p in kernels:
                assert p.grad is not None
                assert p.is_contiguous(memory_format=torch.channels_last)
                assert p.grad.is_contiguous(memory_format=torch.channels_last)
            places.add(tuple(t.data_ptr() for p in flat.parameters for t in (p, p.grad) if t is not None))
        steps.close()
    assert len(places) == 1


@pytest.mark.usefixtures("turned")
def test_two_workers_have_the_bits_of_one() -> None:
    one, two = made("fedlesam-s"), made("fedlesam-s", workers=2)
    try:
        for fed in (one, two):
            play(fed, SCHEDULE)
        assert_same_bits(states(one), states(two))
    finally:
        two.close()


@pytest.mark.parametrize("back", [False, True], ids=["from plain", "to plain"])
def test_a_checkpoint_of_the_one_is_resumed_by_the_other(
    back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: Sequence[set[str]] = [{"cpu"}, set()] if back else [set(), {"cpu"}]
    monkeypatch.setattr(flat_model, "REORDERED", kinds[0])
    first = play(made("fedlesam-s"), SCHEDULE[:2])
    Checkpoints(tmp_path).save(first)
    monkeypatch.setattr(flat_model, "REORDERED", kinds[1])
    second = made("fedlesam-s")
    assert Checkpoints(tmp_path).load(second) == 2
    assert_same_bits(states(first), states(second))
    close(states(play(first, SCHEDULE[2:])), states(play(second, SCHEDULE[2:])))


@pytest.mark.parametrize("method", ["fedsam", "fedlesam"])
def test_a_probe_sees_the_plain_order(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = play(made(method), SCHEDULE)
    monkeypatch.setattr(flat_model, "REORDERED", {"cpu"})
    other = play(made(method), SCHEDULE)
    assert other.replica().order is not None
    for one, two in zip(lockstep(plain, [0, 1]), lockstep(other, [0, 1]), strict=True):
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a.v, b.v, rtol=1e-9, atol=1e-11)
            assert (a.e is None) == (b.e is None)
            if a.e is not None and b.e is not None:
                torch.testing.assert_close(a.e, b.e, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("turned")
def test_another_process_gets_the_same_weights() -> None:
    flat = FlatModel(convolutions().float(), "bf16-pure", reorder=True)
    copied = pickle.loads(pickle.dumps(flat))
    assert copied.order is not None
    assert torch.equal(flat.weights, copied.weights)
    assert torch.equal(flat.plain_weights(), copied.plain_weights())


@dataclass(frozen=True)
class ByColumn(LocalAscent):
    requires_order = True


@pytest.mark.usefixtures("turned")
def test_a_rule_may_require_the_plain_order() -> None:
    assert made(Algorithm(ByColumn(0.1)))._flat.order is None
    assert made(Algorithm(LocalAscent(0.1)))._flat.order is not None


def test_on_a_cpu_the_order_is_plain() -> None:
    assert FlatModel(convolutions(), reorder=True).order is None
    assert FlatModel(convolutions().to("meta"), reorder=True).order is not None


def test_turned_and_turned_back() -> None:
    order = Order([torch.Size((3,)), torch.Size((2, 3, 1, 2)), torch.Size((2, 2))], [False, True, False])
    plain = torch.arange(19.0)
    turned = order.inward(plain, torch.empty(19))
    assert turned.tolist() == [0, 1, 2, 3, 5, 7, 4, 6, 8, 9, 11, 13, 10, 12, 14, 15, 16, 17, 18]
    assert torch.equal(order.outward(turned, torch.empty(19)), plain)
    for one, other in zip(order.views(turned), order.plain_views(plain), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("turned")
def test_a_model_that_is_loaded_computes_what_the_module_does() -> None:
    """As an evaluation does."""
    module, x = convolutions(), pictures()[0][0]
    plain = nn.utils.parameters_to_vector(module.parameters()).detach() * 1.5
    flat = FlatModel(convolutions(), reorder=True)
    flat.load(plain, {})
    nn.utils.vector_to_parameters(plain, module.parameters())
    assert torch.equal(flat.plain_weights(), plain)
    torch.testing.assert_close(flat.forward(x), module(x))
