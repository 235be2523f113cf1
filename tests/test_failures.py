"""Clients that fail: left out of the round with a reason, and nothing else of the round is any different."""

import copy
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import CONTROL_VARIATES, DYNAMIC, Oracle
from torch import Tensor, nn
from worlds import assert_same_bits, epochs, federate, federation, mlp, samples, snapshot, states, training

from fedlesam import Federation, LocalTraining, NotFinite, algorithms
from fedlesam.algorithms import CATALOGUE
from fedlesam.cli import main
from fedlesam.data import load
from fedlesam.data.dataset import DataSet, Images
from fedlesam.data.splits import make_split
from fedlesam.engines.stacked import NotStackable
from fedlesam.engines.world import WorkerLost
from fedlesam.federation import DROPOUT, Record
from fedlesam.report import pictures
from fedlesam.report.ranking import ranking
from fedlesam.runs import config as configs
from fedlesam.runs.build import build
from fedlesam.runs.compare import compare, plan
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.read import read_run
from fedlesam.runs.runner import MOST_LOGGED, NoAnswers, execute

UNPLUGGED = 12345.0
"""A client with this input raises."""
LARGEST_NORM = 60.0
METHODS = ("fedavg", "fedlesam-s", "fedsmoo")


class Clients:
    """Clients whose data can be spoilt and mended while workers train on them: the memory is shared."""

    def __init__(self, sizes: tuple[int, ...] = (7, 12, 5, 9, 16, 3), dtype: torch.dtype = torch.float64) -> None:
        self.pairs = [(x.share_memory_(), y) for x, y in samples(sizes, dtype=dtype)]
        self.good = [x.clone() for x, _ in self.pairs]

    def spoil(self, how: dict[int, str]) -> None:
        for client, mode in how.items():
            x = self.pairs[client][0]
            x.copy_(MODES[mode][0](self.good[client]))

    def mend(self) -> None:
        for (x, _), good in zip(self.pairs, self.good, strict=True):
            x.copy_(good)


MODES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "raises": (lambda x: torch.full_like(x, UNPLUGGED), "OSError: [Errno 5] unplugged"),
    "nan": (lambda x: torch.full_like(x, math.nan), "the loss of step 0 is not finite"),
    "explodes": (lambda x: 1e4 * x, "the update has norm "),
    "too large": (lambda x: 1e9 * x, "update has an entry of "),
    "buffer": (lambda x: 1e30 * x, "the buffer 0.running_var is not finite"),
}
"""What is done to the client's inputs, and the beginning of the reason."""


def sensor(x: Tensor, _: torch.Generator) -> Tensor:
    if bool((x == UNPLUGGED).any()):
        raise OSError(5, "unplugged")
    return x


def linear(dtype: torch.dtype = torch.float64) -> nn.Module:
    """The gradient grows with the inputs, so an update can explode and stay finite."""
    return mlp((5, 3), dtype)


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(5), mlp((5, 4, 3), torch.float32))


def make(method: str, clients: Clients, **settings: Any) -> Federation:
    given = {"model": linear(), "local": training(clip=None, augment=sensor), "on_client_error": "drop"}
    return federation(method, clients=clients.pairs, **{**given, **settings})


def plainly(record: Record) -> dict[str, Any]:
    return {**record.as_dict(), "seconds": None}


def assert_left_out(record: Record, expected: dict[int, str]) -> None:
    found = record.dropped or {}
    assert list(found) == sorted(expected)
    for client, mode in expected.items():
        assert found[client].startswith(DROPOUT if mode == DROPOUT else MODES[mode][1])


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


@pytest.mark.parametrize("method", CATALOGUE)
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


# Dropout


def test_dropout_comes_from_the_seed_the_round_and_the_client_alone() -> None:
    fed, same = (make("fedavg", Clients(), dropout=0.4) for _ in range(2))
    other = make("fedavg", Clients(), dropout=0.4, seed=8)
    everybody = range(6)
    draws = [fed.draw_silent(t, everybody) for t in range(200)]
    assert draws == [same.draw_silent(t, everybody) for t in range(200)]
    assert draws != [other.draw_silent(t, everybody) for t in range(200)]
    for t in range(50):
        for few in ([0], [2, 5], [1, 3, 4]):
            assert fed.draw_silent(t, few) == [client for client in draws[t] if client in few]
    fed.round([0, 1])
    assert fed.draw_silent(7, everybody) == draws[7], "nor from what was trained"


def test_more_dropout_drops_the_same_clients_and_more() -> None:
    feds = [make("fedavg", Clients(), dropout=p) for p in (0.0, 0.2, 0.7, 1.0)]
    for t in range(50):
        none, few, many, everyone = (fed.draw_silent(t, range(6)) for fed in feds)
        assert none == []
        assert set(few) <= set(many)
        assert everyone == list(range(6))


def test_the_statistics_of_dropout() -> None:
    """Each client with probability P, independent of the other clients and of the round before."""
    rounds, p = 3000, 0.3
    fed = make("fedavg", Clients(), dropout=p)
    silent = torch.zeros(rounds, 6)
    for t in range(rounds):
        silent[t, fed.draw_silent(t, range(6))] = 1
    sigma = math.sqrt(p * (1 - p) / rounds)
    assert (silent.mean(0) - p).abs().max() < 4.5 * sigma
    together = silent.T @ silent / rounds
    pairs = together[~torch.eye(6, dtype=torch.bool)]
    assert (pairs - p * p).abs().max() < 4.5 * math.sqrt(p * p * (1 - p * p) / rounds)
    again = (silent[1:] * silent[:-1]).mean(0)
    assert (again - p * p).abs().max() < 4.5 * math.sqrt(p * p * (1 - p * p) / rounds)


@pytest.mark.parametrize("method", CATALOGUE)
def test_a_round_with_dropout_is_the_round_of_those_who_answer(method: str) -> None:
    fed, only = make(method, Clients(), dropout=0.7, active=4), make(method, Clients(), active=4)
    seen = set()
    for t in range(6):
        active = fed.draw_active(t)
        assert active == only.draw_active(t), "participation is drawn apart"
        silent = fed.draw_silent(t, active)
        survivors = [client for client in active if client not in silent]
        seen.add(len(survivors))
        record = fed.round()
        assert record.active == active
        assert record.dropped == (dict.fromkeys(silent, DROPOUT) or None)
        if not survivors:
            only.state = dataclasses.replace(only.state, round=t + 1)
            continue
        expected = only.round(survivors)
        names = ("train_loss", "divergence", "lr", "backward_passes", "bytes_up")
        assert [getattr(record, name) for name in names] == [getattr(expected, name) for name in names]
        assert_same_bits(states(fed), states(only))
    assert seen == {0, 1, 2}, seen


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


@pytest.mark.parametrize("method", CATALOGUE)
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
    fed = make("fedlesam-s", clients, dropout=1.0)
    before = snapshot(fed)
    records = list(fed.run(3))
    assert [record.dropped for record in records] == [dict.fromkeys(range(6), DROPOUT)] * 3
    assert [record.backward_passes for record in records] == [0, 0, 0]
    after = states(fed)
    assert int(after.pop("round")) == int(before.pop("round")) + 3
    assert_same_bits(after, before)


# Stop


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize(
    ("mode", "kind"),
    [("raises", OSError), ("nan", NotFinite), ("explodes", NotFinite), ("too large", NotFinite)],
)
def test_stop_raises_and_changes_nothing(mode: str, kind: type[Exception], engine: str) -> None:
    clients, untouched = Clients((8,) * 6), Clients((8,) * 6)
    local = training(clip=None, augment=sensor, epochs=2)
    settings = {"local": local, "on_client_error": "stop", "engine": engine}
    limit = LARGEST_NORM if mode == "explodes" else None
    fed = make("fedlesam-s", clients, **settings, max_update_norm=limit)
    only = make("fedlesam-s", untouched, **settings, max_update_norm=limit)
    for one in (fed, only):
        one.round([0, 1, 2])
    before, memories = snapshot(fed), dict(fed.memories)
    clients.spoil({2: mode, 4: mode})
    with pytest.raises(kind, match="unplugged" if mode == "raises" else "round 1, client 2: "):
        fed.round([0, 2, 3, 4])
    assert_same_bits(states(fed), before)
    assert dict(fed.memories) == memories
    clients.mend()
    for one in (fed, only):
        one.round([0, 2, 3, 4])
    assert_same_bits(states(fed), states(only))


def test_clients_that_fail_are_dropped_unless_told() -> None:
    """In Python and on the command line alike; a run of days must not end for one client."""
    assert Federation(mlp(), samples()).failures.on_error == RunConfig().on_client_error == "drop"


def test_stop_stops_and_changes_nothing() -> None:
    clients = Clients()
    fed = federation("fedavg", clients=clients.pairs)
    clients.spoil({1: "nan"})
    with pytest.raises(NotFinite, match="round 0, client 1: the loss of step 0 is not finite"):
        fed.round([0, 1])
    assert fed.state.round == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dropout": 1.5}, r"dropout must be at most 1, got 1\.5"),
        ({"dropout": -0.1}, r"dropout must be at least 0, got -0\.1"),
        ({"dropout": "0.1"}, "dropout must be a number, got '0.1'"),
        ({"max_update_norm": 0}, "max_update_norm must be above 0, got 0"),
        ({"max_update_norm": math.inf}, "max_update_norm must be above 0, got inf"),
        ({"on_client_error": "ignore"}, "on_error must be one of 'drop', 'stop', got 'ignore'"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make("fedavg", Clients(), **settings)


# What is not the client's fault


def cannot_allocate() -> Tensor:
    return torch.empty(10**15)


def out_of_memory() -> None:
    raise MemoryError("no RAM left")


def gpu_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def worker_lost() -> None:
    raise WorkerLost("a process is gone")


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize(
    ("happens", "kind"),
    [
        (out_of_memory, MemoryError),
        (gpu_out_of_memory, torch.OutOfMemoryError),
        (cannot_allocate, RuntimeError),
        (worker_lost, WorkerLost),
    ],
)
def test_a_fault_of_the_machine_is_never_the_clients(
    happens: Callable[[], Any], kind: type[Exception], engine: str
) -> None:
    """Or the results would be a matter of how much RAM was free."""
    clients = Clients((8,) * 6)

    def augment(x: Tensor, _: torch.Generator) -> Tensor:
        if bool((x == UNPLUGGED).any()):
            happens()
        return x

    fed = make("fedlesam-s", clients, local=training(augment=augment, epochs=1), engine=engine)
    fed.round([0, 1, 2])
    before = snapshot(fed)
    clients.spoil({1: "raises"})
    with pytest.raises(kind) as raised:
        fed.round([0, 1, 2])
    if engine == "plain":
        assert raised.value.__notes__ == ["while training client 1 in round 1"]
    assert_same_bits(states(fed), before)


def test_an_interrupt_is_never_the_clients() -> None:
    clients = Clients()

    def augment(x: Tensor, _: torch.Generator) -> Tensor:
        raise KeyboardInterrupt

    fed = make("fedavg", clients, local=training(augment=augment))
    with pytest.raises(KeyboardInterrupt):
        fed.round([0, 1])
    assert fed.state.round == 0


def test_a_memory_that_cannot_be_read_is_never_the_clients(tmp_path: Path) -> None:
    fed = make("scaffold", Clients(), memory=0, folder=tmp_path)
    fed.round([0, 1])
    (tmp_path / "round000000-client000001.safetensors").write_bytes(b"broken")
    weights = fed.weights
    with pytest.raises(ValueError, match="the memory of client 1 cannot be read"):
        fed.round([0, 1])
    assert fed.state.round == 1
    assert torch.equal(fed.weights, weights)


# Engines


def stacked(clients: Clients, engine: str, **settings: Any) -> Federation:
    """Clients of one size: all of a round are one stack."""
    local = training(clip=None, augment=sensor, epochs=1)
    return make("fedlesam-s", clients, local=local, engine=engine, **settings)


@pytest.mark.parametrize("mode", ["raises", "nan"])
def test_a_stack_with_a_failure_trains_one_by_one(mode: str) -> None:
    """So its bits are those of the plain engine."""
    feds = []
    for engine in ("plain", "stacked"):
        clients = Clients((8,) * 6)
        clients.spoil({1: mode, 4: mode})
        fed = stacked(clients, engine)
        assert_left_out(fed.round(), {1: mode, 4: mode})
        feds.append(fed)
    assert_same_bits(states(feds[0]), states(feds[1]))


def test_a_stack_without_failures_stays_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose updates are refused: they were trained well."""
    clients = Clients((8,) * 6)
    clients.spoil({1: "explodes"})
    fed = stacked(clients, "stacked", max_update_norm=LARGEST_NORM)
    with monkeypatch.context() as patch:
        patch.setattr("fedlesam.engines.serial.local_update", None)
        assert_left_out(fed.round(), {1: "explodes"})
    plain = stacked(Clients((8,) * 6), "plain")
    plain.round([0, 2, 3, 4, 5])
    torch.testing.assert_close(fed.weights, plain.weights, rtol=0, atol=1e-11)


def test_a_model_that_cannot_be_stacked_is_not_the_clients_fault() -> None:
    clients = Clients((8,) * 6)
    model = nn.Sequential(linear(), nn.Dropout(0.5))
    with pytest.raises(NotStackable, match="use the plain engine"):
        stacked(clients, "stacked", model=model).round()


SOME_FAIL: tuple[tuple[list[int] | None, dict[int, str]], ...] = (
    ([0, 1, 2, 3, 4, 5], {}),
    ([0, 1, 2, 3, 4], {0: "raises", 3: "nan"}),
    ([1, 2, 5], {1: "buffer", 2: "nan", 5: "raises"}),
    (None, {4: "buffer"}),
    ([0, 1, 2, 3, 4, 5], {}),
    (None, {}),
    ([0, 1, 2, 3, 4, 5], {}),
)


def with_failures(method: str, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    clients = Clients((7, 12, 6, 9, 16, 8), dtype=torch.float32)
    given = {"model": normed(), "test": samples((30,), dtype=torch.float32)[0], "dropout": 0.2, "active": 4}
    records = []
    with make(method, clients, threads=1, **given, **settings) as fed:
        for active, how in SOME_FAIL:
            clients.spoil(how)
            records.append(plainly(fed.round(active)))
            clients.mend()
        return records, snapshot(fed)


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[list[dict[str, Any]], dict[str, Tensor]]]:
    return {method: with_failures(method) for method in METHODS[1:]}


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 2},
        {"workers": 3},
        {"workers": 2, "store": "pinned"},
        {"workers": 3, "store": "pinned", "memory": 900},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", METHODS[1:])
def test_the_same_bits_and_reasons_for_any_number_of_workers(
    alone: dict[str, Any], method: str, settings: dict[str, Any]
) -> None:
    expected, state = alone[method]
    records, found = with_failures(method, **settings)
    assert records == expected
    reasons = {why for record in records for why in record.get("dropped", {}).values()}
    assert len(reasons) == 4, "dropout, an error, a loss and a buffer"
    shared = {name: tensor for name, tensor in state.items() if name in found}
    assert {name for name in state if not name.startswith("client")} <= shared.keys()
    assert_same_bits(found, shared)
    if settings.get("store") != "pinned":
        assert found.keys() == state.keys()


def test_a_fault_of_the_machine_in_a_worker() -> None:
    clients = Clients((8,) * 6)

    def augment(x: Tensor, _: torch.Generator) -> Tensor:
        if bool((x == UNPLUGGED).any()):
            raise MemoryError("no RAM left")
        return x

    with make("scaffold", clients, local=training(augment=augment, epochs=1), workers=2) as fed:
        fed.round()
        before = snapshot(fed)
        clients.spoil({5: "raises", 4: "nan"})
        with pytest.raises(MemoryError, match="no RAM left"):
            fed.round([0, 1, 2, 5])
        assert_same_bits(states(fed), before)
        clients.mend()
        assert fed.round().dropped is None


# Run folders


def tiny(**change: Any) -> RunConfig:
    small = {"clients": 6, "active": 3, "rounds": 4, "epochs": 1, "batch_size": 50, "model": "mlp:hidden=4"}
    return configs.resolve(RunConfig(**{"algorithm": "scaffold", "threads": 1, **small, **change}))


def digits_with_nan(config: RunConfig, broken: set[int]) -> DataSet:
    """The digits, but for some clients' samples."""
    data = load("digits")
    x = data.train.x.float()
    for client in broken:
        x[torch.from_numpy(make_split(config.split, data, config.clients, config.seed).clients[client])] = math.nan
    return dataclasses.replace(data, train=Images(x, data.train.y))


def records_of(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line, parse_constant=refuse), "seconds": None} for line in lines]


def test_metrics_say_who_and_why(tmp_path: Path) -> None:
    config = tiny(dropout=0.25)
    data = digits_with_nan(config, {1, 4})
    summary = execute(config, tmp_path / "x", data=data)
    records = records_of(tmp_path / "x")
    fed = build(config, data).federation
    for record, expected in zip(records, fed.run(4), strict=True):
        assert record == json.loads(json.dumps(plainly(expected)))
        silent = fed.draw_silent(record["round"], record["active"])
        nan = "the loss of step 0 is not finite"
        why = {i: DROPOUT if i in silent else nan for i in record["active"] if i in silent or i in (1, 4)}
        assert record.get("dropped", {}) == {str(client): reason for client, reason in why.items()}
    assert summary["state"] == "finished"
    assert summary["dropped"] == sum(len(record.get("dropped", ())) for record in records) > 2
    assert {why for record in records for why in record.get("dropped", {}).values()} == {DROPOUT, nan}


def test_a_resumed_run_has_the_same_failures(tmp_path: Path) -> None:
    config = tiny(dropout=0.25)
    data = digits_with_nan(config, {1, 4})
    execute(config, tmp_path / "whole", data=data)

    def stop(record: Record) -> None:
        if record.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(config, tmp_path / "parts", data=data, watch=stop)
    assert len(records_of(tmp_path / "parts")) == 2
    execute(config, tmp_path / "parts", data=data)
    assert records_of(tmp_path / "parts") == records_of(tmp_path / "whole")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other


def test_a_run_goes_on_where_numbers_stop_being_finite(tmp_path: Path) -> None:
    """From round 1 on everybody fails; the model stays that of round 0."""
    summary = execute(tiny(lr_decay=1e25, clip=0.0), tmp_path / "x")
    execute(tiny(lr_decay=1e25, clip=0.0, rounds=1), tmp_path / "first")
    assert (summary["state"], summary["rounds"], summary["dropped"]) == ("finished", 4, 9)
    assert (tmp_path / "x/model.safetensors").read_bytes() == (tmp_path / "first/model.safetensors").read_bytes()
    assert ["train_loss" in record for record in records_of(tmp_path / "x")] == [True, False, False, False]


def test_a_run_in_which_no_client_ever_answered(tmp_path: Path) -> None:
    config = tiny(dropout=0.3)
    data = digits_with_nan(config, set(range(6)))
    for _ in range(2):  # repeated it ends the same way
        with pytest.raises(NoAnswers, match="no client ever answered, so nothing was learnt; the first, ") as end:
            execute(config, tmp_path / "x", data=data)
        records = records_of(tmp_path / "x")
        client = next(i for r in records for i, why in r["dropped"].items() if why != DROPOUT)
        assert str(end.value).endswith(f"client {client}: the loss of step 0 is not finite")
        summary = RunFolder(tmp_path / "x").read_summary()
        assert (summary["state"], summary["rounds"], summary["why"]) == ("stopped", 4, str(end.value))
        assert len(records) == 4


def test_the_first_failure_is_named_even_if_its_reason_comes_again() -> None:
    from fedlesam.runs.runner import _check_answers

    records: list[dict[str, Any]] = [
        {"dropped": {"3": DROPOUT, "5": "first"}},
        {"dropped": {"0": "second"}},
        {"dropped": {"1": "first"}},
    ]
    with pytest.raises(NoAnswers, match="the first, client 5: first"):
        _check_answers(records)
    _check_answers([*records, {"train_loss": 1.0}])
    _check_answers([{"dropped": {"3": DROPOUT}}])


def test_dropout_alone_is_what_was_asked_for(tmp_path: Path) -> None:
    summary = execute(tiny(dropout=1.0, rounds=2), tmp_path / "x")
    assert (summary["state"], summary["dropped"], summary["backward_passes"]) == ("finished", 6, 0)
    fresh = build(tiny()).federation
    from safetensors.torch import load_file

    for name, tensor in load_file(tmp_path / "x" / "model.safetensors").items():
        assert torch.equal(tensor, fresh.model.state_dict()[name])


# Reports


def test_reports_of_rounds_without_answers(tmp_path: Path) -> None:
    base = dataclasses.replace(tiny(), dropout=1.0, rounds=2, hyper={})
    runs = compare(plan(base, ["fedavg", "fedsam"], 2), tmp_path)
    assert [run.curve("train_loss") for run in runs] == [([], [])] * 4
    assert runs[0].curve("test_accuracy")[0] == [1, 2]
    rows = ranking(runs)
    assert [(row.backward_passes, row.rounds) for row in rows] == [(0, 2), (0, 2)]
    assert all(row.megabytes > 0 for row in rows)
    assert all(path.exists() for path in pictures.comparison(runs, tmp_path))
    assert read_run(runs[0].path).total("bytes_up") == 0


# The command line

TINY = ["--clients", "6", "--active", "3", "--epochs", "1", "--batch-size", "50", "--model", "mlp:hidden=4"]

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`fedlesam ...` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLESAM_TRACEBACK", raising=False)

    def fedlesam(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedlesam", *args])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return fedlesam


@pytest.mark.parametrize("more", [[], ["--quiet"], ["--json"]], ids=str)
def test_failures_are_logged_but_not_all_of_them(call: Call, tmp_path: Path, more: list[str]) -> None:
    """Also where nothing else is said; and an end that is not a success."""
    code, out, err = call("run", "--rounds", "3", *TINY, "--lr", "1e30", "--clip", "0", "--out", "x", *more)
    assert code == 3
    assert out == ""
    assert "Traceback" not in err
    warnings = [line for line in err.splitlines() if line.startswith("warning: ")]
    failed = [(r["round"], i, why) for r in records_of(tmp_path / "x") for i, why in r["dropped"].items()]
    assert len(failed) == 9
    logged = [f"warning: round {t}: client {i} is dropped: {why}" for t, i, why in failed[:MOST_LOGGED]]
    assert warnings == [*logged, "warning: more clients are dropped; all of them are in metrics.jsonl"]
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    _, first, why = failed[0]
    assert errors == [f"error: no client ever answered, so nothing was learnt; the first, client {first}: {why}"]


def test_dropout_is_shown_but_not_warned_of(call: Call, tmp_path: Path) -> None:
    code, _, err = call("run", "--rounds", "4", *TINY, "--dropout", "0.5", "--out", "x")
    assert code == 0
    assert "warning" not in err
    records = records_of(tmp_path / "x")
    assert sum(len(record.get("dropped", ())) for record in records) > 0
    last = len(records[-1].get("dropped", ()))
    assert (f"{last} dropped" in err) == bool(last)
    assert RunFolder(tmp_path / "x").read_config().dropout == 0.5


def test_flags_reach_the_run(call: Call, tmp_path: Path) -> None:
    args = ["run", "--rounds", "2", *TINY, "--out", "x"]
    code, _, err = call(*args, "--max-update-norm", "1e-9")
    assert code == 3
    assert "the update has norm" in err
    assert "above 1e-09" in err
    other = ["--rounds", "2", *TINY, "--max-update-norm", "1e-9", "--on-client-error", "stop", "--out", "y"]
    code, _, err = call("run", *other)
    assert code == 3
    assert err.startswith("error: round 0, client ")
    assert records_of(tmp_path / "y") == []
    code, _, err = call(*args, "--max-update-norm", "1e-9", "--dropout", "0.5")
    assert code == 2
    assert "holds another run (dropout: 0.5 here, 0.0 there)" in err


def test_tables_survive_runs_without_answers(call: Call) -> None:
    """No backward pass was made: FedAvg's is no unit then."""
    args = ["compare", "fedavg", "fedsam", "--rounds", "1", *TINY, "--dropout", "1", "--out", "c"]
    code, out, _ = call(*args)
    assert code == 0
    assert "fedsam" in out
    assert "nan" not in out
    code, out, _ = call(*args, "--json")
    assert [row["backward_passes"] for row in json.loads(out)["ranking"]] == [0, 0]
    code, out, _ = call("runs", "c")
    assert code == 0
    assert out.count("finished") == 2


def test_what_a_run_with_dropout_costs(call: Call) -> None:
    code, out, _ = call("cost", *TINY, "--dropout", "0.5", "--json")
    assert code == 0
    assert json.loads(out)["active"] == 3
    code, _, err = call("cost", *TINY, "--dropout", "2")
    assert code == 2
    assert "dropout must be at most 1, got 2.0" in err


def test_a_federation_without_failures_says_nothing() -> None:
    fed = federate(mlp(), samples(), "fedavg", LocalTraining(loss=F.cross_entropy, epochs=1), on_client_error="drop")
    record = fed.round()
    assert record.dropped is None
    assert "dropped" not in record.as_dict()
