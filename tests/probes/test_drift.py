"""Perturbation drift by hand, against an independent loop, and at its ends."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import SCHEDULE, federation, mlp, play, samples, training

import fedlesam as fl
from fedlesam.algorithms import CATALOGUE, Algorithm, example
from fedlesam.federation import Federation
from fedlesam.probes import Drift, GlobalLoss, constant_perturbations, cosine, drift_of
from fedlesam.probes.base import Look
from fedlesam.probes.catalogue import attach
from fedlesam.probes.drift import DriftProbe, perturbs
from fedlesam.probes.estimate import Estimate
from fedlesam.rules import CorrectedAscent, LocalAscent, Perturbation, PreviousStepAscent
from reproduction.theory import Point, half_square

PERTURBING = [name for name in CATALOGUE if perturbs(example(name))]


def client(centre: list[float], curvature: list[float]) -> tuple[Tensor, Tensor]:
    """F_i = sum of curvature * (w - centre)^2 / 2."""
    return torch.tensor([centre + curvature], dtype=torch.float64), torch.zeros(1)


def quadratic(clients: list[tuple[Tensor, Tensor]], rule: Perturbation, start: list[float], **local: Any) -> Federation:
    plain = {"weight_decay": 0.0, "clip": None, "batch_size": 10, "loss": half_square, "lr": 0.1, "lr_decay": 1.0}
    settings = fl.LocalTraining(**{**plain, **local})
    return Federation(Point(torch.tensor(start, dtype=torch.float64)), clients, Algorithm(rule), settings)


def test_two_clients_by_hand() -> None:
    """From 0 the gradients are (1, 0) and (0, 1), the global one lies between: 45 degrees to each, at every step."""
    fed = quadratic([client([-1, 0], [1, 1]), client([0, -1], [1, 1])], LocalAscent(0.2), [0.0, 0.0], epochs=3)
    found = drift_of(fed, GlobalLoss.of(fed), full=GlobalLoss.of(fed))
    assert found.drift == pytest.approx(math.sin(math.pi / 8)), "norm of two unit vectors' difference is 2 sin(angle/2)"
    assert found.cosine == pytest.approx(math.sqrt(0.5))
    assert found.norm == pytest.approx(0.2, rel=1e-6)
    assert (found.counted, found.without, found.clients_without) == (6, 0, 0)
    assert found.full_drift == pytest.approx(found.drift), "a full batch is the full gradient"
    gradients = [math.sqrt(0.5)]
    v = 0.0
    for _ in range(2):  # both clients at (-v, 0) and (0, -v); the gradient at v + e is (1 - v) + 0.2
        v += 0.1 * (1 - v + 0.2)
        gradients.append((0.5 - v / 2) * math.sqrt(2))
    assert found.gradient_norm == pytest.approx(sum(gradients) / 3)


def test_opposite_clients() -> None:
    """F_1 pulls three times as hard as F_2: one client has the global direction, the other its opposite."""
    fed = quadratic([client([-3], [1]), client([1], [1])], LocalAscent(0.1), [0.0], epochs=1)
    found = drift_of(fed, GlobalLoss.of(fed))
    assert found.drift == pytest.approx((0 + 1) / 2)
    assert found.cosine == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("rounds", [0, 3])
def test_identical_clients_with_full_batches_do_not_drift(rounds: int) -> None:
    x, y = samples((9,))[0]
    fed = federation("fedsam", clients=[(x, y)] * 4, local=training(batch_size=100, epochs=3))
    for _ in range(rounds):
        fed.round()
    found = drift_of(fed, GlobalLoss.of(fed), full=GlobalLoss.of(fed))
    assert found.drift == pytest.approx(0, abs=1e-9)
    assert found.full_drift == pytest.approx(0, abs=1e-9)
    assert found.cosine == pytest.approx(1)
    assert found.counted == 12


def test_batches_alone_make_a_drift_that_full_gradients_do_not_have() -> None:
    x, y = samples((12,))[0]
    one = federation("fedsam", clients=[(x, y)], local=training(batch_size=3, epochs=2))
    found = drift_of(one, GlobalLoss.of(one), full=GlobalLoss.of(one))
    assert found.full_drift == pytest.approx(0, abs=1e-9)
    assert found.drift is not None
    assert found.drift > 0.05


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("rule", [LocalAscent(0.3), CorrectedAscent(0.3), PreviousStepAscent(0.3)], ids=repr)
def test_against_a_plain_loop(rule: Perturbation) -> None:
    """Clients of different curvature and numbers of steps: one that has finished stays where it is."""
    centres = np.array([[2.0, -1.0, 0.5], [-1.0, 0.3, 1.0], [0.1, 3.0, -2.0]])
    curvatures = np.array([[1.0, 0.2, 3.0], [0.5, 2.0, 0.1], [1.5, 1.0, 0.7]])
    counts, w, lr, rho = (1, 4, 2), np.array([0.4, 0.8, -0.3]), 0.1, 0.3
    shards = [client(c.tolist(), a.tolist()) for c, a in zip(centres, curvatures, strict=True)]
    fed = quadratic(shards, rule, w.tolist(), epochs=lambda _, i: counts[i])
    v = np.tile(w, (3, 1))
    dual, last = np.zeros((3, 3)), np.zeros((3, 3))
    distances, cosines, dropped = [], [], 0
    for step in range(max(counts)):
        where = v.mean(0)
        globally = unit((curvatures * (where - centres)).mean(0))
        e = np.zeros((3, 3))
        for i in range(3):
            if step >= counts[i]:
                continue
            g = curvatures[i] * (v[i] - centres[i])
            uphill = {LocalAscent: g, CorrectedAscent: g - dual[i], PreviousStepAscent: last[i]}[type(rule)]
            if np.linalg.norm(uphill) == 0:
                dropped += 1
            else:
                e[i] = rho * unit(uphill)
                distances.append(np.linalg.norm(globally - unit(uphill)))
                cosines.append(globally @ unit(uphill))
        for i in range(3):
            if step < counts[i]:
                dual[i] += e[i]
                last[i] = curvatures[i] * (v[i] + e[i] - centres[i])
                v[i] = v[i] - lr * last[i]
    found = drift_of(fed, GlobalLoss.of(fed))
    assert found.drift == pytest.approx(sum(distances) / (2 * len(distances)), rel=1e-6)
    assert found.cosine == pytest.approx(sum(cosines) / len(cosines), rel=1e-5)
    assert (found.counted, found.without) == (len(distances), dropped)
    assert dropped == (3 if isinstance(rule, PreviousStepAscent) else 0)
    assert found.clients_without == (1 if isinstance(rule, PreviousStepAscent) else 0), "the one of a single step"


def test_fedlesam_by_its_definition() -> None:
    """One direction for the whole round; clients that were never active have none and are counted."""
    fed = play(federation("fedlesam", local=training(batch_size=100, epochs=1)), SCHEDULE[:3])
    loss = GlobalLoss.of(fed)
    g = loss.gradient(fed.weights)[1]
    old = fed.memories[3].perturbation["old"]  # of round 0
    found = drift_of(fed, loss, [3])
    back = old - fed.weights
    assert found.cosine == pytest.approx(cosine(back, g))
    assert found.drift == pytest.approx(float((back / back.norm() - g / g.norm()).norm()) / 2)
    fresh = federation("fedlesam")
    nothing = drift_of(fresh, GlobalLoss.of(fresh), [0, 1])
    assert nothing.drift is nothing.cosine is None
    assert nothing.clients_without == 2
    values, _ = DriftProbe().reading(Look(fresh))
    assert "drift" not in values
    assert values["clients_without"] == 6


@pytest.mark.parametrize("name", PERTURBING)
def test_every_perturbing_method_is_in_its_range(name: str) -> None:
    fed = play(federation(name, active=3))
    found: Drift = drift_of(fed, GlobalLoss.of(fed, samples=12), full=GlobalLoss.of(fed))
    assert found.drift is not None
    assert 0 <= found.drift <= 1
    assert found.cosine is not None
    assert -1 <= found.cosine <= 1
    assert 2 * found.drift**2 <= 1 - found.cosine + 1e-9, "Jensen: mean(d)^2 <= mean(d^2), d^2 = 2 - 2 cos"
    assert (found.full_drift is not None) == isinstance(fed.algorithm.perturbation, LocalAscent)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="has no perturbation, so nothing can drift; remove the probe"):
        drift_of(federation("scaffold"), GlobalLoss(mlp(), samples()))
    with pytest.raises(ValueError, match="NoPerturbation"):
        attach("drift", federation("fedavg"))
    pinned = federation("fedlesam", workers=2, store="pinned")
    for text in ("drift", "estimate", "sharpness"):
        with pytest.raises(ValueError, match="with --store pinned they stay with the workers: use --store shared"):
            attach(text, pinned)
    assert len(attach("sharpness:trained=no hessian", pinned)) == 2
    assert attach("drift", federation("fedlesam", store="pinned")), "one worker has all memories"


# the estimate


def test_the_estimate_of_fedlesam() -> None:
    fed = play(federation("fedlesam-d", active=6), [range(6)] * 3)
    before = fed.weights
    fed.round(range(6))
    values, metadata = Estimate(samples=0).reading(Look(fed, previous=before))
    expected = cosine(before - fed.weights, GlobalLoss.of(fed).gradient(fed.weights)[1])
    for name in ("cosine", "cosine_min", "cosine_max", "cosine_previous"):
        assert values[name] == pytest.approx(expected), "with all clients active, old is the last round's model"
    assert values["clients"] == 6
    assert values["step_norm"] == pytest.approx(float((before - fed.weights).norm()))
    assert metadata == {"samples": 52}


def test_the_estimate_under_partial_participation_and_of_others() -> None:
    fed = play(federation("fedlesam", active=4), SCHEDULE[:2])
    found = constant_perturbations(fed, [0, 1, 4])
    assert set(found) == {0, 1}, "client 4 was never active"
    back = fed.memories[0].perturbation["old"] - fed.weights
    assert cosine(found[0], back) == pytest.approx(1)
    sam = play(federation("fedsam"), SCHEDULE[:2])
    values, _ = Estimate(samples=0).reading(Look(sam, previous=sam.weights + 1))
    assert "cosine" not in values
    assert -1 <= values["cosine_previous"] <= 1
    values, _ = Estimate(samples=0).reading(Look(sam))
    assert set(values) == {"gradient_norm", "clients"}
