"""Processes that torchrun starts, on one machine and on two that are network namespaces of it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hosts import RUN, SMALL, TORCHRUN, Hosts, communicate, start

from fedlesam.engines.world import World, start_local
from fedlesam.runs import config as configs
from fedlesam.runs import runner
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.runner import execute, run_worker


def config(**change: Any) -> RunConfig:
    return configs.resolve(RunConfig(**{"algorithm": "fedlesam-s", "threads": 1, **SMALL, **change}))


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serial") / "run"
    execute(config(keep_last=False), path)
    return path


def same(one: Path, other: Path) -> None:
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    left, right = ([{**r, "seconds": 0} for r in RunFolder(p).read_metrics()] for p in (one, other))
    assert left == right
    assert RunFolder(other).read_summary()["state"] == "finished"
    assert not (other / "memory").exists()


def torchrun(folder: Path, *flags: str) -> tuple[int, str, str]:
    process = start([*TORCHRUN, "--standalone", "--nproc-per-node", "2", *RUN, *flags], folder)
    ((out, err),) = communicate(process)
    return process.returncode, out, err


def test_torchrun_gives_the_same_bytes(serial: Path, tmp_path: Path) -> None:
    code, out, err = torchrun(tmp_path, "--out", "run", "--json")
    assert code == 0, err
    assert json.loads(out)["state"] == "finished", "and one process speaks"
    same(serial, tmp_path / "run")


@pytest.mark.slow
def test_a_finished_run_is_said_once(tmp_path: Path) -> None:
    execute(config(), tmp_path / "run")
    code, out, err = torchrun(tmp_path, "--out", "run")
    assert code == 0, err
    assert out.count("already finished") == 1


@pytest.mark.slow
def test_bad_input_is_said_once(tmp_path: Path) -> None:
    code, out, err = torchrun(tmp_path, "--out", "run", "--split", "nonsense")
    assert code != 0
    assert (out + err).count("unknown split 'nonsense'") == 1
    assert "fedlesam/cli" not in err, "no traceback of ours"
    assert not (tmp_path / "run").exists()


# The same, without torchrun: rank 1 is forked and assists


def led(serve: Any = run_worker, workers: int = 2) -> World:
    return start_local(workers, 1, serve)


@pytest.mark.parametrize(("workers", "store", "memory"), [(2, "shared", 0), (3, "pinned", 0), (2, "pinned", 10**6)])
def test_a_leader_and_its_assistants(workers: int, store: str, memory: int, serial: Path, tmp_path: Path) -> None:
    world = led(workers=workers)
    children = list(world.children)
    execute(config(store=store, memory=memory), tmp_path / "run", world=world)
    same(serial, tmp_path / "run")
    assert [child.exitcode for child in children] == [0] * (workers - 1)


def test_assistants_take_the_leaders_settings(serial: Path, tmp_path: Path) -> None:
    """Whatever their own machine would have chosen: hyper-parameters and threads come with the message."""
    world = led()
    execute(config(hyper={"rho": 0.5}), tmp_path / "led", world=world)
    execute(config(hyper={"rho": 0.5}), tmp_path / "alone")
    same(tmp_path / "alone", tmp_path / "led")
    assert (serial / "model.safetensors").read_bytes() != (tmp_path / "led" / "model.safetensors").read_bytes()


def test_stale_files_of_a_killed_worker_are_not_believed(serial: Path, tmp_path: Path) -> None:
    """On another machine the leader cannot clean up: a worker does so before it begins."""
    execute(config(algorithm="fedavg", keep_last=False), tmp_path / "run")
    stale = tmp_path / "run" / "memory" / "worker1"
    stale.mkdir(parents=True)
    (stale / "round000000-anchor.safetensors").write_bytes(b"of another run")

    class Elsewhere(RunFolder):
        def clear(self) -> None:
            """What the leader's file system does not show it."""

        remove_memory = clear

    world = led()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "RunFolder", Elsewhere)
        execute(config(store="pinned", memory=0), tmp_path / "run", world=world, overwrite=True)
    assert (serial / "model.safetensors").read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()
    assert not stale.exists()


def test_a_finished_folder_lets_the_others_go(serial: Path) -> None:
    world = led()
    children = list(world.children)
    assert execute(config(), serial, world=world) == RunFolder(serial).read_summary()
    assert [child.exitcode for child in children] == [0]


def test_a_refused_folder_lets_the_others_go(serial: Path) -> None:
    world = led()
    children = list(world.children)
    with pytest.raises(ValueError, match="holds a finished run of 3 rounds without a checkpoint"):
        execute(config(rounds=9), serial, world=world)
    assert [child.exitcode for child in children] == [0]


def test_what_is_wrong_elsewhere_is_said_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set is missing on another machine only."""
    leader, real = os.getpid(), runner.build

    def build(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() != leader:
            raise ValueError("no data here")
        return real(*args, **kwargs)

    monkeypatch.setattr(runner, "build", build)
    world = led()
    children = list(world.children)
    with pytest.raises(ValueError, match=r"process 1: no data here"):
        execute(config(), tmp_path / "run", world=world)
    assert not (tmp_path / "run").exists()
    assert [child.exitcode for child in children] == [0]


# Two machines


@pytest.mark.slow
@pytest.mark.parametrize("store", ["shared", "pinned"])
def test_two_hosts(store: str, hosts: Hosts, serial: Path, tmp_path: Path) -> None:
    """Pinned, with all memory in files and the second host in another folder."""
    flags = ["--store", store, "--out", str(tmp_path / "run"), "--memory", "0", "-q"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    leader, other = hosts.run(0, tmp_path, flags), hosts.run(1, elsewhere, flags)
    said = communicate(leader, other)
    assert (leader.returncode, other.returncode) == (0, 0), said
    same(serial, tmp_path / "run")
    assert not list(elsewhere.iterdir())
