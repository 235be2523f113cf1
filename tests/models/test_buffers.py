"""Buffers of every kind: what changes is averaged, what stays may be anything, what cannot be averaged is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import Tensor, nn
from worlds import SCHEDULE, federation, samples, training

from fedlesam.core.buffers import Unsupported, same_bits
from fedlesam.core.flat_model import FlatModel
from fedlesam.engines.stacked import NotStackable
from fedlesam.federation import Federation
from fedlesam.runs.checkpoint import Checkpoints

Change = Callable[["Net", Tensor], None]


class Net(nn.Module):
    """A layer, a buffer that its output depends on, and what happens to it in training."""

    def __init__(self, value: Tensor, change: Change | None = None, *, persistent: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.change = nn.Linear(5, 3).double(), change
        self.extra: Tensor
        self.register_buffer("extra", value, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        if self.training and self.change is not None:
            self.change(self, output.detach())
        seen = torch.view_as_real(self.extra) if self.extra.is_complex() else self.extra
        finite = seen.double().nan_to_num(0, 0, 0).clamp(-2, 2)
        return output * (1 + finite.sum())


def average(net: Net, output: Tensor) -> None:
    net.extra.mul_(0.9).add_(0.1 * output.mean(0))


def average_anew(net: Net, output: Tensor) -> None:
    net.extra = 0.9 * net.extra + 0.1 * output.mean(0)


def train(model: nn.Module, method: str = "fedsam", rounds: int = 3, **settings: Any) -> Federation:
    test = samples((20,), seed=9)[0]
    with federation(method, model=model, local=training(lr=0.05, epochs=2), test=test, **settings) as fed:
        for active in SCHEDULE[:rounds]:
            fed.round(active)
        return fed


@pytest.mark.parametrize("change", [average, average_anew])
def test_buffers_that_are_not_persistent_are_averaged_like_the_others(change: Change) -> None:
    """They leaked from client to client, so that the result was a matter of the number of workers."""
    kept = train(Net(torch.zeros(3).double(), change))
    fed = train(Net(torch.zeros(3).double(), change, persistent=False))
    assert fed.state.buffers["extra"].abs().sum() > 0.01
    assert not fed.state.buffers["extra"].requires_grad
    assert torch.equal(fed.state.buffers["extra"], kept.state.buffers["extra"])
    assert torch.equal(fed.weights, kept.weights)
    assert torch.equal(fed.model.get_buffer("extra"), fed.state.buffers["extra"])


@pytest.mark.parametrize("workers", [2, 3])
def test_on_any_number_of_workers(workers: int) -> None:
    alone = train(Net(torch.zeros(3).double(), average, persistent=False), threads=1)
    together = train(Net(torch.zeros(3).double(), average, persistent=False), workers=workers)
    assert torch.equal(alone.weights, together.weights)
    assert torch.equal(alone.state.buffers["extra"], together.state.buffers["extra"])


def test_a_layer_that_counts_while_it_is_evaluated() -> None:
    """What one batch of the test set changes, the next does not see, whoever scores it."""

    class Counts(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.extra += 1
            return super().forward(x)

    losses = []
    for workers in (1, 2):
        test = samples((1200,), seed=9)[0]
        model = Counts(torch.zeros(1), persistent=False)
        with federation("fedavg", model=model, test=test, threads=1, workers=workers) as fed:
            assert fed.state.buffers["extra"] == 0, "the first check does not count"
            losses.append(fed.round([0, 1]).test_loss)
    assert losses[0] == losses[1]


def test_they_are_in_checkpoints(tmp_path: Path) -> None:
    model = Net(torch.zeros(3).double(), average, persistent=False)
    whole = train(model, rounds=3)
    half = train(model, rounds=2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.load(half)
    checkpoints.save(half)
    fed = federation("fedsam", model=model, local=training(lr=0.05, epochs=2))
    assert Checkpoints(tmp_path).load(fed) == 2
    fed.round(SCHEDULE[2])
    assert torch.equal(fed.weights, whole.weights)


CONSTANT: dict[str, Tensor] = {
    "causal mask": torch.full((4, 4), -math.inf).triu(1),
    "mask of the smallest": torch.full((3,), torch.finfo(torch.float64).min, dtype=torch.float64),
    "a tenth, three times": torch.full((3,), 0.1, dtype=torch.float64),
    "nan": torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32),
    "complex": torch.polar(torch.ones(4), torch.arange(4.0)),
    "complex128": torch.polar(torch.ones(4).double(), torch.arange(4.0).double()),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "uint64": torch.tensor([1, 2], dtype=torch.uint64),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "int8": torch.tensor([-128, 3], dtype=torch.int8),
    "float16": torch.tensor([0.1, 60000.0], dtype=torch.float16),
    "bfloat16": torch.tensor([0.1, -math.inf], dtype=torch.bfloat16),
    "a number": torch.tensor(0.25),
    "a complex number": torch.tensor(1j),
    "empty": torch.empty(0, 3),
    "sliced": torch.linspace(0, 1, 100)[:64],
    "every second": torch.linspace(0, 1, 100)[::2],
    "expanded": torch.arange(3.0).expand(2, 3),
    "expanded number": torch.tensor(2.0).expand(2, 2),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "sparse": torch.eye(3).to_sparse(),
}
APART = {"complex", "complex128", "uint16", "uint64", "float8", "a complex number", "sparse"}
"""These do not travel."""


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", CONSTANT)
def test_buffers_that_do_not_change_may_be_anything(kind: str, persistent: bool, tmp_path: Path) -> None:
    value = CONSTANT[kind]
    model = Net(value if kind != "sparse" else value.to_dense(), persistent=persistent)
    if kind == "sparse":
        model.register_buffer("adjacency", value, persistent=persistent)
    fed = train(model, rounds=2, weighting="examples")
    plain = train(Net(value.to_dense() if kind == "sparse" else value.clone(), persistent=True), weighting="examples")
    assert ("extra" in fed.state.buffers) == (kind not in APART - {"sparse"})
    assert "adjacency" not in fed.state.buffers
    fed.round(SCHEDULE[2])
    assert torch.equal(fed.weights, plain.weights)
    assert same_bits(fed.model.get_buffer("extra"), model.extra)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.load(fed)
    checkpoints.save(fed)
    again = federation("fedsam", model=model, local=training(lr=0.05, epochs=2), weighting="examples")
    assert checkpoints.load(again) == 3
    if persistent and kind not in ("complex128", "sparse"):
        save_model(fed.model, str(tmp_path / "model.safetensors"))
        assert same_bits(load_file(tmp_path / "model.safetensors")["extra"], value)


@pytest.mark.parametrize("kind", ["causal mask", "nan", "complex", "expanded"])
def test_with_workers_and_stacked(kind: str) -> None:
    model = Net(CONSTANT[kind])
    alone = train(model, "fedavg", threads=1)
    assert torch.equal(train(model, "fedavg", workers=2).weights, alone.weights)
    stacked = train(model, "fedavg", engine="stacked")
    torch.testing.assert_close(stacked.weights, alone.weights, rtol=0, atol=1e-11)
    assert stacked.state.buffers.keys() == alone.state.buffers.keys()
    for name, value in stacked.state.buffers.items():
        assert same_bits(value, alone.state.buffers[name])


def test_the_stacked_engine_refuses_buffers_that_change() -> None:
    def count(net: Net, output: Tensor) -> None:
        net.extra += 1

    with pytest.raises(ValueError, match=r"buffers such as BatchNorm's; use the plain engine \(extra\)"):
        train(Net(torch.zeros(1), count, persistent=False), "fedavg", engine="stacked")

    def count_later(net: Net, output: Tensor) -> None:
        net.seen = getattr(net, "seen", 0) + 1
        if net.seen > 3:
            net.extra = net.extra + 1

    def average_later(net: Net, output: Tensor) -> None:
        count_later(net, output)
        if net.seen > 3:
            net.extra = net.extra + output.mean()

    for change in (count_later, average_later):
        with pytest.raises(NotStackable, match=r"use the plain engine \(extra\)"):
            train(Net(torch.zeros(1), change), "fedavg", engine="stacked", clients=samples((8,) * 6))


def turn(net: Net, output: Tensor) -> None:
    net.extra.mul_(1j)


def grow(net: Net, output: Tensor) -> None:
    net.extra = torch.cat([net.extra, net.extra[:1]])


def appear(net: Net, output: Tensor) -> None:
    net.register_buffer("cache", output.mean(0), persistent=False)


def vanish(net: Net, output: Tensor) -> None:
    net.linear.register_buffer("cache", None)


def halve(net: Net, output: Tensor) -> None:
    net.extra = net.extra.half()


def with_cache(model: Net) -> Net:
    model.linear.register_buffer("cache", torch.zeros(2))
    return model


CHANGING: dict[str, tuple[Callable[[], Net], str]] = {
    "complex": (
        lambda: Net(CONSTANT["complex"], turn),
        "the buffer extra changes .*torch.complex64 cannot be averaged",
    ),
    "longer": (
        lambda: Net(torch.zeros(2), grow),
        r"the buffer extra becomes \([34],\) of torch.float32 .*it was \(2,\)",
    ),
    "new": (lambda: Net(torch.zeros(2), appear), "the buffer cache appears while the model trains"),
    "gone": (lambda: with_cache(Net(torch.zeros(2), vanish)), "the buffer linear.cache disappears"),
    "other dtype": (lambda: Net(torch.zeros(2), halve), "the buffer extra becomes .* of torch.float16"),
}


@pytest.mark.parametrize("drop", ["drop", "stop"])
@pytest.mark.parametrize("case", CHANGING)
def test_what_cannot_be_averaged_and_changes_is_refused_by_name(case: str, drop: str) -> None:
    make, says = CHANGING[case]
    with pytest.raises(Unsupported, match=says):
        federation("fedavg", model=make())
    late = make()
    change, late.change = late.change, None
    fed = federation("fedavg", model=late, on_client_error=drop)
    fed._flat.module.change = change
    with pytest.raises(Unsupported, match=says):
        fed.round([0])


def test_a_buffer_with_infinities_may_change_elsewhere_but_not_explode() -> None:
    def learn(net: Net, output: Tensor) -> None:
        net.extra[0] += 1

    def explode(net: Net, output: Tensor) -> None:
        net.extra[0] = math.inf

    value = torch.tensor([0.0, -math.inf, math.nan])
    fed = train(Net(value, learn), "fedavg", rounds=1)
    assert fed.state.buffers["extra"][0] > 1
    assert same_bits(fed.state.buffers["extra"][1:], value[1:])
    with pytest.raises(ArithmeticError, match="the buffer extra is not finite"):
        train(Net(value, explode), "fedavg", rounds=1)


def test_frozen_parameters_that_change_are_refused() -> None:
    class Target(Net):
        def __init__(self, hidden: bool) -> None:
            super().__init__(torch.zeros(1))
            self.hidden = hidden
            self.target = nn.Parameter(torch.zeros(3).double(), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if self.training:
                with torch.no_grad():
                    (self.target.data if self.hidden else self.target).add_(output.mean(0))
            return output

    for hidden in (True, False):
        with pytest.raises(Unsupported, match="the frozen parameter target changes while the model trains"):
            federation("fedavg", model=Target(hidden))


def test_a_buffer_that_several_modules_share_is_one() -> None:
    model = Net(torch.zeros(3).double(), average)
    model.linear.register_buffer("same", model.extra)
    fed = train(model)
    alone = train(Net(torch.zeros(3).double(), average))
    assert list(fed.state.buffers) == ["extra"]
    assert torch.equal(fed.weights, alone.weights)
    assert fed.model.get_buffer("extra") is not fed.model.get_buffer("linear.same")
    made = fed.model
    assert made.get_buffer("extra") is made.get_buffer("linear.same")


def test_a_buffer_that_is_a_view_of_another() -> None:
    """In the model that trains it stays one; the model that is handed out can be saved."""
    whole = torch.zeros(6).double()
    model = Net(whole[:3], average)
    model.register_buffer("part", whole[1:4])
    fed = train(model, rounds=2)
    assert torch.equal(fed.state.buffers["part"][:2], fed.state.buffers["extra"][1:])
    assert fed.state.buffers["part"][:2].abs().sum() > 0


def test_a_parameter_that_is_a_buffer_too_goes_with_the_weights() -> None:
    model = Net(torch.zeros(1))
    model.register_buffer("alias", model.linear.weight)
    fed = train(model)
    assert "alias" not in fed.state.buffers
    assert torch.equal(fed.weights, train(Net(torch.zeros(1))).weights)
    assert fed.model.get_buffer("alias").abs().sum() > 0


def test_memory_shared_with_a_trained_parameter_is_refused() -> None:
    model = Net(torch.zeros(1))
    model.register_buffer("alias", model.linear.weight.detach()[0])
    with pytest.raises(
        Unsupported, match=r"(linear.weight and alias|alias and linear.weight) of the model lie in the same memory"
    ):
        FlatModel(model)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = nn.Parameter(tied[0].weight.T)
    with pytest.raises(Unsupported, match=r"0.weight and 1.weight of the model lie in the same memory"):
        FlatModel(tied)
    FlatModel(FlatModel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).module)
