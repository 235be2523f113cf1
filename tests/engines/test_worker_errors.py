"""Several workers: the same errors as one, and an end within seconds when one of them dies."""

import contextlib
import copy
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workers import PATIENCE, alive, children, make, rounds, same, trackers, wait_for
from worlds import SCHEDULE, assert_same_bits, federation, mlp, samples, snapshot, states, training

from fedlesam.core.checks import NotFinite
from fedlesam.engines import world as world_room
from fedlesam.engines.world import WorkerLost
from fedlesam.federation import Federation
from fedlesam.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# Errors


class Own(KeyError):
    """A class of the user's, that the leader could not know."""


class Loss:
    """Goes wrong for the clients whose favourite label it is told, in training or in evaluation."""

    def __init__(self, folder: Path, kind: type[Exception] = ValueError, leader: int = 0) -> None:
        self.folder, self.kind, self.leader = folder, kind, leader

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output, target)
        if not torch.is_grad_enabled():
            if (self.folder / "evaluation").exists():
                raise self.kind("evaluation is broken")
            return loss
        for label in target.unique().tolist():
            if (self.folder / f"raise {label}").exists():
                raise self.kind(f"label {label} is broken")
            if (self.folder / f"diverge {label}").exists():
                return loss * float("nan")
            if (self.folder / f"die {label}").exists() and os.getpid() != self.leader:
                os.kill(os.getpid(), signal.SIGKILL)
            if (self.folder / f"wait {label}").exists():
                time.sleep(0.05)
        return loss


def labelled(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Client i has label i only, so that a loss can tell clients apart."""
    return [(x, torch.full_like(y, i)) for i, (x, y) in enumerate(samples((8,) * count, dtype=torch.float32))]


def faulty(folder: Path, kind: type[Exception] = ValueError, **settings: Any) -> Federation:
    loss = Loss(folder, kind, os.getpid())
    given = {"model": mlp((5, 4, 6), torch.float32), "clients": labelled(), "test": labelled()[0]}
    return make(local=training(loss=loss, epochs=1), **{**given, "per_client": False, **settings})


def error_of(fed: Federation, active: Any) -> tuple[Any, ...]:
    before = snapshot(fed)
    with pytest.raises(Exception) as raised:
        fed.round(active)
    assert_same_bits(before, states(fed))
    error = raised.value
    return type(error), str(error), getattr(error, "__notes__", [])


@pytest.mark.parametrize("store", ["shared", pytest.param("pinned", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("marks", "client"),
    [
        (["raise 5"], 5),
        (["raise 0"], 0),
        (["diverge 2"], 2),
        (["raise 4", "raise 1", "raise 3"], 1),
        (["raise 3", "diverge 2"], 2),
        (["raise 2", "diverge 4"], 2),
        (["diverge 5", "diverge 4", "diverge 3"], 3),
    ],
    ids=str,
)
def test_the_same_error_as_with_one_worker(marks: list[str], client: int, store: Any, tmp_path: Path) -> None:
    alone, several = faulty(tmp_path), faulty(tmp_path, workers=3, store=store)
    with several:
        for fed in (alone, several):
            fed.round([0, 1, 2, 3, 4, 5])
        for mark in marks:
            (tmp_path / mark).touch()
        expected = error_of(alone, [0, 1, 2, 3, 4, 5])
        kind, text, notes = error_of(several, [0, 1, 2, 3, 4, 5])
        assert (kind, text, notes) == expected
        assert f"client {client}" in text + str(notes)
        assert "round 1" in text + str(notes)
        for mark in marks:
            (tmp_path / mark).unlink()
        for fed in (alone, several):
            fed.round([0, 2, 4, 5])
            fed.round([1, 2, 3])
        same(alone, several)


@pytest.mark.parametrize("kind", [KeyError, ZeroDivisionError, RuntimeError, OSError, NotImplementedError])
def test_exceptions_keep_their_class(kind: type[Exception], tmp_path: Path) -> None:
    (tmp_path / "raise 5").touch()
    with faulty(tmp_path, kind, workers=2) as several:
        assert error_of(several, [4, 5]) == error_of(faulty(tmp_path, kind), [4, 5])


def test_an_unknown_class_becomes_the_nearest_of_pythons(tmp_path: Path) -> None:
    (tmp_path / "raise 5").touch()
    with faulty(tmp_path, Own, workers=2) as several, pytest.raises(KeyError, match="label 5 is broken") as raised:
        several.round([4, 5])
    step, client = raised.value.__notes__
    assert step.startswith("in local step 0, on a batch of x") and client == "while training client 5 in round 0"


def test_an_evaluation_that_fails_is_no_end(tmp_path: Path) -> None:
    """On the leader and on the others at once."""
    alone, several = faulty(tmp_path, test=labelled()[0]), faulty(tmp_path, test=labelled()[0], workers=2)
    with several:
        (tmp_path / "evaluation").touch()
        assert error_of(several, [0, 1]) == error_of(alone, [0, 1])
        (tmp_path / "evaluation").unlink()
        assert rounds_of(several) == rounds_of(alone)
        same(alone, several)


def rounds_of(fed: Federation) -> list[dict[str, Any]]:
    return [{**fed.round(active).as_dict(), "seconds": None} for active in ([0, 3], [0, 1, 5])]


@pytest.mark.parametrize("active", [[0, 1], [0, 1, 2, 3]])
def test_updates_that_are_too_large_only_together(active: list[int]) -> None:
    """Alone each fits into the fixed point; as many of its size as are asked would not, whichever worker has them."""

    def steep(output: Tensor, target: Tensor) -> Tensor:
        return 3e6 * output.mean() if float(target.sum()) < 4 else 0 * output.mean()

    clients = [(torch.ones(1, 1), torch.ones(1, 1)) for _ in range(6)]
    clients[4:] = [(torch.ones(1, 1), torch.full((1, 1), 9.0))] * 2
    local = training(loss=steep, lr=1.0, epochs=1, clip=None, weight_decay=0.0)
    settings: dict[str, Any] = {"model": nn.Linear(1, 1, bias=False), "clients": clients, "local": local}
    alone, several = (federation("fedavg", threads=1, workers=n, **copy.deepcopy(settings)) for n in (1, 4))
    with several:
        kind, text, _ = error_of(several, active)
        assert (kind, text) == error_of(alone, active)[:2]
        assert kind is NotFinite
        assert "client 0: update has an entry of 3e+06, too large to be averaged" in text
        for fed in (alone, several):
            fed.round([4, 5])
            fed.round([1])
            assert float(fed.weights.abs()) > 2.6e6, "alone it is not too large"
        same(alone, several)


def test_a_full_disk_in_a_worker(tmp_path: Path) -> None:
    """The worker that cannot write says so, and lives."""
    folder = tmp_path / "memory"
    with make(workers=2, folder=folder) as several:
        several.round([0, 1, 2, 3])
        folder.rename(tmp_path / "away")
        folder.write_text("a file where the folder was")
        before = snapshot_of_server(several)
        with pytest.raises(ValueError, match=r"memory.*round00000.*client"):
            several.round([0, 1, 2, 3])
        assert_same_bits(before, snapshot_of_server(several))
        folder.unlink()
        (tmp_path / "away").rename(folder)
        several.round([0, 1, 2, 3])
    alone = make()
    rounds(alone, [[0, 1, 2, 3]] * 2)
    same(alone, several)


def snapshot_of_server(fed: Federation) -> dict[str, Tensor]:
    return {"weights": fed.weights, "round": torch.tensor(fed.state.round)}


# Processes that die


@pytest.mark.parametrize("store", ["shared", "pinned"])
def test_a_killed_worker_ends_the_round(store: Any, tmp_path: Path) -> None:
    several = faulty(tmp_path, workers=3, store=store)
    with several:
        several.round([0, 1, 2, 3, 4, 5])
        for label in range(6):
            (tmp_path / f"die {label}").touch()
        before = snapshot(several)
        with pytest.raises(WorkerLost, match="everything up to the last round is kept"):
            several.round([0, 1, 2, 3, 4, 5])
        assert_same_bits(before, states(several))
        assert children(os.getpid()) <= trackers(), "the other worker is gone too"
        for label in range(6):
            (tmp_path / f"die {label}").unlink()
        if store == "pinned":
            with pytest.raises(ValueError, match="held the clients' memories are gone"):
                several.round([0, 1])
            return
        alone = faulty(tmp_path)
        for fed in (alone, several):
            while fed.state.round < 3:
                fed.round([0, 1, 2, 3, 4, 5])
        same(alone, several)


def test_a_death_is_noticed_while_the_leader_is_busy(tmp_path: Path) -> None:
    """The leader trains for 50 seconds if it does not look up from its work."""
    long = [(x.repeat(500, 1), y.repeat(500)) for x, y in labelled(2)]
    several = faulty(tmp_path, clients=[*long], workers=2)
    (tmp_path / "wait 0").touch()
    (tmp_path / "die 1").touch()
    with several, pytest.raises(WorkerLost, match="a worker process died") as raised:
        several.round([0, 1])
    assert raised.value.__notes__ == ["while training client 0 in round 0"]


def test_a_worker_that_dies_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_room, "_die_with_parent", lambda parent: os._exit(1))
    with pytest.raises(WorkerLost, match="died while it started"):
        make(workers=3).round()
    assert children(os.getpid()) <= trackers()


def test_federations_do_not_end_each_others_workers() -> None:
    first, second = make(workers=2), make(workers=2)
    first.round([0, 1])
    with pytest.raises(ValueError, match="already in use"):
        second.round([0, 1])
    first.close()
    second.round([0, 1])
    del first
    gc.collect()
    second.round([0, 1])
    second.close()


def test_a_closed_federation_starts_again() -> None:
    alone, several = make(), make(workers=2)
    rounds(alone, SCHEDULE[:4])
    rounds(several, SCHEDULE[:2])
    assert children(os.getpid()) <= trackers()
    rounds(several, SCHEDULE[2:4])
    same(alone, several)


COMMAND = [sys.executable, "-m", "fedlesam", "run", "--workers", "2", "--threads", "1", "--algorithm", "fedlesam-s"]
LONG = [*COMMAND, "--clients", "6", "--active", "4", "--rounds", "100000", "--model", "mlp:hidden=4", "--epochs", "2"]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, set[int]]]:
    """`fedlesam run --workers 2` in the middle of it, its folder and its workers."""
    out = tmp_path / "run"
    process = subprocess.Popen(
        [*LONG, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        metrics = RunFolder(out)
        wait_for(lambda: process.poll() is not None or len(metrics.read_metrics()) > 1)
        assert process.poll() is None, process.communicate()[1]
        workers = children(process.pid)
        assert len(workers) == 1
        yield process, out, workers
        wait_for(lambda: not any(map(alive, workers)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def readable(out: Path, state: str) -> None:
    folder = RunFolder(out)
    summary, metrics = folder.read_summary(), folder.read_metrics()
    assert summary["state"] == state
    assert summary["rounds"] == len(metrics) > 0
    assert (out / "model.safetensors").exists()
    assert not (out / "memory").exists()


def test_a_killed_worker_ends_the_run(running: tuple[subprocess.Popen[str], Path, set[int]]) -> None:
    process, out, workers = running
    os.kill(next(iter(workers)), signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 4, err
    errors = [line for line in err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert "start the run again" in errors[0]
    assert "Traceback" not in err
    readable(out, "stopped")


def test_ctrl_c_ends_all(running: tuple[subprocess.Popen[str], Path, set[int]]) -> None:
    process, out, _ = running
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    readable(out, "interrupted")


def test_the_leader_takes_its_workers_with_it(running: tuple[subprocess.Popen[str], Path, set[int]]) -> None:
    process, out, workers = running
    process.kill()
    process.communicate(timeout=PATIENCE)
    wait_for(lambda: not any(map(alive, workers)))
    assert RunFolder(out).read_summary() == {}
    assert len(RunFolder(out).read_metrics()) > 0
    again = [*COMMAND, "--clients", "6", "--active", "4", "--rounds", "1", "--model", "mlp:hidden=4", "--epochs", "2"]
    done = subprocess.run(
        [*again, "--out", str(out), "--overwrite", "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "finished"
