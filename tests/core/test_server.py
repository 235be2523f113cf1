"""The mean over answers and the server step."""

import dataclasses
import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from worlds import SCHEDULE, answer_of, assert_same_bits, federation, play, samples, training

from fedlesam import NotFinite
from fedlesam.core.exact_sum import CHUNK, MOST, RANGE, SCALE, ExactSum
from fedlesam.core.messages import ClientResult, Memory
from fedlesam.core.reduction import Reduction
from fedlesam.core.slots import LocalResult, RoundResult
from fedlesam.rules import Adam, Average, ClientMomentum, ControlVariates, Dynamic, DynamicRegulariser


def answer(
    client: int, update: list[float], examples: int = 1, steps: int = 1, buffers: dict[str, Tensor] | None = None
) -> ClientResult:
    """One client's answer, with an upload in every slot."""
    d = torch.tensor(update)
    uploads = {"mu": 2 * d}, {"change": 4 * d}
    return ClientResult(client, examples, LocalResult(d, steps, 0.1), float(client), *uploads, buffers or {}, Memory())


def reduced(answers: list[ClientResult], by_examples: bool = False) -> Reduction:
    weight = sum(one.examples for one in answers) if by_examples else len(answers)
    reduction = Reduction(0, weight, by_examples=by_examples)
    for one in answers:
        reduction.add(one)
    return reduction


def everything(r: Reduction) -> dict[str, Tensor]:
    """All a server step reads of the answers."""
    numbers = torch.tensor(
        [r.steps, r.loss, r.divergence(torch.ones(4), torch.zeros(4)), r.weight], dtype=torch.float64
    )
    slots = {
        f"{slot} {k}": t for slot in ("perturbation", "correction") for k, t in r.mean(slot, torch.float64).items()
    }
    return {"update": r.mean_update(torch.float64), "numbers": numbers, **slots, **r.mean_buffers()}


entries = st.floats(-1e3, 1e3, width=32)
rows = st.lists(entries, min_size=4, max_size=4)


@given(st.lists(rows, min_size=1, max_size=6), st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_the_answers_does_not_matter(updates: list[list[float]], by_examples: bool, mix: Random) -> None:
    """Bitwise, for everything the server reads; and it is the mean, to the resolution of the sums."""
    answers = [
        answer(i, u, examples=i + 1, steps=i, buffers={"x": torch.tensor(u), "n": torch.tensor(i)})
        for i, u in enumerate(updates)
    ]
    one = everything(reduced(answers, by_examples))
    mix.shuffle(answers)
    assert_same_bits(one, everything(reduced(answers, by_examples)))
    weights = torch.tensor([float(i + 1) if by_examples else 1.0 for i in range(len(updates))], dtype=torch.float64)
    d = (weights[:, None] * torch.tensor(updates, dtype=torch.float64)).sum(0) / weights.sum()
    for name, factor in (("update", 1), ("perturbation mu", 2), ("correction change", 4)):
        torch.testing.assert_close(one[name], factor * d, atol=2.0**-40, rtol=1e-14)


def test_the_resolution_does_not_depend_on_the_sum() -> None:
    """In float32, 1e5 + 2^-10 - 1e5 is 0."""
    reduction = reduced([answer(i, [value]) for i, value in enumerate((1e5, 2.0**-10, -1e5))])
    got = reduction.mean_update(torch.float32)
    assert got.dtype == torch.float32
    assert float(got) == pytest.approx(2.0**-10 / 3, rel=1e-7)


def test_a_long_vector_is_summed_whole() -> None:
    """Longer than the pieces it is converted in, and no multiple of them."""
    size = 2 * CHUNK + 3
    x = torch.arange(size, dtype=torch.float64) / 8
    for wide in (False, True):
        total = ExactSum(x, wide)
        total.add(x, 1)
        total.add(-2 * x, 3)
        assert torch.equal(total.mean(1, torch.float64), -5 * x)


@given(st.lists(st.tuples(st.floats(-RANGE, RANGE, width=32), st.integers(1, 10**6)), min_size=1, max_size=6))
def test_a_sum_by_examples_is_exact_whichever_half_holds_an_entry(parts: list[tuple[float, int]]) -> None:
    total, asked = ExactSum(torch.zeros(1), wide=True), sum(weight for _, weight in parts)
    exact = sum(weight * round(x * SCALE) for x, weight in parts)
    for x, weight in parts:
        total.add(torch.tensor([x]), weight, abs(x) * asked)
    high, low = total.total.tolist()
    assert high * MOST + low == exact
    split = ExactSum(torch.zeros(1), wide=True)
    for x, weight in parts:
        split.add(torch.tensor([x]), weight)
    assert torch.equal(total.mean(asked, torch.float64), split.mean(asked, torch.float64))
    small = [abs(x) * asked < RANGE for x, _ in parts]
    assert high == 0 or not all(small)


@pytest.mark.parametrize("wide", [False, True])
def test_rows_are_added_as_one_by_one(wide: bool) -> None:
    """Small numbers are added up as doubles, large ones as integers; the last sum of doubles below would be wrong."""
    draw = torch.Generator().manual_seed(0)
    for largest, ends in ((0.25, (1.0, -1.0)), (RANGE / 4, (1.0, 1 / SCALE))):
        rows = (torch.rand(3, 2 * CHUNK // 3 + 5, generator=draw, dtype=torch.float64) * 2 - 1) * largest
        rows[:2, 0] = torch.tensor(ends, dtype=torch.float64) * largest
        each, at_once = ExactSum(rows[0], wide), ExactSum(rows[0], wide)
        for row in rows:
            each.add(row, 1)
        before = rows.clone()
        at_once.add_rows(rows, [1, 1, 1], largest)
        assert torch.equal(rows, before)
        assert torch.equal(at_once.total, each.total)


TOO_LARGE = "too large to be averaged"


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (math.nan, "update is not finite"),
        (math.inf, "update is not finite"),
        (-math.inf, "update is not finite"),
        (1e30, f"update has an entry of 1e\\+30, {TOO_LARGE}"),
        (5e6, f"update has an entry of 5e\\+06, {TOO_LARGE}"),
        (-5e6, f"update has an entry of 5e\\+06, {TOO_LARGE}"),
    ],
)
def test_what_does_not_fit_is_refused(bad: float, why: str) -> None:
    """Converted to integers these would be garbage, silently. What was added before stays as it was."""
    reduction = reduced([answer(0, [1.0, 2.0, 3.0, 4.0])])
    before = everything(reduction)
    with pytest.raises(NotFinite, match=f"^round 0, client 1: {why}") as refusal:
        reduction.add(answer(1, [0.0, bad, 0.0, 0.0]))
    assert (refusal.value.round, refusal.value.client) == (0, 1)
    assert_same_bits(everything(reduction), before)


@pytest.mark.parametrize(
    ("slot", "why"), [("perturbation", "perturbation/mu is not finite"), ("correction", "correction/change is not")]
)
def test_uploads_that_are_not_finite_are_refused(slot: str, why: str) -> None:
    """Before anything of the answer is added, the good update included."""
    reduction, name = reduced([answer(0, [1.0, 2.0, 3.0, 4.0])]), {"perturbation": "mu", "correction": "change"}[slot]
    before = everything(reduction)
    bad = dataclasses.replace(answer(1, [1.0] * 4), **{slot: {name: torch.tensor([0.0, math.nan, 0.0, 0.0])}})
    with pytest.raises(NotFinite, match=f"round 0, client 1: {why}"):
        reduction.add(bad)
    assert_same_bits(everything(reduction), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_buffers_that_are_not_finite_are_refused(bad: float) -> None:
    reduction = reduced([answer(0, [1.0] * 4, buffers={"x": torch.ones(2)})])
    before = everything(reduction)
    with pytest.raises(NotFinite, match="round 0, client 1: the buffer x is not finite"):
        reduction.add(answer(1, [1.0] * 4, buffers={"x": torch.tensor([1.0, bad])}))
    assert_same_bits(everything(reduction), before)


@pytest.mark.parametrize("examples", [1, 3, 50_000, MOST // 5])
@pytest.mark.parametrize("sign", [1, -1])
def test_no_sum_can_wrap(sign: int, examples: int) -> None:
    """As many as were asked of the largest that is let in: the sum is exact. One bit more is refused, from anybody."""
    asked, by_examples = 5, examples > 1
    limit = RANGE if by_examples else RANGE / asked
    largest = sign * math.nextafter(limit, 0)

    def alone(client: int, d: float) -> ClientResult:
        result = LocalResult(torch.tensor([d, 0.0], dtype=torch.float64), 1, 0.1)
        return ClientResult(client, examples, result, 0.0, {}, {}, {}, Memory())

    reduction = Reduction(3, asked * examples, by_examples=by_examples)
    with pytest.raises(NotFinite, match=f"round 3, client 7: update has an entry of .*{TOO_LARGE}"):
        reduction.add(alone(7, sign * limit))
    for client in range(asked):
        reduction.add(alone(client, largest))
    assert by_examples * examples < MOST // 8 or abs(int(reduction.sums["update"].total[0])) > 2**61
    assert reduction.mean_update(torch.float64).tolist() == pytest.approx([largest, 0.0], rel=1e-15)
    with pytest.raises(NotFinite, match=f"round 3, client 7: .*{TOO_LARGE}"):
        reduction.add(alone(7, sign * limit))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_many_examples_cost_neither_range_nor_resolution(examples: list[int], mix: Random) -> None:
    """Whatever fits into the plain mean fits into the weighted one; it is as fine, and no order matters."""
    draw = torch.Generator().manual_seed(mix.randrange(2**31))
    limit = math.nextafter(RANGE, 0)
    answers = []
    for client, size in enumerate(examples):
        d = torch.randn(4, generator=draw, dtype=torch.float64)
        d[3] = limit
        answers.append(ClientResult(client, size, LocalResult(d, 1, 0.1), 0.0, {}, {}, {}, Memory()))
    one = reduced(answers, by_examples=True).mean_update(torch.float64)
    mix.shuffle(answers)
    assert torch.equal(one, reduced(answers, by_examples=True).mean_update(torch.float64))
    expected = sum((a.examples * a.result.update for a in answers), torch.zeros(4).double()) / sum(examples)
    torch.testing.assert_close(one[:3], expected[:3], atol=2.0**-40, rtol=1e-14)
    exact = [sum(a.examples * round(float(a.result.update[k]) * 2**40) for a in answers) for k in range(3)]
    assert [round(float(m) * 2**40 * sum(examples)) for m in one[:3]] == pytest.approx(exact, rel=1e-15)
    assert float(one[3]) == pytest.approx(limit, rel=1e-15)


def test_plain_sums_are_as_they_were() -> None:
    """The bits of the plain mean: entries times 2^40, rounded, added as integers."""
    draw = torch.Generator().manual_seed(2)
    updates = [torch.randn(4, generator=draw) * 10.0**k for k in (-9, -3, 0, 3)]
    total = torch.stack([(u.double() * 2**40).round().long() for u in updates]).sum(0)
    got = reduced([answer(i, u.tolist(), examples=i + 1) for i, u in enumerate(updates)]).mean_update(torch.float64)
    assert torch.equal(got, total.double() / (4 * 2**40))


def test_many_examples_and_large_weights() -> None:
    """A regression whose weights are hundreds; 100,000 examples once left an update only 41.9 of range."""
    true, draw = torch.tensor([[300.0], [200.0], [100.0]]), torch.Generator().manual_seed(1)
    inputs = [torch.randn(50_000, 3, generator=draw) for _ in range(2)]
    local = training(lr=0.5, lr_decay=1.0, epochs=1, batch_size=50_000, weight_decay=0.0, clip=None)
    settings: dict[str, Any] = {
        "model": nn.Linear(3, 1, bias=False),
        "clients": [(x, x @ true) for x in inputs],
        "local": dataclasses.replace(local, loss=nn.functional.mse_loss),
    }
    fed = federation("fedavg", weighting="examples", **settings)
    for _ in range(3):
        assert fed.round().dropped is None
    torch.testing.assert_close(fed.weights, true.view(-1), atol=0.1, rtol=0)


def test_more_examples_than_can_be_weighted() -> None:
    """A liar's, most likely; the halves of the sums could wrap."""
    with pytest.raises(NotFinite, match=f"the clients asked have {MOST + 1} examples, at most {MOST} can be weighted"):
        reduced([answer(0, [1.0], examples=MOST), answer(1, [1.0], examples=1)], by_examples=True)


def test_the_largest_norm() -> None:
    """Of the update alone; the uploads are larger here. Exactly the limit passes."""
    reduction = Reduction(2, 3, max_norm=5.0)
    reduction.add(answer(0, [3.0, 4.0]))
    with pytest.raises(NotFinite, match=r"round 2, client 1: the update has norm 5\.01, above 5;"):
        reduction.add(answer(1, [3.0, 4.01]))
    assert reduction.mean_update(torch.float64).tolist() == [3.0, 4.0]


def test_plain_and_weighted_mean() -> None:
    answers = [answer(0, [1.0, 2.0], examples=1, steps=2), answer(1, [4.0, 8.0], examples=3, steps=5)]
    plain, weighted = reduced(answers), reduced(answers, by_examples=True)
    assert plain.mean_update(torch.float64).tolist() == [2.5, 5.0]
    assert weighted.mean_update(torch.float64).tolist() == [3.25, 6.5]
    assert plain.steps == weighted.steps == 3.5
    assert plain.loss == 0.5


def test_integer_buffers_by_their_maximum() -> None:
    answers = [
        answer(i, [0.0], buffers={"n": torch.tensor(k), "x": torch.tensor([float(k)])}) for i, k in enumerate((3, 9, 4))
    ]
    means = reduced(answers).mean_buffers()
    assert means["n"].dtype == torch.int64
    assert int(means["n"]) == 9
    assert means["x"].dtype == torch.float32
    assert float(means["x"]) == pytest.approx(16 / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reduction_leaves_vectors_alone(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -3.3], dtype=dtype)
    before, total = x.clone(), ExactSum(x)
    total.add(x, 2)
    total.add(x, 1)
    total.mean(3, dtype)
    assert torch.equal(x, before)
    torch.testing.assert_close(total.mean(3, dtype), x, atol=2.0**-40, rtol=0)


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "feddyn", "fedlesam-s"])
def test_divergence(method: str) -> None:
    """Mean over the active clients of norm(v_i - w_next) squared."""
    fed = federation(method)
    play(fed, SCHEDULE[:2])
    w, active = fed.weights, (0, 2, 4)
    ends = [w + answer_of(fed, i).result.update for i in active]
    record = fed.round(active)
    expected = sum(float((v - fed.weights).norm() ** 2) for v in ends) / 3
    assert expected > 1e-3
    assert record.divergence == pytest.approx(expected, rel=1e-10)


def test_train_loss_is_the_mean_over_clients() -> None:
    fed = federation("fedsam")
    losses = [answer_of(fed, i).loss for i in (1, 3)]
    assert fed.round([3, 1]).train_loss == pytest.approx(sum(losses) / 2, abs=1e-15)


def batch_norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("method", ["fedavg", "fedsmoo", "fedlesam-d"])
def test_buffers_are_averaged_over_the_active_clients(method: str) -> None:
    clients = samples((7, 12, 6, 9), dtype=torch.float32)
    fed = federation(method, model=batch_norm_net(), clients=clients)
    for active in ([0, 2], [1, 2, 3]):
        answers = [answer_of(fed, i) for i in active]
        fed.round(active)
        for name in ("1.running_mean", "1.running_var"):
            expected = torch.stack([a.buffers[name].double() for a in answers]).mean(0).float()
            assert fed.state.buffers[name].dtype == torch.float32
            torch.testing.assert_close(fed.state.buffers[name], expected, atol=0, rtol=1e-7)
            assert not torch.equal(answers[0].buffers[name], answers[1].buffers[name])
        tracked = [int(a.buffers["1.num_batches_tracked"]) for a in answers]
        assert len(set(tracked)) > 1
        assert int(fed.state.buffers["1.num_batches_tracked"]) == max(tracked)


def test_buffers_are_weighted_like_the_updates() -> None:
    clients = samples((6, 12), dtype=torch.float32)
    fed = federation("fedavg", model=batch_norm_net(), clients=clients, weighting="examples")
    one, other = (answer_of(fed, i).buffers["1.running_mean"].double() for i in (0, 1))
    fed.round([0, 1])
    torch.testing.assert_close(
        fed.state.buffers["1.running_mean"].double(), (6 * one + 12 * other) / 18, atol=1e-7, rtol=0
    )


def result(update: list[float], uploads: dict[str, torch.Tensor] | None = None) -> RoundResult:
    return RoundResult(
        torch.tensor([10.0, 20.0]), torch.tensor(update), steps=4.0, lr=0.5, share=0.25, uploads=uploads or {}
    )


def test_server_rules() -> None:
    assert Average(0.5).step({}, result([2.0, -4.0]))[0].tolist() == [11.0, 18.0]
    dynamic = Dynamic()
    w, state = dynamic.step({"H": torch.tensor([1.0, 1.0])}, result([2.0, -4.0]))
    assert state["H"].tolist() == [1.5, 0.0]
    assert w.tolist() == [13.5, 16.0]
    adam = Adam(0.1, 0.9, 0.99, 0.01)
    w, state = adam.step({"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0, 0.0])}, result([2.0, -4.0]))
    a, b = torch.tensor([1.1, -0.4]), torch.tensor([1.03, 0.16])
    torch.testing.assert_close(state, {"a": a, "b": b})
    torch.testing.assert_close(w, torch.tensor([10.0, 20.0]) + 0.1 * a / (b.sqrt() + 0.01))


def test_server_side_of_the_corrections() -> None:
    c = ControlVariates().aggregate({"c": torch.tensor([1.0, 1.0])}, result([0.0, 0.0], {"change": torch.ones(2) * 2}))
    assert c["c"].tolist() == [1.5, 1.5]
    m = ClientMomentum(0.1).aggregate({"m": torch.ones(2)}, result([2.0, -4.0]))
    assert m["m"].tolist() == [-1.0, 2.0]


def test_client_side_of_the_corrections() -> None:
    done = LocalResult(torch.tensor([2.0, -4.0]), steps=4, lr=0.5)
    server_state, client_state = {"c": torch.tensor([1.0, 3.0])}, {"c": torch.tensor([0.5, 0.5])}
    variates = ControlVariates()
    assert variates.prepare(torch.zeros(2), client_state, server_state).bias.tolist() == [0.5, 2.5]
    after = variates.next_client_state(client_state, server_state, done)
    assert after["c"].tolist() == [-1.5, -0.5]
    assert variates.upload(client_state, after)["change"].tolist() == [-2.0, -1.0]
    dynamic = DynamicRegulariser(0.5)
    turn = dynamic.prepare(torch.tensor([1.0, 2.0]), {"h": torch.tensor([3.0, 3.0])}, {})
    assert (turn.gain, turn.pull, turn.bias.tolist()) == (1.0, 0.5, [1.0, 0.5])
    assert dynamic.next_client_state({"h": torch.tensor([3.0, 3.0])}, {}, done)["h"].tolist() == [5.0, -1.0]


def test_nothing_is_changed_in_place() -> None:
    """A state that was broadcast or remembered keeps its values for ever."""
    fed = federation("fedsmoo", local=training(momentum=0.5))
    play(fed, SCHEDULE[:2])
    state, memories = fed.state, dict(fed.memories)
    tensors = [state.weights, *state.perturbation.values(), *state.server.values()]
    tensors += [t for m in memories.values() for t in (*m.perturbation.values(), *m.correction.values())]
    kept = [t.clone() for t in tensors]
    play(fed, SCHEDULE[2:6])
    assert all(torch.equal(t, k) for t, k in zip(tensors, kept, strict=True))
