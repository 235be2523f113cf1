"""The methods of the paper and their relatives against the independent oracle; test_family.py has the others."""

import functools
from typing import Any

import pytest
import torch
from agreement import SETTINGS, assert_agree, hyper_of
from family_oracle import METHODS
from oracle import Oracle
from worlds import SCHEDULE, epochs, federation, mlp, play, samples, states, training

from fedlesam import algorithms
from fedlesam.algorithms import CATALOGUE

SCOPES = ("loss", "corrected")
PLAIN = [name for name in CATALOGUE if name not in METHODS]


@functools.cache
def truth(method: str, scope: str, draws: torch.dtype = torch.float64) -> Oracle:
    """The oracle in double precision, after the eight rounds."""
    settings = {**SETTINGS, **hyper_of(method), "clip_scope": scope, "draws": draws}
    oracle = Oracle(method, mlp(), samples(), epochs, seed=7, **settings)
    for active in SCHEDULE:
        oracle.round(active)
    return oracle


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", PLAIN)
def test_double_precision(method: str, scope: str) -> None:
    oracle = truth(method, scope)
    fed = federation(algorithms.get(method, **hyper_of(method)), local=training(clip_scope=scope))
    assert_agree(states(play(fed)), oracle.states(), 1e-10)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", PLAIN)
def test_single_precision(method: str, scope: str) -> None:
    """Weights only: the other state is divided by lr, and so are its rounding errors."""
    fed = federation(algorithms.get(method, **hyper_of(method)), dtype=torch.float32, local=training(clip_scope=scope))
    weights = play(fed).weights
    assert weights.dtype == torch.float32
    expected = truth(method, scope, draws=torch.float32).states()["weights"]
    torch.testing.assert_close(weights.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", PLAIN)
def test_the_clip_was_active(method: str, scope: str) -> None:
    oracle = truth(method, scope)
    assert 0.1 * oracle.steps < oracle.clipped < oracle.steps


@pytest.mark.parametrize("method", PLAIN)
def test_the_clip_scope_matters(method: str) -> None:
    one, other = (truth(method, scope).states()["weights"] for scope in SCOPES)
    corrected = type(algorithms.get(method).correction).__name__ != "NoCorrection"
    assert (float((one - other).abs().max()) > 1e-3) == corrected


def test_the_methods_differ() -> None:
    """The oracle would agree with anything if all methods were the same."""
    ends = {method: truth(method, "loss").states()["weights"] for method in PLAIN}
    for one in ends:
        for other in ends:
            assert one == other or float((ends[one] - ends[other]).abs().max()) > 1e-3, (one, other)


@pytest.mark.parametrize("method", ["fedavg", "fedcm", "feddyn", "fedsam", "fedsmoo", "fedlesam-s", "freesam"])
def test_momentum(method: str) -> None:
    oracle = Oracle(
        method, mlp(), samples(), epochs, seed=7, clip_scope="loss", momentum=0.6, **{**SETTINGS, **hyper_of(method)}
    )
    for active in SCHEDULE[:4]:
        oracle.round(active)
    fed = federation(algorithms.get(method, **hyper_of(method)), local=training(momentum=0.6))
    assert_agree(states(play(fed, SCHEDULE[:4])), oracle.states(), 1e-10)


@pytest.mark.parametrize(
    "method", ["fedavg", "fedadam", "fedcm", "fedprox", "fedsam", "fedlesam", "fedlesam-m", "freesam"]
)
def test_weighting_by_examples(method: str) -> None:
    oracle = Oracle(
        method,
        mlp(),
        samples(),
        epochs,
        seed=7,
        clip_scope="loss",
        by_examples=True,
        **{**SETTINGS, **hyper_of(method)},
    )
    for active in SCHEDULE[:4]:
        oracle.round(active)
    fed = federation(algorithms.get(method, **hyper_of(method)), weighting="examples")
    assert_agree(states(play(fed, SCHEDULE[:4])), oracle.states(), 1e-10)


@pytest.mark.parametrize("lr_g", [0.5, 1.5])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedcm", "fedsam", "fedlesam"])
def test_global_learning_rate(method: str, lr_g: float) -> None:
    hyper = hyper_of(method) | {"lr_g": lr_g}
    oracle = Oracle(method, mlp(), samples(), epochs, seed=7, clip_scope="loss", **{**SETTINGS, **hyper})
    for active in SCHEDULE[:4]:
        oracle.round(active)
    assert_agree(states(play(federation(algorithms.get(method, **hyper)), SCHEDULE[:4])), oracle.states(), 1e-10)


@pytest.mark.parametrize("reference", ["received", "previous-round"])
@pytest.mark.parametrize("direction", ["back", "ahead"])
@pytest.mark.parametrize("method", ["fedlesam", "fedlesam-s", "fedlesam-d"])
def test_the_other_references_and_directions(method: str, direction: str, reference: str) -> None:
    hyper: dict[str, Any] = hyper_of(method) | {"direction": direction, "reference": reference}
    oracle = Oracle(method, mlp(), samples(), epochs, seed=7, clip_scope="loss", **{**SETTINGS, **hyper})
    for active in SCHEDULE[:5]:
        oracle.round(active)
    assert_agree(states(play(federation(algorithms.get(method, **hyper)), SCHEDULE[:5])), oracle.states(), 1e-10)
