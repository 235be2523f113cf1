"""Several workers: the same bits as one, and who of them does what."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from workers import PATIENCE, make, rounds, same
from worlds import PAPER, SCHEDULE, mlp, samples, slow_unless, training

from fedlesam.algorithms import CATALOGUE
from fedlesam.engines.distributed import assign
from fedlesam.engines.world import start_local
from fedlesam.federation import Record
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.runner import execute

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=slow_unless(name in {*PAPER, "random-step", "fedgmt"}))
        for name in CATALOGUE
        if name != "dp-fedsam"  # it refuses BatchNorm
    ],
)
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
    expected = rounds(alone, [None] * 2)
    assert rounds(several, [None] * 2) == expected
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
