"""Where the methods of the family must meet others, and which rules do not go together."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import SCHEDULE, federation, play, samples, states, steps_in, training

import fedlesam as fl
from fedlesam import algorithms
from fedlesam.algorithms import SLOW_DECAY, Algorithm
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.slots import AffineStep, Correction, LocalResult, RoundResult, State
from fedlesam.federation import Federation
from fedlesam.rules import (
    AdaptiveAscent,
    Average,
    ClientMomentum,
    ControlVariates,
    DualBias,
    DualMean,
    Dynamic,
    DynamicRegulariser,
    GlobalAscent,
    InterpolatedAscent,
    LocalAscent,
    MixedAscent,
    MomentumAscent,
    MomentumVariates,
    Nesterov,
    NoPerturbation,
    RandomRoundAscent,
    SentDual,
    ServerMomentum,
    ShiftedDynamic,
    TrajectoryAscent,
    WeightedMomentum,
)

FEDSPEED = {"correction": SentDual(0.2), "server": DualMean(), "lr_decay": SLOW_DECAY}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (algorithms.fedspeed(0.2, 0.2, 0.0), Algorithm(NoPerturbation(), **FEDSPEED)),
        (algorithms.fedspeed(0.2, 0.2, 1.0), Algorithm(LocalAscent(0.2), **FEDSPEED)),
        (
            algorithms.fedgloss(0.2, 0.0, 0.3),
            Algorithm(LocalAscent(0.2), DynamicRegulariser(0.3), Dynamic(), SLOW_DECAY),
        ),
        (algorithms.fedgloss(0.0, 0.0, 0.3), algorithms.feddyn(0.3)),
        (algorithms.fedgloss(0.2, 0.3, 0.3, warmup=0), algorithms.fedgloss(0.2, 0.3, 0.3)),
        (algorithms.fednsam(0.2, 0.0), algorithms.fedsam(0.2)),
        (algorithms.fednsam_released(0.2, 0.0), algorithms.fedsam(0.2)),
        (algorithms.fedswa(1.0, 1.0), algorithms.fedavg()),
        (algorithms.fedmoswa(1.0, 0.0, 1.0), Algorithm(correction=MomentumVariates(0.0))),
        (algorithms.fedgf(0.2, 0.3, threshold=1e30), algorithms.fedsam(0.2)),
        (algorithms.msam(0.2, 0.0), algorithms.freesam(0.2)),
        (algorithms.fedgmt(strength=0.0, lam=0.3), Algorithm(NoPerturbation(), DualBias(0.3), Dynamic(), SLOW_DECAY)),
        (algorithms.fedsol(0.0, adaptive=False), algorithms.fedavg()),
        (algorithms.fedavgm(1.0, 0.0), algorithms.fedavg()),
        (algorithms.fedspeed_released(0.2, 0.3), algorithms.fedgloss(0.2, 0.0, 0.3)),
    ],
    ids=lambda algorithm: repr(algorithm),
)
@pytest.mark.parametrize("scope", ["loss", "corrected"])
def test_limits(one: Algorithm, other: Algorithm, scope: str) -> None:
    local = training(clip_scope=scope)
    assert torch.equal(play(federation(one, local=local)).weights, play(federation(other, local=local)).weights)


def test_speeds_local_step_without_mixing_is_feddyns() -> None:
    """alpha 0: the update of a first round is FedDyn's, bit for bit; only the landing differs."""
    one, other = federation(algorithms.fedspeed(0.2, 0.3, 0.0)), federation(algorithms.feddyn(0.3))
    start = one.weights
    one.round([0, 2])
    other.round([0, 2])
    torch.testing.assert_close((one.weights - start) / 2, (other.weights - start) / (4 / 3), atol=1e-14, rtol=0)


def test_a_large_eta_is_sam() -> None:
    """On a model without biases T is eta everywhere, and rho / eta takes it back."""
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()
    one = play(federation(algorithms.fedasam(0.2 / 1e8, 1e8), model=model))
    other = play(federation(algorithms.fedsam(0.2), model=model))
    torch.testing.assert_close(one.weights, other.weights, atol=1e-7, rtol=0)


def test_a_momentum_without_memory_of_the_start_is_fedavgm() -> None:
    """Nesterov's server without its start is heavy ball with the same numbers."""
    fed = play(federation(Algorithm(server=ServerMomentum(1.0, 0.6))), SCHEDULE[:1])
    other = play(federation(Algorithm(server=Nesterov(0.6))), SCHEDULE[:1])
    assert torch.equal(fed.weights, other.weights)
    assert not torch.allclose(play(fed, SCHEDULE[1:2]).weights, play(other, SCHEDULE[1:2]).weights)


def test_the_first_round_of_every_shift_starts_at_the_model() -> None:
    for method in ("fedgloss", "fednsam", "fednsam-released"):
        fed = federation(method)
        assert torch.equal(fed.state.sent(fed.algorithm).weights, fed.weights)
        fed.round([0, 2])
        sent = fed.state.sent(fed.algorithm)
        assert not torch.equal(sent.weights, fed.weights)
        assert torch.equal(fed.state.broadcast().weights, fed.weights), "evaluation sees the model itself"


def test_the_tests_score_the_model_and_not_the_start() -> None:
    test = samples((20,))[0]
    fed = play(federation("fednsam", test=test), SCHEDULE[:2])
    with torch.no_grad():
        loss = nn.functional.cross_entropy(fed.model(test[0]), test[1])
    assert fed.history[-1].test_loss == pytest.approx(float(loss), rel=1e-12)


def test_the_learning_rate_falls_step_by_step() -> None:
    """A gradient of ones: the moves are the rates."""
    model = nn.Linear(1, 1, bias=False).double()
    local = training(
        clip=None, weight_decay=0.0, lr=0.2, lr_decay=1.0, epochs=1, batch_size=1, loss=lambda z, y: z.mean()
    )
    data = [(torch.ones(4, 1).double(), torch.zeros(4, 1).double())]
    fed = federation(algorithms.fedswa(0.5), model=model, clients=data, local=local)
    seen = [float(step.weights()) for step in steps_in(fed, 0)]
    rates = [before - after for before, after in itertools.pairwise(seen)]
    assert rates == pytest.approx([0.2, 0.2 * 0.875, 0.2 * 0.75])
    record = fed.round([0])
    assert record.lr == 0.2


class Seen(Correction):
    """Keeps what it is told."""

    told: list[LocalResult]
    rounds: list[RoundResult]

    def next_client_state(self, client_state: State, server_state: State, result: LocalResult) -> State:
        self.told.append(result)
        return {}

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        self.rounds.append(result)
        return {}


def test_what_the_server_is_told() -> None:
    """Means over steps of unequal clients, the mean norm, and the next model."""
    rule = Seen()
    object.__setattr__(rule, "told", [])
    object.__setattr__(rule, "rounds", [])
    fed = federation(Algorithm(correction=rule, server=Average(1.5), lr_floor=0.1))
    fed.round([0, 1, 4])
    told, [seen] = rule.told, rule.rounds
    assert len({result.lr for result in told}) > 1
    for result in told:
        rates = [0.2 * ((1 - k / result.steps) + 0.1 * k / result.steps) for k in range(result.steps)]
        assert result.lr == pytest.approx(sum(rates) / len(rates), rel=1e-12)
    total = sum(result.steps * result.lr for result in told)
    assert seen.steps * seen.lr == pytest.approx(total / 3, rel=1e-12)
    assert seen.norm == pytest.approx(sum(float(result.update.norm()) for result in told) / 3, rel=1e-10)
    assert seen.landed is not None
    assert torch.equal(seen.landed, fed.weights)


def test_a_gain_that_is_computed() -> None:
    """As a 0-d tensor it does what the number does."""

    class Computed(ClientMomentum):
        def prepare(self, anchor: Tensor, client_state: State, server_state: State) -> AffineStep:
            affine = super().prepare(anchor, client_state, server_state)
            return affine._replace(gain=anchor.new_tensor(affine.gain))

    for engine in ("plain", "stacked"):
        for scope in ("loss", "corrected"):
            local = training(clip_scope=scope, momentum=0.3)
            one, other = (
                play(federation(Algorithm(correction=rule, server=Average()), local=local, engine=engine), SCHEDULE[:3])
                for rule in (Computed(0.3), ClientMomentum(0.3))
            )
            torch.testing.assert_close(one.weights, other.weights, atol=1e-13, rtol=0)


def test_the_share_of_far_rounds() -> None:
    """fedgf's c is divided by the rounds there were, at most `window`."""
    rule, w = InterpolatedAscent(window=3, threshold=1.0), torch.zeros(2)
    state, seen = rule.initial(w), []
    for norm in (2.0, 0.5, 2.0, 2.0, 0.5, 1.0):
        state = rule.aggregate(state, RoundResult(w, torch.ones(2), 1, 0.1, 1, {}, norm))
        seen.append(float(state["c"]))
    assert seen == pytest.approx([1, 1 / 2, 2 / 3, 2 / 3, 2 / 3, 1 / 3])


def test_alpha_adapts_and_stays_inside() -> None:
    fed = federation(algorithms.fedwmsam(0.1, 0.5))
    alphas = []
    for active in SCHEDULE:
        fed.round(active)
        alphas.append(float(fed.state.correction["alpha"]))
    assert alphas[0] == pytest.approx(0.99 * 0.5 + 0.01 * 0.1), "m is 0 in the first round"
    assert all(0.1 <= alpha <= 0.9 for alpha in alphas)
    assert len(set(alphas)) == len(alphas)


def test_the_radius_grows() -> None:
    fed = federation(algorithms.fedgloss(0.2, 0.4, warmup=4))
    radii = [fed.algorithm.at(t) for t in range(6)]
    assert [a.perturbation.rho for a in radii] == pytest.approx(  # type: ignore[attr-defined]
        [0.001 + 0.199 * min(1, t / 4) for t in range(6)]
    )
    assert [a.server.rho_s for a in radii] == pytest.approx(  # type: ignore[attr-defined]
        [0.001 + 0.399 * min(1, t / 4) for t in range(6)]
    )
    assert repr(fed.algorithm) == repr(algorithms.fedgloss(0.2, 0.4, warmup=4))


@pytest.mark.parametrize("server", [Nesterov(), ShiftedDynamic()], ids=repr)
@pytest.mark.parametrize("rule", [GlobalAscent(), RandomRoundAscent()], ids=repr)
def test_two_shifts_are_refused(server: Any, rule: Any) -> None:
    with pytest.raises(ValueError, match=r"starts a round away from w, and .*Ascent shifts the whole round as well"):
        Algorithm(rule, server=server)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"server": DualMean()},
            "adds the clients' h_i, which NoCorrection does not send: use the correction SentDual",
        ),
        ({"perturbation": TrajectoryAscent()}, "works with ClientMomentum or WeightedMomentum with alpha below 1"),
        ({"perturbation": TrajectoryAscent(), "correction": ClientMomentum(1.0)}, "with alpha below 1"),
        ({"lr_floor": 1.5}, "lr_floor must be at most 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rules_that_do_not_go_together(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Algorithm(**rules)


def test_mixing_needs_both_gradients() -> None:
    class Wrong(MomentumAscent):
        mix = 0.5  # type: ignore[assignment]

    with pytest.raises(ValueError, match='Wrong mixes in the gradient at v, which only gradient = "current" computes'):
        Algorithm(Wrong())


NEW = [
    (LocalAscent(0.1), NoPerturbation()),
    (MixedAscent(0.1, 0.5), AdaptiveAscent(0.1)),
    (InterpolatedAscent(0.1, threshold=0.1), MomentumAscent(0.1)),
]


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize(
    "correction", [ControlVariates(), SentDual(), MomentumVariates(), WeightedMomentum()], ids=repr
)
@pytest.mark.parametrize("rule", [rule for pair in NEW for rule in pair], ids=repr)
def test_any_with_any(rule: Any, correction: Correction, engine: str) -> None:
    """New perturbations with new corrections, a falling rate and a shifted start: the same on both engines."""
    local = training(momentum=0.2, epochs=2)
    method = Algorithm(rule, correction, Nesterov(0.5), lr_floor=0.3)
    fed = play(federation(method, local=local, engine=engine), SCHEDULE[:3])
    assert bool(fed.weights.isfinite().all())
    plain = play(federation(method, local=local), SCHEDULE[:3])
    for name, value in states(plain).items():
        torch.testing.assert_close(states(fed)[name], value, atol=1e-9, rtol=0)


class Watched(nn.Module):
    """Counts its passes in training, and remembers what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(5, 3, dtype=torch.float64), nn.BatchNorm1d(3, dtype=torch.float64)
        self.seen: list[tuple[bool, float, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(())
        if self.training:
            self.seen.append((torch.is_grad_enabled(), float(drawn), int(self.norm.num_batches_tracked)))
        z: Tensor = self.norm(self.inner(x))
        return z


@pytest.mark.parametrize(("method", "passes"), [("fedgmt", 2), ("fedsol", 3)])
def test_the_teacher_leaves_no_trace(method: str, passes: int) -> None:
    """No gradient, the same draws, the received buffers in its pass, and none of them changed by it."""
    fed = federation(method, model=Watched(), local=training(epochs=1, batch_size=4))
    fed.round([1])
    before = int(fed.state.buffers["norm.num_batches_tracked"])
    flat = FlatModel(copy.deepcopy(fed.model))
    flat.module.seen.clear()
    steps = sum(1 for _ in steps_in(fed, 1, flat))
    seen = flat.module.seen
    assert len(seen) == passes * steps
    for k in range(steps):
        own = seen[passes * k : passes * (k + 1)]
        assert [grad for grad, _, _ in own] == [False] + [True] * (passes - 1)
        assert len({drawn for _, drawn, _ in own}) == 1
        assert [count for _, _, count in own] == [before] + [before + k] * (passes - 1)


@pytest.mark.parametrize("method", ["fedgmt", "fedsol"])
def test_unequal_clients_with_a_teacher_are_stacked(method: str) -> None:
    """Batches are not filled up: the teacher's mean would be over what fills them."""
    local = training(epochs=1, batch_size=4)
    one, other = (play(federation(method, local=local, engine=engine)) for engine in ("plain", "stacked"))
    torch.testing.assert_close(one.weights, other.weights, atol=1e-12, rtol=0)


def test_outputs_that_are_no_logits_are_refused() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3, dtype=torch.float64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x), x

    task = fl.Task(
        lambda model, batch: nn.functional.cross_entropy(model(batch[0])[0], batch[1]), outputs=lambda found: found
    )
    fed = Federation(Pairs(), samples(), "fedgmt", training(), task=task)
    with pytest.raises(
        ValueError, match=r"compares the class probabilities of two models, and the outputs of .* a tuple"
    ):
        fed.round([0])


def test_a_rule_that_teaches_by_ascent_needs_the_gradient_there() -> None:
    class Wrong(MomentumAscent):
        teaches = "ascent"

    with pytest.raises(ValueError, match='ascends what it distils, which only gradient = "current" computes'):
        Algorithm(Wrong())
