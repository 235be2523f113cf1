"""The family against its independent oracle: both clip scopes, the engines, workers, resume, dropouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family_loop import FedAvg
from family_oracle import METHODS
from family_worlds import HYPER, SEED, ends, oracle
from torch import Tensor, nn
from worlds import SCHEDULE, federation, mlp, play, states, training

from fedlesam import algorithms
from fedlesam.algorithms import CATALOGUE, Algorithm
from fedlesam.core.seeds import generator
from fedlesam.federation import Federation
from fedlesam.runs.checkpoint import Checkpoints

SCOPES = ("loss", "corrected")


def algorithm(method: str, **change: Any) -> Algorithm:
    return algorithms.get(method, **{**HYPER[method], **change})


def assert_same(fed: Federation, expected: tuple[Tensor, ...] | list[Tensor], tolerance: float = 1e-10) -> None:
    """The global model after every round."""
    for number, (active, w) in enumerate(zip(SCHEDULE, expected, strict=False)):
        fed.round(active)
        torch.testing.assert_close(
            fed.weights.double(), w, atol=tolerance, rtol=0, msg=lambda m, number=number: f"round {number}: {m}"
        )


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", METHODS)
def test_double_precision(method: str, scope: str) -> None:
    assert_same(federation(algorithm(method), local=training(clip_scope=scope)), ends(method, clip_scope=scope))


@pytest.mark.parametrize("method", METHODS)
def test_single_precision(method: str) -> None:
    fed = play(federation(algorithm(method), dtype=torch.float32))
    torch.testing.assert_close(fed.weights.double(), ends(method, clip_scope="loss")[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", METHODS)
def test_stacked(method: str, scope: str) -> None:
    fed = federation(algorithm(method), local=training(clip_scope=scope), engine="stacked")
    assert_same(fed, ends(method, clip_scope=scope))


@pytest.mark.parametrize("method", METHODS)
def test_momentum(method: str) -> None:
    fed = federation(algorithm(method), local=training(momentum=0.6))
    assert_same(fed, ends(method, momentum=0.6)[:4])


VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fedspeed", {"alpha": 0.0}),
    ("fedspeed", {"alpha": 1.0}),
    ("fedgloss", {"warmup": 5}),
    ("fedgloss", {"rho": 0.0}),
    ("fedgloss", {"rho_s": 0.0, "warmup": 3}),
    ("fedgloss", {"rho_s": 0.0}),
    ("fedsol", {"adaptive": False}),
    ("fedgf", {"window": 30}),
    ("fedwmsam", {"alpha": 0.3}),
    ("fedswa", {"floor": 1.0}),
    ("dp-fedsam", {"clip": 10.0}),
)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize(("method", "change"), VARIANTS)
def test_other_values(method: str, change: dict[str, Any], engine: str) -> None:
    assert_same(federation(algorithm(method, **change), engine=engine), ends(method, **change)[:5])


def network() -> nn.Module:
    """Buffers and masks: what a second pass or a teacher's could spoil."""
    return nn.Sequential(mlp((5, 6)), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh(), mlp((6, 3), seed=1)).double()


@pytest.mark.parametrize("method", [name for name in METHODS if name != "dp-fedsam"])
def test_buffers_and_masks(method: str) -> None:
    """dp-fedsam refuses models whose buffers change."""
    fed = federation(algorithm(method), model=network())
    with torch.random.fork_rng(devices=[]):
        right = oracle(method, model=network(), join_last=True)
        assert_same(fed, right.play(SCHEDULE[:4]))
    assert fed.state.buffers.keys() == right.buffers.keys()
    for name, buffer in right.buffers.items():
        torch.testing.assert_close(fed.state.buffers[name], buffer, atol=1e-10, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_resume(method: str, tmp_path: Path) -> None:
    """Through files, in the middle of a window, of a ramp and of what clients keep."""
    first = play(federation(algorithm(method)), SCHEDULE[:3])
    Checkpoints(tmp_path).save(first)
    second = federation(algorithm(method))
    assert Checkpoints(tmp_path).load(second) == 3
    play(second, SCHEDULE[3:])
    torch.testing.assert_close(second.weights, ends(method)[-1], atol=1e-10, rtol=0)


SERVER = {
    "fedspeed-released": {"server.H": "H"},
    "fedgf": {"perturbation.c": "c"},
    "fedgloss": {"server.H": "H", "server.d": "d"},
    "fednsam": {"server.m": "m"},
    "fednsam-released": {"server.m": "m"},
    "fedsmoo-released": {"server.H": "H", "perturbation.s": "s"},
    "fedmoswa": {"correction.m": "m"},
    "fedgmt": {"server.H": "H"},
    "fedwmsam": {"correction.m": "m", "correction.c": "c", "correction.alpha": "alpha"},
    "fedavgm": {"server.m": "m"},
    "fedyogi": {"server.a": "a", "server.b": "b"},
    "fedadagrad": {"server.b": "b"},
}
"""The package's name of a state, and the oracle's."""
CLIENT = {
    "fedspeed": {"correction.h": "h"},
    "fedspeed-released": {"correction.h": "h"},
    "fedgloss": {"correction.h": "h"},
    "fedsmoo-released": {"correction.h": "h", "perturbation.mu": "mu"},
    "fedmoswa": {"correction.c": "c"},
    "fedgmt": {"correction.h": "h"},
    "fedwmsam": {"correction.c": "c_i"},
}


def expected(method: str, right: FedAvg) -> dict[str, Tensor]:
    own = {
        name: torch.as_tensor(getattr(right, key), dtype=torch.float64) for name, key in SERVER.get(method, {}).items()
    }
    for name, key in CLIENT.get(method, {}).items():
        own |= {f"client {i}.{name}": kept for i, kept in getattr(right, key).items()}
    return own


@pytest.mark.parametrize("method", METHODS)
def test_dropouts(method: str) -> None:
    """Clients that are asked and do not answer, in one round all of them; and the state of server and clients then."""
    fed, right = federation(algorithm(method), active=3, dropout=0.55), oracle(method)
    silent = []
    for _ in range(11):
        record = fed.round()
        answered = [i for i in record.active if i not in (record.dropped or {})]
        silent.append(len(record.active) - len(answered))
        right.round(answered, asked=len(record.active))
        torch.testing.assert_close(fed.weights, right.w, atol=1e-10, rtol=0)
    assert {0, 1, 2, 3} == set(silent)
    known = states(fed)
    for name, state in expected(method, right).items():
        torch.testing.assert_close(known[name].double(), state.double(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_two_workers(method: str) -> None:
    with federation(algorithm(method), workers=2, threads=1) as fed:
        play(fed, SCHEDULE[:4])
        torch.testing.assert_close(fed.weights, ends(method)[3], atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("method", "hyper", "other", "others"),
    [
        ("fedmoswa", {"floor": 1.0, "gamma": 1.0, "lr_g": 1.0}, "scaffold", {}),
        ("fedspeed", {"alpha": 1.0}, "fedspeed-released", {"rho": 0.15, "lam": 0.2}),
        ("fedspeed", {"alpha": 0.0}, "feddyn", {"lam": 0.2}),
    ],
)
def test_the_same_if_everybody_is_active(
    method: str, hyper: dict[str, Any], other: str, others: dict[str, Any]
) -> None:
    one, two = federation(algorithm(method, **hyper)), federation(algorithms.get(other, **others))
    for fed in (one, two):
        play(fed, [range(6)] * 4)
    torch.testing.assert_close(one.weights, two.weights, atol=1e-11, rtol=0)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_noise_of_the_mean(engine: str) -> None:
    """The same with clients that do not answer: K counts them."""

    def draw(t: int) -> Tensor:
        return torch.randn(39, generator=generator(SEED, "privacy", t), dtype=torch.float64)

    fed = federation(algorithm("dp-fedsam", noise=0.7), active=3, dropout=0.3, engine=engine)
    right = oracle("dp-fedsam", noise=0.7, draw=draw)
    missing = 0
    for _ in range(6):
        record = fed.round()
        answered = [i for i in record.active if i not in (record.dropped or {})]
        missing += len(record.active) - len(answered)
        right.round(answered, asked=len(record.active))
        torch.testing.assert_close(fed.weights, right.w, atol=1e-10, rtol=0)
    assert missing


def test_the_whole_catalogue_has_an_oracle() -> None:
    """`oracle` has the others: test_oracle.py runs over all that are not here."""
    assert set(METHODS) <= set(CATALOGUE)
    assert set(METHODS) == set(HYPER)
    assert all(set(HYPER[name]) <= set(algorithms.hyperparameters(name)) for name in METHODS)


def test_the_seeds_are_the_same() -> None:
    assert federation("fedavg").seed == SEED
