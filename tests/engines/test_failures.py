"""Clients that fail: left out of the round with a reason, and nothing else of the round is any different."""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from failing import (
    LARGEST_NORM,
    METHODS,
    MODES,
    Clients,
    assert_left_out,
    make,
    normed,
    plainly,
    sensor,
)
from oracle import CONTROL_VARIATES, DYNAMIC, Oracle
from torch import Tensor
from worlds import assert_same_bits, epochs, federate, mlp, samples, snapshot, states, training

from fedlesam import Execution, Federation, LocalTraining, algorithms
from fedlesam.algorithms import CATALOGUE
from fedlesam.federation import DROPOUT

# The identity: a round in which clients fail is the round of the others


def check_identity(method: str, how: dict[int, str], **settings: Any) -> None:
    """Before, while and after clients fail: all state is that of a federation that never asked those who fail."""
    dtype = torch.float32 if "model" in settings else torch.float64
    clients, untouched = Clients(dtype=dtype), Clients(dtype=dtype)
    fed = make(method, clients, **copy.deepcopy(settings))
    only = make(method, untouched, **{**settings, "on_client_error": "stop", "max_update_norm": None})
    active = [0, 1, 2, 3, 4]
    survivors = [client for client in active if client not in how]
    for asked in ([0, 1, 2, 3], [3, 4]):
        assert plainly(fed.round(asked)) == plainly(only.round(asked))
    kept = {client: fed.memories[client] for client in how}
    clients.spoil(how)
    record, expected = fed.round(active), only.round(survivors)
    assert_left_out(record, how)
    assert_same_bits(states(fed), states(only))
    assert all(fed.memories[client] is memory for client, memory in kept.items())
    assert record.active == active
    for name in ("round", "train_loss", "divergence", "lr", "bytes_up"):
        assert getattr(record, name) == getattr(expected, name), name
    assert record.bytes_down == expected.bytes_down // len(survivors) * len(active), "those who fail were sent w too"
    clients.mend()
    for asked in ([1, 3, 5], [0, 2, 4]):
        assert plainly(fed.round(asked)) == plainly(only.round(asked))
    assert_same_bits(states(fed), states(only))


@pytest.mark.parametrize("method", [name for name in CATALOGUE if name != "dp-fedsam"])  # its mean is over those asked
def test_the_others_are_as_if_alone(method: str) -> None:
    check_identity(method, {0: "raises", 1: "nan", 3: "explodes"}, max_update_norm=LARGEST_NORM)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_fail(mode: str, method: str) -> None:
    settings: dict[str, Any] = {"model": normed()} if mode == "buffer" else {}
    check_identity(method, {0: mode, 3: mode}, **settings, max_update_norm=LARGEST_NORM if mode == "explodes" else None)


def test_weights_by_examples_are_those_of_the_survivors() -> None:
    check_identity("fedlesam", {1: "nan", 4: "raises"}, weighting="examples")


@pytest.mark.parametrize("budget", [0, 500])
def test_memory_in_files_is_unchanged_too(budget: int, tmp_path: Path) -> None:
    clients, untouched = Clients(), Clients()
    fed = make("fedlesam-s", clients, memory=budget, folder=tmp_path)
    only = make("fedlesam-s", untouched)
    for asked in ([0, 1, 2, 3], [3, 4]):
        fed.round(asked)
        only.round(asked)
    clients.spoil({0: "nan", 2: "raises"})
    fed.round([0, 1, 2, 4])
    only.round([1, 4])
    assert_same_bits(states(fed), states(only))
    clients.mend()
    fed.round([0, 2])
    only.round([0, 2])
    assert_same_bits(states(fed), states(only))
    assert {path.name for path in tmp_path.iterdir()} <= {
        f"round{t:06d}-{who}.safetensors"
        for client, t in fed.memories.rounds.items()
        for who in ("anchor", f"client{client:06d}")
    }


def test_a_healthy_update_at_the_limit_is_kept() -> None:
    """max_update_norm is a bound on the norm of d_i, and changes nothing below it."""
    free, tight = make("fedavg", Clients()), make("fedavg", Clients(), max_update_norm=1e5)
    for fed in (free, tight):
        fed.round([0, 1, 2])
    assert_same_bits(states(free), states(tight))
    clients = Clients()
    one = make("fedavg", clients)
    w = one.weights
    one.round([0])
    norm = float((one.weights - w).norm())
    assert make("fedavg", clients, max_update_norm=norm * (1 + 1e-9)).round([0]).dropped is None
    record = make("fedavg", clients, max_update_norm=norm * (1 - 1e-9)).round([0])
    assert record.dropped == {0: f"the update has norm {norm:.3g}, above {norm * (1 - 1e-9):g}"}


def test_reasons_are_one_short_line() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise KeyError("a" * 500 + "\nsecond line")

    fed = make("fedavg", Clients(), local=training(loss=loss))
    [why] = (fed.round([2]).dropped or {}).values()
    assert why.startswith("KeyError: 'aaa")
    assert len(why) <= 200
    assert "\n" not in why


# K/N


def at_random(t: int) -> dict[int, str]:
    """Some fail in some rounds."""
    return {client: ("nan", "raises")[client % 2] for client in range(6) if (t * 5 + client * 3) % 7 == 0}


@pytest.mark.parametrize("method", [*CONTROL_VARIATES, *DYNAMIC])
def test_server_state_is_the_mean_over_all_clients(method: str) -> None:
    """c of the c_i and H of the h_i, over N, those never heard of counting as 0: only true with K of the survivors."""
    clients = Clients()
    local = training(augment=sensor, epochs=1)
    fed = make(method, clients, local=local, dropout=0.35, active=4)
    missing = 0
    for t in range(25):
        clients.spoil(at_random(t))
        missing += len(fed.round().dropped or {})
        clients.mend()
        name = "c" if method in CONTROL_VARIATES else "h"
        zero = torch.zeros_like(fed.weights)
        kept = [fed.memories[i].correction[name] if i in fed.memories else zero for i in range(6)]
        server = fed.state.correction["c"] if name == "c" else fed.state.server["H"]
        torch.testing.assert_close(server, sum(kept) / 6, atol=1e-10, rtol=0)
    assert 30 < missing < 80
    assert float(server.norm()) > 1e-2


@pytest.mark.parametrize("method", ["scaffold", "feddyn", "fedsmoo", "fedlesam-s", "fedcm", "fedadam"])
def test_against_the_oracle(method: str) -> None:
    """Written from the mathematics, told only of those who answered."""
    settings: dict[str, Any] = {"lr": 0.2, "lr_decay": 0.9, "batch_size": 4, "weight_decay": 0.05, "clip": 0.6}
    takes = algorithms.hyperparameters(method)
    hyper = {key: value for key, value in {"rho": 0.15, "alpha": 0.3, "lam": 0.2}.items() if key in takes}
    clients = Clients()
    fed = make(
        algorithms.get(method, **hyper, lr_g=0.05 if method == "fedadam" else 1.0),  # type: ignore[arg-type]
        clients,
        model=mlp(),
        local=training(augment=sensor),
        dropout=0.3,
    )
    lr_g = {"lr_g": 0.05 if method == "fedadam" else 1.0}
    oracle = Oracle(method, mlp(), samples(), epochs, seed=7, clip_scope="loss", **settings, **hyper, **lr_g)
    missing = 0
    for t in range(8):
        clients.spoil(at_random(t))
        record = fed.round()
        clients.mend()
        missing += len(record.dropped or {})
        oracle.round([client for client in record.active if client not in (record.dropped or {})])
    assert missing > 8
    server_state, theirs = states(fed), oracle.states()
    assert server_state.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(server_state[name].double(), theirs[name].double(), atol=1e-10, rtol=0)


# Nobody answers


@pytest.mark.parametrize("method", [name for name in CATALOGUE if name != "dp-fedsam"])  # it clips what is too large
def test_a_round_without_survivors_keeps_everything_and_goes_on(method: str) -> None:
    clients, test = Clients(), samples((20,))[0]
    fed, other = make(method, clients, test=test), make(method, Clients(), test=test)
    for one in (fed, other):
        one.round([0, 1, 2])
        last = one.round([1, 3])
    before, memories = snapshot(fed), dict(fed.memories)
    clients.spoil({1: "nan", 2: "raises", 5: "too large"})
    record = fed.round([1, 2, 5])
    assert_left_out(record, {1: "nan", 2: "raises", 5: "too large"})
    after = states(fed)
    assert int(after.pop("round")) == int(before.pop("round")) + 1 == 3
    assert_same_bits(after, before)
    assert dict(fed.memories) == memories
    assert (record.round, record.lr) == (2, pytest.approx(0.2 * 0.9**2))
    assert math.isnan(record.train_loss)
    assert math.isnan(record.divergence)
    assert (record.test_loss, record.test_accuracy) == (last.test_loss, last.test_accuracy)
    assert record.bytes_up == 0
    assert record.bytes_down > 0
    written = json.loads(json.dumps(record.as_dict(), allow_nan=False))
    assert not {"train_loss", "divergence"} & written.keys()
    assert set(written["dropped"]) == {"1", "2", "5"}
    clients.mend()
    other.state = dataclasses.replace(other.state, round=3)
    assert plainly(fed.round([0, 2, 5])) == plainly(other.round([0, 2, 5])), "with the learning rate of round 3"
    assert_same_bits(states(fed), states(other))


def test_nobody_ever_answers() -> None:
    clients = Clients()
    fed = make("fedlesam-s", clients, dropout=1 - 1e-9)
    before = snapshot(fed)
    records = list(fed.run(3))
    assert [record.dropped for record in records] == [dict.fromkeys(range(6), DROPOUT)] * 3
    assert [record.backward_passes for record in records] == [0, 0, 0]
    after = states(fed)
    assert int(after.pop("round")) == int(before.pop("round")) + 3
    assert_same_bits(after, before)


def test_a_federation_without_failures_says_nothing() -> None:
    fed = federate(mlp(), samples(), "fedavg", LocalTraining(loss=F.cross_entropy, epochs=1), on_client_error="drop")
    record = fed.round()
    assert record.dropped is None
    assert "dropped" not in record.as_dict()


@pytest.mark.parametrize("how", [{}, {"engine": "stacked"}, {"workers": 2}])
def test_a_number_of_epochs_that_raises_drops_the_client_and_its_traceback_is_logged(
    how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def some(round: int, client: int) -> int:
        return 1 if client else 1 // round

    with (
        caplog.at_level("DEBUG", logger="fedlesam"),
        Federation(mlp(), samples(), "fedavg", training(epochs=some), execution=Execution(**how, threads=1)) as fed,
    ):
        record = fed.round([0, 1, 2])
    assert record.dropped == {0: "ZeroDivisionError: integer division or modulo by zero"}
    if "workers" not in how:
        [one] = [entry for entry in caplog.records if entry.exc_info]
        assert one.levelname == "DEBUG" and one.exc_info is not None and one.exc_info[0] is ZeroDivisionError
