"""FedLESAM's perturbation itself, and that it costs nothing."""

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle import Oracle
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worlds import SCHEDULE, epochs, federation, mlp, play, samples, states, steps_in, training

from fedlesam import algorithms
from fedlesam.algorithms import CATALOGUE, Algorithm
from fedlesam.core import client as local_loop
from fedlesam.core.client import LocalStep
from fedlesam.core.messages import ClientResult
from fedlesam.rules import (
    AffineStep,
    Average,
    ControlVariates,
    CorrectedAscent,
    Correction,
    Dynamic,
    DynamicRegulariser,
    GlobalAscent,
    LocalAscent,
    NoCorrection,
    Perturbation,
    PreviousStepAscent,
    ServerRule,
    State,
    Step,
)

OLD, NEW = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.0, 2.0, 5.0, 2.0])


def test_direction_sign_and_norm() -> None:
    """From the new global model back to the old one, norm rho over all entries."""
    e = GlobalAscent(0.6).round_perturbation(NEW, {"old": OLD}, {})
    assert e is not None
    torch.testing.assert_close(e, 0.6 * torch.tensor([1.0, 0.0, -2.0, 2.0]) / 3)
    assert torch.equal(OLD, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert torch.equal(NEW, torch.tensor([0.0, 2.0, 5.0, 2.0]))


def test_first_participation() -> None:
    assert GlobalAscent(0.6).round_perturbation(NEW, {}, {}) is None
    origin = GlobalAscent(0.6, first="origin").round_perturbation(NEW, {}, {})
    assert origin is not None
    torch.testing.assert_close(origin, -0.6 * NEW / NEW.norm())
    known = GlobalAscent(0.6, first="origin").round_perturbation(NEW, {"old": OLD}, {})
    assert torch.equal(known, GlobalAscent(0.6).round_perturbation(NEW, {"old": OLD}, {}))


@pytest.mark.parametrize("first", ["none", "origin"])
def test_zero_norm_means_no_perturbation(first: str) -> None:
    none = torch.zeros(4)
    for rule, anchor, known in (
        (GlobalAscent(0.6, first), NEW, {"old": NEW.clone()}),
        (GlobalAscent(0.6, first), none, {"old": none.clone()}),
        (GlobalAscent(0.6, "origin"), none, {}),
    ):
        e = rule.round_perturbation(anchor, known, {})
        assert e is not None
        assert torch.equal(e, none)


def test_first_origin_against_the_oracle() -> None:
    settings: dict[str, Any] = {"lr": 0.2, "lr_decay": 0.9, "batch_size": 4, "weight_decay": 0.05, "clip": 0.6}
    oracle = Oracle(
        "fedlesam", mlp(), samples(), epochs, seed=7, clip_scope="loss", rho=0.15, first="origin", **settings
    )
    for active in SCHEDULE[:4]:
        oracle.round(active)
    fed = play(federation(Algorithm(GlobalAscent(0.15, first="origin"))), SCHEDULE[:4])
    torch.testing.assert_close(fed.weights, oracle.states()["weights"], atol=1e-10, rtol=0)
    assert not torch.allclose(fed.weights, play(federation(Algorithm(GlobalAscent(0.15))), SCHEDULE[:4]).weights)


def first_step(fed: Any, client: int) -> LocalStep:
    return next(steps_in(fed, client))


@pytest.mark.parametrize("method", ["fedlesam", "fedlesam-s", "fedlesam-d", "fedlesam-m"])
def test_the_last_active_round_counts(method: str) -> None:
    """Client 0 is active in rounds 0 and 3: its old model is round 0's, not round 2's."""
    fed = federation(algorithms.get(method, rho=0.3))
    received = []
    for active in ([0, 1], [1, 2], [2]):
        received.append(fed.weights)
        fed.round(active)
    w = fed.weights
    for client, last in ((0, 0), (1, 1), (2, 2)):
        e = first_step(fed, client).e
        assert e is not None
        expected = received[last] - w
        torch.testing.assert_close(e, 0.3 * expected / expected.norm(), atol=1e-14, rtol=0)
        assert float(e.norm()) == pytest.approx(0.3, abs=1e-14)
        assert float(e @ (w - received[last])) < 0
    assert first_step(fed, 5).e is None


def test_the_perturbation_is_the_same_at_every_step_of_a_round() -> None:
    fed = play(federation(algorithms.get("fedlesam", rho=0.3)), SCHEDULE[:3])
    directions = [step.e.clone() for step in steps_in(fed, 4) if step.e is not None]
    assert len(directions) > 4
    assert all(torch.equal(directions[0], e) for e in directions)


def test_one_tensor_serves_all_clients_of_a_round() -> None:
    fed = federation("fedlesam")
    anchor = fed.state.weights
    fed.round([0, 2, 3])
    assert all(fed.memories[i].perturbation["old"] is anchor for i in (0, 2, 3))


@pytest.mark.parametrize("slots", [(), (ControlVariates(),), (DynamicRegulariser(0.2), Dynamic())])
def test_references_agree_under_full_participation(slots: tuple[Any, ...]) -> None:
    one, other = (
        federation(Algorithm(GlobalAscent(0.2, reference=reference), *slots))
        for reference in ("received", "previous-round")
    )
    everyone = [range(6)] * 4
    assert torch.equal(play(one, everyone).weights, play(other, everyone).weights)


def test_the_previous_round_differs_under_partial_participation_and_is_downloaded() -> None:
    received, previous = (
        federation(Algorithm(GlobalAscent(0.2, reference=reference))) for reference in ("received", "previous-round")
    )
    play(received, SCHEDULE[:3])
    play(previous, SCHEDULE[:2])
    anchor = previous.state.perturbation["old"]
    w = previous.weights
    e = first_step(previous, 4).e  # client 4 was never active, but the server sends it the last model
    assert e is not None
    torch.testing.assert_close(e, 0.2 * (anchor - w) / (anchor - w).norm(), atol=1e-14, rtol=0)
    record = previous.round(SCHEDULE[2])
    assert record.bytes_down == 2 * w.nbytes * len(SCHEDULE[2])
    assert all(memory.nbytes == 0 for memory in previous.memories.values())
    assert not torch.allclose(previous.weights, received.weights, atol=1e-5)


@dataclass(frozen=True)
class DirectForm(Perturbation):
    """FedLESAM as the paper writes it: v is kept, and the gradient of every step is taken at v + e."""

    gradient = "previous"
    rho: float = 0.1

    def begin(self, anchor: Tensor, client_state: State) -> State:
        if "old" not in client_state:
            return {"e": torch.zeros_like(anchor)}
        back = client_state["old"] - anchor
        return {"e": self.rho * back / back.norm()}

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return step.client_state["e"]

    def next_client_state(self, anchor: Tensor, client_state: State) -> State:
        return {"old": anchor}


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("scope", ["loss", "corrected"])
@pytest.mark.parametrize(
    ("correction", "server"),
    [(NoCorrection(), Average()), (ControlVariates(), Average()), (DynamicRegulariser(0.2), Dynamic())],
    ids=["fedlesam", "fedlesam-s", "fedlesam-d"],
)
def test_the_shifted_form_is_the_direct_form(
    correction: Correction, server: ServerRule, scope: str, momentum: float
) -> None:
    local = training(clip_scope=scope, momentum=momentum, clip=0.6)
    shifted, direct = (
        play(federation(Algorithm(rule, correction, server), local=local), SCHEDULE)
        for rule in (GlobalAscent(0.3), DirectForm(rho=0.3))
    )
    client_state, theirs = states(shifted), states(direct)
    assert client_state.keys() == theirs.keys()
    for name in client_state:
        torch.testing.assert_close(client_state[name], theirs[name], atol=1e-10, rtol=0)


def counted(steps: Generator[LocalStep, None, ClientResult]) -> Counter[str]:
    """The operations of two local steps, by name."""
    next(steps)
    next(steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        next(steps)
        next(steps)
    steps.close()
    return Counter(event.name for event in profile.events())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("method", "base"), [("fedlesam", "fedavg"), ("fedlesam-s", "scaffold"), ("fedlesam-d", "feddyn")]
)
def test_fedlesam_does_the_operations_of_its_base(method: str, base: str, momentum: float) -> None:
    local = training(epochs=5, momentum=momentum)
    one, other = (play(federation(name, local=local), [[0, 1], [0, 2]]) for name in (method, base))
    assert first_step(one, 0).e is not None
    operations = counted(steps_in(one, 0))
    assert operations["aten::addmm"] > 0
    assert operations == counted(steps_in(other, 0))


def test_the_profiler_sees_a_second_pass() -> None:
    """The comparison above can fail."""
    one, other = (play(federation(name, local=training(epochs=5)), [[0, 1]]) for name in ("fedsam", "fedavg"))
    assert counted(steps_in(one, 0))["aten::addmm"] == 2 * counted(steps_in(other, 0))["aten::addmm"]


class Allocations(TorchDispatchMode):
    """Keeps every new tensor of one size, so that none can hide in another's freed memory."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.kept: list[Tensor] = []
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().nbytes() >= self.numel * t.element_size():
                known = given | {k.untyped_storage().data_ptr() for k in self.kept}
                if t.untyped_storage().data_ptr() not in known:
                    self.kept.append(t)
                    self.names.append(str(func))
        return out


WIDE = 400


@pytest.mark.parametrize("scope", ["loss", "corrected"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("method", CATALOGUE)
def test_a_step_allocates_nothing_but_autograds_gradients(
    method: str, momentum: float, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descent makes no model-sized tensor; the whole step makes one per backward pass, the gradient."""
    draw = torch.Generator().manual_seed(3)
    model = nn.Linear(WIDE, 2, bias=False)
    clients = [(torch.randn(9, WIDE, generator=draw), torch.randint(2, (9,), generator=draw)) for _ in range(2)]
    local = training(epochs=2, batch_size=1, clip_scope=scope, momentum=momentum)
    fed = play(federation(method, model=model, clients=clients, local=local), [[0, 1], [0]])

    inside: list[int] = []
    original = local_loop.move

    def watched(r: local_loop.ClientRound, number: int) -> None:
        with Allocations(2 * WIDE) as mode:
            original(r, number)
        inside.append(len(mode.kept))

    monkeypatch.setattr(local_loop, "move", watched)
    steps = steps_in(fed, 1)
    next(steps)
    next(steps)
    with Allocations(2 * WIDE) as mode:
        next(steps)
        next(steps)
    steps.close()
    assert inside == [0, 0, 0]
    assert len(mode.kept) == 2 * fed.algorithm.perturbation.passes, mode.names


def test_the_allocation_counter_sees_a_temporary() -> None:
    v = torch.zeros(50)
    with Allocations(50) as mode:
        v.add_(v).sub_(1)
        v.copy_(v * 2 + 1)
        v.view(5, 10).t()
    assert len(mode.kept) == 2


def at(weights: Tensor, client_state: State | None = None, server_state: State | None = None) -> Step:
    return Step(weights, weights, 0, AffineStep(), client_state or {}, server_state or {})


def test_local_ascent() -> None:
    g = torch.tensor([3.0, 4.0], dtype=torch.float64)
    e = LocalAscent(0.5).ascend(g.clone(), at(g))
    torch.testing.assert_close(e, 0.5 * g / (5 + 1e-7), atol=1e-16, rtol=0)
    assert torch.equal(LocalAscent(0.5).ascend(torch.zeros(2), at(g)), torch.zeros(2))


def test_corrected_ascent_updates_mu_with_the_new_e() -> None:
    rule = CorrectedAscent(0.5)
    g, s = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([1.0, 0.5], dtype=torch.float64)
    before = torch.tensor([0.2, -0.3], dtype=torch.float64)
    kept = {"mu": before.clone()}
    client_state = rule.begin(g, kept)
    e = rule.ascend(g.clone(), at(g, client_state, {"s": s}))
    q = g - before - s
    torch.testing.assert_close(e, 0.5 * q / (q.norm() + 1e-7), atol=1e-15, rtol=0)
    torch.testing.assert_close(client_state["mu"], before + e - s, atol=1e-15, rtol=0)
    assert torch.equal(kept["mu"], before)


def test_previous_step_ascent_starts_at_zero() -> None:
    assert torch.equal(PreviousStepAscent(0.5).ascend(torch.zeros(3), at(OLD)), torch.zeros(3))
    assert PreviousStepAscent(0.5).passes == 1


@dataclass(frozen=True)
class ScalarConstant(Perturbation):
    """The released code's mistake: one number for a whole tensor."""

    def round_perturbation(self, anchor: Tensor, client_state: State, server_state: State) -> Tensor:
        return torch.tensor(0.1, dtype=anchor.dtype)


@dataclass(frozen=True)
class ScalarAscent(Perturbation):
    gradient = "current"

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return gradient.sum()


@pytest.mark.parametrize("rule", [ScalarConstant(), ScalarAscent()])
def test_a_perturbation_of_another_shape_is_refused(rule: Perturbation) -> None:
    with pytest.raises(ValueError, match=r"must have the model's \(39,\) entries, got shape \(\)"):
        federation(Algorithm(rule)).round([0])
