"""Several workers: the same bits as one, the same errors, and an end within seconds when one of them dies."""

import contextlib
import copy
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from worlds import SCHEDULE, assert_same_bits, federation, mlp, samples, snapshot, states, training

from fedlesam.algorithms import CATALOGUE
from fedlesam.core.checks import NotFinite
from fedlesam.engines import world as world_room
from fedlesam.engines.distributed import assign
from fedlesam.engines.world import WorkerLost, start_local
from fedlesam.federation import Federation, Record
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.runner import execute

PATIENCE = 120
"""Seconds until a real process counts as stuck; the machine may be busy."""


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No process and no temporary folder outlives its test."""
    real, made = tempfile.mkdtemp, []

    def mkdtemp(*args: Any, **kwargs: Any) -> str:
        made.append(real(*args, **kwargs))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", mkdtemp)
        yield
    gc.collect()
    wait_for(lambda: children(os.getpid()) <= trackers())
    assert not [path for path in made if "fedlesam-" in path and Path(path).exists()]


def children(parent: int) -> set[int]:
    """The living processes that `parent` started."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, father = stat.read_text().rpartition(")")[2].split()[:2]
            if int(father) == parent and state != "Z":
                found.add(int(stat.parent.name))
    return found


def trackers() -> set[int]:
    """multiprocessing's resource tracker lives as long as this process."""
    found = set()
    for pid in children(os.getpid()):
        with contextlib.suppress(OSError):
            if b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(true: Any, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def network(seed: int = 0) -> nn.Module:
    """BatchNorm and dropout: what a worker could get wrong."""
    hidden = mlp((5, 6), torch.float32, seed)
    return nn.Sequential(hidden, nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh(), mlp((6, 3), torch.float32, seed + 1))


TEST = samples((4300,), dtype=torch.float32)[0]
"""Nine batches of evaluation."""
EVERYBODY = range(6)


def make(name: str = "fedlesam-s", **settings: Any) -> Federation:
    given = {"model": network(), "clients": samples(dtype=torch.float32), "test": TEST, "per_client": True}
    return federation(name, **{**given, "threads": 1, **settings})


def rounds(fed: Federation, schedule: Any = (*SCHEDULE[:4], EVERYBODY, EVERYBODY)) -> list[dict[str, Any]]:
    with fed:
        return [{**fed.round(active).as_dict(), "seconds": None} for active in schedule]


def same(one: Federation, other: Federation) -> None:
    """The global model and the server's state; pinned memories are not all here."""
    left, right = snapshot(one), snapshot(other)
    shared = [name for name in left if not name.startswith("client")]
    assert_same_bits({name: left[name] for name in shared}, {name: right[name] for name in shared})
    assert_same_bits({name: left[name] for name in right}, right)


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_same_bits_for_the_whole_catalogue(name: str) -> None:
    alone = make(name)
    expected = rounds(alone)
    for settings in ({"workers": 2}, {"workers": 3, "store": "pinned", "memory": 1200}):
        several = make(name, **settings)
        assert rounds(several) == expected
        same(alone, several)


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 3},
        {"workers": 3, "memory": 0},
        {"workers": 2, "store": "pinned"},
        {"workers": 3, "store": "pinned", "memory": 0},
        {"workers": 2, "store": "pinned", "memory": 700},
        {"workers": 5},
    ],
    ids=str,
)
def test_the_same_bits_wherever_memory_lies(settings: dict[str, Any]) -> None:
    """Five workers are more than the active clients of any round: the idle ones do no harm."""
    alone = make()
    expected = rounds(alone, SCHEDULE)
    several = make(**settings)
    assert rounds(several, SCHEDULE) == expected
    same(alone, several)


def flip(x: Tensor, draw: torch.Generator) -> Tensor:
    return x * (torch.rand(len(x), 1, generator=draw) - 0.5).sign()


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {"model": mlp(), "clients": samples(), "test": samples((4300,))[0]},
        {"local": training(momentum=0.5, augment=flip, epochs=range(1, 4))},
        {"weighting": "examples", "name": "fedlesam"},
        {"evaluate_every": 2, "test": None, "per_client": False},
    ],
    ids=["bf16", "double", "momentum, augmentation, epochs", "by examples", "no test set"],
)
def test_the_same_bits_in_every_way_of_training(settings: dict[str, Any]) -> None:
    alone = make(**settings)
    expected = rounds(alone)
    several = make(**settings, workers=2)
    assert rounds(several) == expected
    same(alone, several)


def test_precision_matters_at_all() -> None:
    assert rounds(make(precision="bf16"), SCHEDULE[:1]) != rounds(make(), SCHEDULE[:1])


def test_drawn_clients_and_more_threads() -> None:
    """With several threads workers cannot be forked: they get a model of their own all the same."""
    local = training(epochs=2)
    alone = make(threads=2, local=local, active=3)
    several = make(threads=2, local=local, active=3, workers=2)
    expected = rounds(alone, [None] * 4)
    assert rounds(several, [None] * 4) == expected
    same(alone, several)


def test_one_thread_each_unless_asked() -> None:
    assert make(threads=None, workers=2).threads == 1
    assert make(threads=3, workers=2).threads == 3
    assert make(threads=None, workers=1).threads is None


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    made = {}
    for workers in (1, 2, 3):
        made[workers] = tmp_path_factory.mktemp("runs") / str(workers)
        execute(tiny(workers=workers, threads=1), made[workers])
    return made


def tiny(**change: Any) -> RunConfig:
    small = {"clients": 6, "active": 3, "rounds": 3, "epochs": 1, "batch_size": 50, "model": "mlp:hidden=8"}
    return configs.resolve(RunConfig(**{"algorithm": "fedlesam-s", **small, **change}))


@pytest.mark.parametrize("workers", [2, 3])
def test_run_folders_are_the_same(folders: dict[int, Path], workers: int) -> None:
    one, other = folders[1], folders[workers]
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert (one / "split.safetensors").read_bytes() == (other / "split.safetensors").read_bytes()
    left, right = ([{**r, "seconds": 0} for r in RunFolder(p).read_metrics()] for p in (one, other))
    assert left == right
    assert len(left) == 3
    left, right = ({**RunFolder(p).read_summary(), "seconds": 0} for p in (one, other))
    assert left == right
    assert {p.name for p in one.iterdir()} == {p.name for p in other.iterdir()}


def test_a_folder_of_other_workers_is_the_same_run(folders: dict[int, Path]) -> None:
    config = tiny(workers=3, threads=1, memory=10**6, store="pinned")
    assert execute(config, folders[1]) == RunFolder(folders[1]).read_summary()


def test_the_memory_of_a_killed_run_does_not_stand_in_the_way(folders: dict[int, Path], tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.toml").write_text((folders[1] / "config.toml").read_text())
    (path / "memory").mkdir()
    stale = path / "memory" / "round000000-anchor.safetensors"
    stale.write_bytes(b"of the killed run")
    with pytest.raises(ValueError, match="holds another run"):
        execute(tiny(threads=1, memory=0, lr=0.5), path)
    assert stale.exists(), "who is refused touches nothing"
    execute(tiny(threads=1, memory=0), path)
    assert (path / "model.safetensors").read_bytes() == (folders[1] / "model.safetensors").read_bytes()
    assert not (path / "memory").exists()


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


@pytest.mark.parametrize("store", ["shared", "pinned"])
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
    assert raised.value.__notes__ == ["while training client 5 in round 0"]


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


# Who does what


@given(
    sizes=st.dictionaries(st.integers(0, 50), st.integers(1, 40), min_size=1, max_size=30),
    workers=st.integers(1, 6),
)
def test_jobs_are_balanced(sizes: dict[int, int], workers: int) -> None:
    jobs = assign(sizes, {}, workers)
    assert jobs == assign(dict(sorted(sizes.items(), reverse=True)), {}, workers)
    assert len(jobs) == workers
    assert sorted(client for job in jobs for client in job) == sorted(sizes)
    assert all(job == sorted(job) for job in jobs)
    loads = [sum(sizes[client] for client in job) for job in jobs]
    largest = sorted(sizes.values(), reverse=True)
    assert max(loads) <= sum(largest) / workers + (1 - 1 / workers) * largest[0]
    assert max(loads) - min(loads) <= largest[0]
    if len(sizes) <= workers:
        assert max(loads) == largest[0], "nobody has two"


@given(data=st.data(), sizes=st.dictionaries(st.integers(0, 20), st.integers(1, 40), min_size=1, max_size=15))
def test_who_has_a_home_trains_there(data: st.DataObject, sizes: dict[int, int]) -> None:
    homes = data.draw(st.dictionaries(st.sampled_from(sorted(sizes)), st.integers(0, 3)))
    jobs = assign(sizes, homes, 4)
    assert sorted(client for job in jobs for client in job) == sorted(sizes)
    for client, home in homes.items():
        assert client in jobs[home]
    loads = [sum(sizes[client] for client in job) for job in jobs]
    free = [client for client in sizes if client not in homes]
    at_home = [sum(sizes[client] for client in homes if homes[client] == worker) for worker in range(4)]
    for worker, job in enumerate(jobs):
        moved = [sizes[client] for client in job if client in free]
        if moved:
            assert loads[worker] - min(moved) <= min(loads), "the last job went to the least busy"
        else:
            assert loads[worker] == at_home[worker]


def test_work_is_measured_in_steps() -> None:
    """Three short clients go to one worker, the long one to the other, whatever their order."""
    clients = [*samples((4, 4, 4), dtype=torch.float32), *samples((40,), dtype=torch.float32)]
    with make(clients=clients, workers=2, local=training(epochs=1)) as fed:
        fed.round([0, 1, 2, 3])
        assert fed._engine._jobs == [[3], [0, 1, 2]]  # type: ignore[union-attr]


def test_the_record_has_the_leaders_time_only() -> None:
    with make(workers=2) as fed:
        record: Record = fed.round([0, 1])
    assert 0 < record.seconds < PATIENCE


def test_a_second_world_in_a_process_is_refused() -> None:
    with make(workers=2) as fed:
        fed.round([0, 1])
        with pytest.raises(ValueError, match="torchrun"):
            start_local(2, 1, lambda world: None)
