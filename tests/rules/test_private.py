"""Clipping and noise between clients and server: what is drawn, what is refused, what it costs."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from worlds import SCHEDULE, answer_of, assert_same_bits, federation, play, states

from fedlesam import algorithms
from fedlesam.algorithms import Algorithm
from fedlesam.core import seeds
from fedlesam.core.privacy import Privacy
from fedlesam.rules import (
    ClientMomentum,
    ControlVariates,
    CorrectedAscent,
    Dynamic,
    DynamicRegulariser,
    GlobalAscent,
    InterpolatedAscent,
    MomentumVariates,
    Nesterov,
    SentDual,
    TaughtDescent,
)


def test_updates_are_clipped() -> None:
    fed = federation(algorithms.dp_fedsam(clip=0.05, noise=0.0))
    plain = federation(algorithms.fedsam(rho=0.1))
    for client in range(3):
        mine, theirs = (answer_of(one, client).result.update for one in (fed, plain))
        assert float(mine.norm()) == pytest.approx(0.05)
        torch.testing.assert_close(mine / mine.norm(), theirs / theirs.norm(), atol=1e-12, rtol=0)


def test_a_large_clip_without_noise_is_fedsam() -> None:
    one, other = (play(federation(a)) for a in (algorithms.dp_fedsam(0.1, 1e9, 0.0), algorithms.fedsam(rho=0.1)))
    torch.testing.assert_close(one.weights, other.weights, atol=1e-14, rtol=0)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_the_noise_of_a_round(engine: str) -> None:
    """noise * clip / K times standard normal numbers from (seed, "privacy", round)."""
    silent, noisy = (federation(algorithms.dp_fedsam(0.1, 0.2, s), engine=engine) for s in (0.0, 0.7))
    silent.round([0, 2, 4])
    noisy.round([0, 2, 4])
    drawn = torch.randn(39, generator=seeds.generator(7, "privacy", 0), dtype=torch.float64)
    torch.testing.assert_close(noisy.weights - silent.weights, drawn * 0.7 * 0.2 / 3, atol=1e-11, rtol=0)
    noisy.round([0, 2, 4])
    other = torch.randn(39, generator=seeds.generator(7, "privacy", 1), dtype=torch.float64)
    assert not torch.allclose(drawn, other), "every round has its own"


def test_those_who_do_not_answer_count() -> None:
    """The sum is divided by the clients that were asked, and the noise with it: its sensitivity is clip / K."""
    fed = federation(algorithms.dp_fedsam(0.1, 0.2, 0.5), dropout=0.6, active=5)
    start, record = fed.weights, fed.round()
    answered = [client for client in record.active if client not in (record.dropped or {})]
    assert 0 < len(answered) < 5
    beside = federation(algorithms.dp_fedsam(0.1, 0.2, 0.5))
    total = sum(answer_of(beside, client).result.update for client in answered)
    drawn = torch.randn(39, generator=seeds.generator(7, "privacy", 0), dtype=torch.float64)
    torch.testing.assert_close(fed.weights, start + total / 5 + drawn * 0.5 * 0.2 / 5, atol=1e-11, rtol=0)


def test_two_workers_and_any_order_have_the_same_bits() -> None:
    alone = play(federation("dp-fedsam"), SCHEDULE[:3])
    with federation("dp-fedsam", workers=2, threads=1) as several:
        play(several, [list(reversed(active)) for active in SCHEDULE[:3]])
        assert_same_bits(states(alone), states(several))


@pytest.mark.parametrize(
    "rules",
    [
        {"correction": ControlVariates()},
        {"correction": ClientMomentum()},
        {"correction": MomentumVariates()},
        {"correction": SentDual()},
        {"perturbation": CorrectedAscent()},
        {"perturbation": InterpolatedAscent(threshold=0.1)},
        {"server": Dynamic(), "correction": DynamicRegulariser()},
    ],
    ids=lambda rules: "-".join(type(rule).__name__ for rule in rules.values()),
)
def test_rules_that_learn_more_of_clients_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"privacy does not work with .*: it shows the server more"):
        Algorithm(**rules, privacy=Privacy())


@pytest.mark.parametrize(
    "rules",
    [
        {"perturbation": GlobalAscent()},
        {"perturbation": GlobalAscent(reference="previous-round")},
        {"perturbation": TaughtDescent()},
        {"server": Nesterov()},
    ],
    ids=lambda rules: "-".join(type(rule).__name__ for rule in rules.values()),
)
def test_rules_that_see_the_noisy_mean_alone_go_with_it(rules: dict[str, Any]) -> None:
    method = Algorithm(**rules, privacy=Privacy(noise=0.1))
    assert bool(play(federation(method), SCHEDULE[:3]).weights.isfinite().all())


def test_what_would_be_sent_without_noise_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match=r"privacy: the buffers 1.*running_mean.* change in training"):
        federation("dp-fedsam", model=model)
    with pytest.raises(ValueError, match="weighting by examples does not work with Privacy"):
        federation("dp-fedsam", weighting="examples")


@pytest.mark.parametrize("wrong", [{"clip": 0.0}, {"noise": -1.0}, {"delta": 1.0}, {"delta": -0.1}], ids=str)
def test_bad_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"Privacy: {next(iter(wrong))} must be"):
        Privacy(**wrong)


def test_without_noise_or_a_draw_nothing_is_promised() -> None:
    assert federation(algorithms.dp_fedsam(noise=0.0), active=2).round().epsilon is None
    fed = federation("dp-fedsam", active=2)
    assert fed.round([0, 1]).epsilon is None, "chosen clients were not drawn"
    assert fed.round().epsilon is None


def test_the_cost_of_rounds() -> None:
    """It grows with rounds and participation, falls with noise, and is in every record."""
    pytest.importorskip("dp_accounting", reason="the accountant is an extra")
    fed = federation(algorithms.dp_fedsam(noise=4.0, delta=1e-3), active=2)
    spent = [record.epsilon for record in fed.run(3)]
    assert all(value is not None and 0 < value < math.inf for value in spent)
    assert spent == sorted(spent)  # type: ignore[type-var]
    few, many, loud = (Privacy(noise=s).epsilon(100, k, 50) for s, k in ((2.0, 5), (2.0, 20), (4.0, 20)))
    assert few is not None
    assert many is not None
    assert loud is not None
    assert few < many
    assert loud < many


def test_one_round_with_everybody_is_the_gaussian_mechanism() -> None:
    """No subsampling: Renyi divergence order * (2 / noise)^2 / 2, converted by hand, is an upper bound that is near."""
    pytest.importorskip("dp_accounting", reason="the accountant is an extra")
    noise, delta = 10.0, 1e-5
    bound = min(a * (2 / noise) ** 2 / 2 + math.log(1 / delta) / (a - 1) for a in range(2, 200))
    found = Privacy(noise=noise, delta=delta).epsilon(10, 10, 1)
    assert found is not None
    assert 0.7 * bound < found <= bound
