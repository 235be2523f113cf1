"""Errors that end a round, of a client or of the machine, and failures in stacks and in workers."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import (
    LARGEST_NORM,
    METHODS,
    UNPLUGGED,
    Clients,
    assert_left_out,
    linear,
    make,
    normed,
    plainly,
    sensor,
)
from torch import Tensor, nn
from worlds import assert_same_bits, federation, mlp, samples, snapshot, states, training

from fedlesam import Algorithm, Federation, NotFinite
from fedlesam.core.record import MOST_LOGGED
from fedlesam.engines.stacked import NotStackable
from fedlesam.engines.world import WorkerLost
from fedlesam.rules import Ascent, Step
from fedlesam.runs.config import RunConfig

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


def test_failures_are_logged_in_python_too(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that prints the accuracy alone would not show that nobody trains."""

    class Broken(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            if i:
                raise KeyError("label")
            return samples()[0][0][0], samples()[0][1][0]

    fed = Federation(mlp(), [Broken() for _ in range(3)])
    records = list(fed.run(3))
    assert [len(record.failed) for record in records] == [3, 3, 3]
    logged = [f"round {i // 3}: client {i % 3} is dropped: KeyError: 'label'" for i in range(MOST_LOGGED)]
    assert caplog.messages == [*logged, "more clients are dropped; all of them are in the records"]


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
        ({"dropout": 1.5}, r"dropout must be below 1, got 1\.5"),
        ({"dropout": -0.1}, r"dropout must be at least 0, got -0\.1"),
        ({"dropout": "0.1"}, "dropout must be a number, got '0.1'"),
        ({"max_update_norm": 0}, "max_update_norm must be above 0, got 0"),
        ({"max_update_norm": math.inf}, "max_update_norm must be a finite number, got inf"),
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
def test_a_stack_with_a_failure(mode: str) -> None:
    """Where a client raises, all train one by one, with the bits of the plain engine; a NaN stays in its own row."""
    feds = []
    for engine in ("plain", "stacked"):
        clients = Clients((8,) * 6)
        clients.spoil({1: mode, 4: mode})
        fed = stacked(clients, engine)
        assert_left_out(fed.round(), {1: mode, 4: mode})
        feds.append(fed)
    if mode == "raises":
        assert_same_bits(states(feds[0]), states(feds[1]))
    torch.testing.assert_close(feds[0].weights, feds[1].weights, rtol=0, atol=1e-11)


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
    said = r"this model or loss \(draws random numbers\); set p=0 of Dropout layers and draw nothing in the loss, or"
    with pytest.raises(NotStackable, match=said):
        stacked(clients, "stacked", model=model).round()


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.detach().norm() > 0)


class Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(-1).nonzero()[:, 0]]


class ReadsNorm(Ascent):
    gradient = "current"

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return gradient.mul_(self.rho / float(gradient.norm()))


class Branches(ReadsNorm):
    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return gradient if gradient.norm() > 0 else gradient.zero_()


class Draws(ReadsNorm):
    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return torch.randn_like(gradient)


@pytest.mark.parametrize(
    ("guilty", "said"),
    [
        (
            Reads,
            "this model or loss (reads a number of a tensor on the host: .item(), float() or `if`); write torch.where",
        ),
        (Picks, "this model or loss (vmap: We do not support batching operators that can output dynamic shape."),
        (ReadsNorm, "with the rule ReadsNorm (reads a number of a tensor on the host: "),
        (Branches, "with the rule Branches (reads a number of a tensor on the host: "),
        (Draws, "with the rule Draws (draws random numbers); take step.noise, with draws = True"),
    ],
)
def test_who_cannot_be_stacked_is_named(guilty: Any, said: str) -> None:
    """Without PyTorch's plea for a report of a bug in PyTorch."""
    rule = issubclass(guilty, Ascent)
    model = nn.Sequential(linear()) if rule else nn.Sequential(linear(), guilty())
    algorithm: Any = Algorithm(guilty(0.1)) if rule else "fedavg"
    with pytest.raises(NotStackable) as refused:
        make(algorithm, Clients((8,) * 6), model=model, engine="stacked").round()
    text = str(refused.value)
    assert text.startswith(f"the stacked engine cannot train {said}") and text.endswith("use the plain engine")
    assert "file a" not in text
    assert ("check_on_device" in text) == (guilty in (ReadsNorm, Branches))


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
