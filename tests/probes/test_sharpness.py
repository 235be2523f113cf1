"""Sharpness on losses where it is known, and what must not change it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from worlds import federation, mlp, play, samples

from fedlesam.probes import GlobalLoss, rise
from fedlesam.probes.base import Look
from fedlesam.probes.replay import trained
from fedlesam.probes.sharpness import Sharpness
from reproduction.theory import Point, half_square


def quadratic(curvature: Tensor, centre: Tensor) -> GlobalLoss:
    """F(w) = sum of curvature * (w - centre)^2 / 2."""
    x = torch.cat([centre, curvature])[None].double()
    return GlobalLoss(Point(torch.zeros(len(centre), dtype=torch.float64)), [(x, torch.zeros(1))], half_square)


def largest_rise(curvature: Tensor, gradient: Tensor, radius: float) -> float:
    """max over norm(e) <= r of g e + e A e / 2: e = (m - A)^-1 g with norm r, m above A's largest eigenvalue."""
    a, g = curvature.numpy(), gradient.numpy()
    low, high = a.max(), a.max() + np.linalg.norm(g) / radius + 1
    for _ in range(200):
        m = (low + high) / 2
        low, high = (m, high) if np.linalg.norm(g / (m - a)) > radius else (low, m)
    e = g / (high - a)
    e *= radius / np.linalg.norm(e)
    return float(g @ e + e @ (a * e) / 2)


numbers = st.lists(st.floats(0.1, 5), min_size=2, max_size=6)


@settings(max_examples=20)
@given(numbers, st.floats(0.01, 2), st.integers(0, 99))
def test_quadratics_have_a_known_answer(curvature: list[float], radius: float, seed: int) -> None:
    a = torch.tensor(curvature, dtype=torch.float64)
    centre = torch.randn(len(a), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    w = torch.zeros_like(a)
    g = a * (w - centre)
    found = rise(quadratic(a, centre), w, radius, 100)
    u = g / g.norm()
    assert found.loss == pytest.approx(float((a * centre**2).sum() / 2))
    assert found.gradient_norm == pytest.approx(float(g.norm()))
    assert found.first_order == pytest.approx(float(radius * g.norm() + radius**2 * (u * a * u).sum() / 2))
    exact = largest_rise(a, g, radius)
    assert found.first_order <= found.ascent <= exact * (1 + 1e-9)
    assert found.ascent == pytest.approx(exact, rel=2e-3)
    assert found.by_step == sorted(found.by_step), "more steps never find less"


def test_at_a_minimum_it_is_the_largest_eigenvalue() -> None:
    a, centre = torch.tensor([0.3, 4.0, 1.0]), torch.tensor([1.0, -2.0, 0.5])
    found = rise(quadratic(a, centre), centre.double(), 0.1, 100)
    assert found.gradient_norm == 0
    assert found.ascent == pytest.approx(4.0 * 0.1**2 / 2, rel=1e-6)


def test_nothing_above_the_centre_is_no_sharpness() -> None:
    flat = rise(quadratic(torch.zeros(3), torch.ones(3)), torch.zeros(3, dtype=torch.float64), 1.0, 5)
    assert flat.ascent == 0


def relu_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def rescaled(net: nn.Sequential, seed: int) -> nn.Sequential:
    """The same function: what a neuron gives is multiplied by its own factor, and divided by it where it is used."""
    draw = torch.Generator().manual_seed(seed)
    other = relu_net()
    other.load_state_dict(net.state_dict())
    with torch.no_grad():
        for here, there in ((0, 2), (2, 4)):
            factor = torch.empty(len(other[here].bias), dtype=torch.float64).uniform_(0.2, 8, generator=draw)  # type: ignore[arg-type]
            other[here].weight *= factor[:, None]  # type: ignore[operator]
            other[here].bias *= factor  # type: ignore[operator]
            other[there].weight /= factor  # type: ignore[operator]
    return other


@pytest.mark.parametrize("seed", range(3))
def test_the_relative_form_does_not_see_a_rescaling(seed: int) -> None:
    one = relu_net()
    losses = [GlobalLoss(net, samples()) for net in (one, rescaled(one, seed))]
    points = [loss.model.weights.clone() for loss in losses]
    assert losses[0].value(points[0]) == pytest.approx(losses[1].value(points[1]), rel=1e-12)
    found = [rise(loss, w, 0.5, 15, scale=w.abs()) for loss, w in zip(losses, points, strict=True)]
    assert found[0].by_step == pytest.approx(found[1].by_step, rel=1e-9)
    assert found[0].ascent > 0.01
    raw = [rise(loss, w, 0.1, 15).ascent for loss, w in zip(losses, points, strict=True)]
    assert abs(raw[0] / raw[1] - 1) > 0.02, "the raw form does, which is why there is another"


def test_the_ball_of_the_relative_form() -> None:
    """One step on a linear loss: e = |w|^2 g r / norm(|w| g)."""
    w, g = torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64), torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64)
    module = nn.Linear(3, 1, bias=False).double()
    loss = GlobalLoss(module, [(g[None], torch.zeros(1))], lambda output, _: output.mean())
    found = rise(loss, w, 0.1, 1, scale=w.abs())
    e = w.abs() ** 2 * g * 0.1 / (w.abs() * g).norm()
    assert found.first_order == pytest.approx(float(g @ e))
    assert (e / w)[:2].norm() == pytest.approx(0.1)


def test_the_probe_shows_global_local_and_trained() -> None:
    fed = play(federation("fedsam", active=3))
    values, metadata = Sharpness(samples=0, each=True).reading(Look(fed))
    loss, w = GlobalLoss.of(fed), fed.weights
    assert values["ascent"] == rise(loss, w, 0.1, 10).ascent >= values["first_order"]
    assert values["relative_ascent"] == rise(loss, w, 0.5, 10, scale=w.abs()).ascent
    local = [rise(loss.only(i), w, 0.1, 10).ascent for i in range(6)]
    assert [values[f"local_{i}"] for i in range(6)] == local
    assert (values["local_min"], values["local_max"]) == (min(local), max(local))
    assert values["local_mean"] == pytest.approx(sum(local) / 6)
    assert values["local_mean"] >= values["ascent"] - 1e-9, "the mean of maxima is at least the maximum of the mean"
    active = fed.draw_active(fed.state.round)
    ends = dict(trained(fed, active))
    assert {name for name in values if name.startswith("trained_")} == {
        *(f"trained_{i}" for i in active),
        "trained_mean",
        "trained_min",
        "trained_max",
    }
    for i in active:
        assert values[f"trained_{i}"] == rise(loss.only(i), ends[i], 0.1, 10).ascent
    assert metadata["samples"] == metadata["of"] == sum(len(x) for x, _ in samples())
    assert metadata["radius"] == 0.1


def test_trained_is_where_the_round_really_ends() -> None:
    fed = play(federation("fedgamma"))
    ends = dict(trained(fed, [1, 4]))
    w = fed.weights
    fed.round([1, 4])
    torch.testing.assert_close(fed.weights, w + (ends[1] - w + ends[4] - w) / 2)


def test_bad_settings() -> None:
    loss = GlobalLoss(mlp(), samples())
    for call, said in (
        (lambda: rise(loss, loss.model.weights, 0.0, 3), "radius must be above 0, got 0"),
        (lambda: rise(loss, loss.model.weights, math.nan, 3), "radius must be above 0, got nan"),
        (lambda: rise(loss, loss.model.weights, 0.1, 0), "steps must be a whole number from 1, got 0"),
        (lambda: Sharpness(every=0), "sharpness: every must be a whole number from 1, got 0"),
        (lambda: Sharpness(samples=-1), "samples must be a whole number from 0, got -1"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
