"""Sums of a whole stack by one function: the bits that they have one by one, or they are not taken."""

import dataclasses
import gc
import math
import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from worlds import assert_same_bits

import fedlesam as fl
from fedlesam.core.exact_sum import CHUNK, RANGE, SCALE, WHOLE, ExactSum, in_fixed_point
from fedlesam.core.messages import ClientResult, Memory, Results
from fedlesam.core.reduction import Reduction, norms_of, uploads_of
from fedlesam.core.slots import LocalResult
from fedlesam.engines import _sums
from fedlesam.engines.stack import RARELY, Stack
from fedlesam.models import make_model

WIDTH = 6
Places = Sequence[int]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler gives back what it is given."""
    monkeypatch.setattr("torch._inductor.compile", lambda program, tensors: program)


def rows(count: int, size: int = 5, scale: float = 1.0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count * size)) * scale


def results_of(updates: Tensor, changes: Tensor) -> list[ClientResult]:
    norms = norms_of([updates, changes, changes[:, :1]])
    each = enumerate(zip(updates, changes, norms, strict=True))
    return [
        ClientResult(
            i, 3 + i, LocalResult(d, 4, 0.1), float(i), {}, {"change": c, "number": c[0]}, {}, Memory(), tuple(own)
        )
        for i, (d, c, own) in each
    ]


def everything(reduction: Reduction) -> tuple[dict[str, Tensor], Any]:
    totals = {name: total.total for name, total in reduction.sums.items()}
    return totals, reduction.summaries


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("by_examples", [False, True])
@pytest.mark.parametrize("whose", [(7, 7, 7, 7, 7, 7), (3, 1, 3, 0, 0), (2,), (0, 1, 2, 3, 4, 5)])
def test_they_are_the_sums_of_each_federation(whose: Places, by_examples: bool) -> None:
    """The last row of a federation's is not finite, so it is not there."""
    results: list[ClientResult | None] = [*results_of(rows(len(whose)), rows(len(whose), 4))]
    lost = len(whose) - 1 if len(whose) == 5 else None
    if lost is not None:
        results[lost] = None
    found = _sums.StackedSums()(results, whose, WIDTH, compile=True)
    assert list(found) == list(dict.fromkeys(whose))
    for number, own in found.items():
        expected = [r for r, w in zip(results, whose, strict=True) if w == number and r is not None]
        assert own.clients == expected
        assert own.sums["correction/number"].shape == ()
        one, other = Reduction(0, 100, by_examples), Reduction(0, 100, by_examples)
        assert one.add_many(own) == other.add_many(Results(expected)) == [None] * len(expected)
        assert one._takes(own) != by_examples
        assert_same_bits(everything(one)[0], everything(other)[0])
        assert everything(one)[1] == everything(other)[1]


def test_without_a_compiler_they_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(program: object, tensors: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch._inductor.compile", fails)
    for compile in (True, False):
        found = _sums.StackedSums()(results_of(rows(4), rows(4)), (0, 0, 1, 1), WIDTH, compile)
        assert [(len(own.clients), own.sums) for own in found.values()] == [(2, {}), (2, {})]


@pytest.mark.usefixtures("uncompiled")
def test_those_of_a_large_model_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sums, "MOST", WIDTH * 5 - 1)
    [own] = _sums.StackedSums()(results_of(rows(4), rows(4)), (0,) * 4, WIDTH, compile=True).values()
    assert own.sums == {}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("value", "settings", "why"),
    [
        (math.nan, {}, "correction/change is not finite"),
        (math.inf, {}, "correction/change is not finite"),
        (RANGE, {}, "too large to be averaged"),
        (9000.0, {"max_norm": 1e-3}, "above 0.001"),
        (9000.0, {}, None),
    ],
)
def test_what_is_refused_one_by_one_is_refused(value: float, settings: dict[str, Any], why: str | None) -> None:
    """Above 8192 doubles do not hold the sums exactly."""
    changes = rows(4, 4)
    changes[1, 2] = value
    results = results_of(rows(4), changes)
    [own] = _sums.StackedSums()(results, (0,) * 4, WIDTH, compile=True).values()
    one, other = (Reduction(0, 4, **settings) for _ in range(2))
    assert not one._takes(own)
    refused = one.add_many(own)
    assert list(map(str, refused)) == list(map(str, other.add_many(Results(results))))
    assert (why or "None") in str(refused[1])
    assert_same_bits(everything(one)[0], everything(other)[0])


@pytest.mark.usefixtures("uncompiled")
def test_many_that_are_not_large_are_not_added_up_in_doubles() -> None:
    """Doubles hold each of them exactly, and two, but not the sum of all."""
    changes = rows(16, 4).double().sign() * 0.3 + rows(16, 4, 0.01).double() + 4000
    results = results_of(rows(16).double(), changes)
    [own] = _sums.StackedSums()(results, (0,) * 16, 16, compile=True).values()
    assert not Reduction(0, 16)._takes(own)
    one, other = ExactSum(changes[0]), ExactSum(changes[0])
    one.add_rows(changes, [1] * 16, 4001.0)
    for row in changes:
        other.add(row, 1)
    assert torch.equal(one.total, other.total)


@pytest.mark.usefixtures("uncompiled")
def test_another_stack_has_another_function() -> None:
    sums = _sums.StackedSums()
    for size, dtype in ((5, torch.float32), (5, torch.float64), (3, torch.float64)):
        updates = rows(4, size).to(dtype)
        [own] = sums(results_of(updates, updates), (0,) * 4, WIDTH, compile=True).values()
        assert own.sums["update"].shape == (size,)
        assert torch.equal(own.sums["update"], in_fixed_point(updates).sum(0))


def test_no_entry_is_above_a_norm() -> None:
    """A norm of single precision may be rounded down."""
    draw = torch.Generator().manual_seed(0)
    alone = torch.zeros(400, 9)
    alone[:, 4] = torch.rand(400, generator=draw) * 100
    for _, bound in norms_of([alone, alone]):
        assert bound > 0
    assert all(bound >= float(row.abs().max()) for row, (_, bound) in zip(alone, norms_of([alone, alone]), strict=True))


@pytest.mark.usefixtures("uncompiled")
def test_norms_that_are_missing_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [dataclasses.replace(result, norms=result.norms[:1]) for result in results_of(rows(3), rows(3))]
    reduction = Reduction(0, 3)
    assert not reduction._takes(Results(results, {name: total[0] for name, total in uploads_of(results).items()}))
    assert reduction.add_many(Results(results)) == [None] * 3


@given(st.lists(st.tuples(st.booleans(), st.floats(-2.0, 2.0, width=32)), min_size=1, max_size=5), st.booleans())
def test_whole_sums_and_vectors_are_added_in_any_order(parts: list[tuple[bool, float]], wide: bool) -> None:
    one, other = ExactSum(torch.zeros(2), wide), ExactSum(torch.zeros(2), wide)
    given = []
    for whole, value in parts:
        x = torch.tensor([value, -value / 3])
        other.add(x, 1, 0.0)
        if whole:
            given.append((fixed := torch.zeros(2, dtype=torch.float64) + in_fixed_point(x), fixed.clone()))
            one.add_whole(fixed)
        else:
            one.add(x, 1, 0.0)
    landed, anchor = torch.tensor([0.5, 1.0]), torch.tensor([0.25, -1.0])
    assert_same_bits({"mean": one.mean(3, torch.float32)}, {"mean": other.mean(3, torch.float32)})
    assert one.pull(3, landed, anchor) == other.pull(3, landed, anchor)
    assert torch.equal(one.total, other.total)
    assert all(torch.equal(now, before) for now, before in given), "what was given is not changed"


def test_the_pull_of_long_vectors() -> None:
    total, x = ExactSum(torch.zeros(CHUNK + 7, dtype=torch.float64)), rows(3, CHUNK + 7).double()
    for row in x:
        total.add(row, 1)
    moved = x[1] - x[2]
    expected = 2 * float(x.mean(0) @ moved) - float(moved @ moved)
    assert total.pull(3, x[1], x[2]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 33, 4810])
def test_the_compiled_function_is_exact(size: int, dtype: torch.dtype) -> None:
    """Halves are rounded as PyTorch rounds them, and sums come close to what doubles hold."""
    x = rows(16, size, WHOLE / SCALE / 64).to(dtype)
    x[:4] = torch.tensor([0.5, 1.5, -0.5, 2.5], dtype=dtype)[:, None] / SCALE
    results = [dataclasses.replace(r, correction={}) for r in results_of(x, x)]
    sums = _sums.StackedSums()
    whose = [0] * 5 + [1] * 9 + [2] * 2
    found = sums(results, whose, 20, compile=True)
    assert sums._program[1] is not None
    for number, own in found.items():
        total = ExactSum(x[0])
        for i, w in enumerate(whose):
            if w == number:
                total.add(x[i], 1)
        assert torch.equal(own.sums["update"].to(torch.int64), total.total)


def trained(method: str, engine: dict[str, Any], stack: bool) -> list[tuple[Tensor, list[Any]]]:
    draw = torch.Generator().manual_seed(0)
    data = [(torch.rand(n, 1, 4, 4, generator=draw), torch.randint(0, 3, (n,), generator=draw)) for n in (9, 7, 9, 4)]
    how = fl.Execution(threads=1, compile=True, **engine)
    shared = Stack(engine["stack_runs"], compile=True) if stack else None
    feds = [
        fl.Federation(make_model("mlp", (1, 4, 4), 3, 0), data, method, active=3, seed=i, execution=how, _stack=shared)
        for i in range(3)
    ]
    found: dict[int, Any] = {}

    def run(i: int) -> None:
        records = [feds[i].round() for _ in range(3)]
        found[i] = feds[i].weights, [(r.train_loss, r.divergence, r.bytes_up, r.backward_passes) for r in records]

    runs = [partial(run, i) for i in range(3)]
    if shared is not None:
        shared.run(runs)
    else:
        for one in runs:
            one()
    return [found[i] for i in range(3)]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize("method", ["fedavg", "fedlesam-s", "fedsmoo", "fedwmsam"])
def test_a_federation_has_the_same_bits_with_them(method: str, stack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows for three federations of three clients: the last is in two stacks."""
    engine = {"stack_runs": 8} if stack else {"engine": "stacked"}
    taken: list[bool] = []
    takes = Reduction._takes
    monkeypatch.setattr(Reduction, "_takes", lambda *a: taken.append(takes(*a)) or taken[-1])
    with_sums = trained(method, engine, stack)
    assert any(taken)
    monkeypatch.setattr(Reduction, "_takes", lambda *a: False)
    without = trained(method, engine, stack)
    for (one, facts), (other, same) in zip(with_sums, without, strict=True):
        assert_same_bits({"w": one}, {"w": other})
        assert facts == same


def test_garbage_is_looked_for_as_before_after_all_runs() -> None:
    at_first = gc.get_threshold()
    seen: list[tuple[int, int, int]] = []
    gc.set_threshold(601, *at_first[1:])
    try:
        Stack(4, compile=False).run([lambda: seen.append(gc.get_threshold())])
        after = gc.get_threshold()
    finally:
        gc.set_threshold(*at_first)
    assert seen == [(RARELY, *at_first[1:])]
    assert after == (601, *at_first[1:])
