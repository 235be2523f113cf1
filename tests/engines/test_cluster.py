"""Processes that torchrun starts, on one machine and on two that are network namespaces of it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedlesam import config as configs
from fedlesam import runner
from fedlesam.config import RunConfig
from fedlesam.engines.world import World, start_local
from fedlesam.runner import assist, execute
from fedlesam.runs import RunFolder

PATIENCE = 180
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SMALL = {"clients": 6, "active": 4, "rounds": 3, "epochs": 1, "batch_size": 50, "model": "mlp:hidden=4"}
FLAGS = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
RUN = ["-m", "fedlesam", "run", "--algorithm", "fedlesam-s", "--threads", "1", *FLAGS]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def config(**change: Any) -> RunConfig:
    return configs.resolve(RunConfig(**{"algorithm": "fedlesam-s", "threads": 1, **SMALL, **change}))


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serial") / "run"
    execute(config(), path)
    return path


def same(one: Path, other: Path) -> None:
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    left, right = ([{**r, "seconds": 0} for r in RunFolder(p).read_metrics()] for p in (one, other))
    assert left == right
    assert RunFolder(other).read_summary()["state"] == "finished"
    assert not (other / "memory").exists()


def communicate(*processes: subprocess.Popen[str]) -> list[tuple[str, str]]:
    """To the end of all of them; whatever happens none is left, nor what it started."""
    try:
        return [process.communicate(timeout=PATIENCE) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def start(command: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**ENVIRONMENT, **environment},
    )


def torchrun(folder: Path, *flags: str) -> tuple[int, str, str]:
    process = start([*TORCHRUN, "--standalone", "--nproc-per-node", "2", *RUN, *flags], folder)
    ((out, err),) = communicate(process)
    return process.returncode, out, err


def test_torchrun_gives_the_same_bytes(serial: Path, tmp_path: Path) -> None:
    code, out, err = torchrun(tmp_path, "--out", "run", "--json")
    assert code == 0, err
    assert json.loads(out)["state"] == "finished", "and one process speaks"
    same(serial, tmp_path / "run")
    code, out, err = torchrun(tmp_path, "--out", "run")
    assert code == 0, err
    assert out.count("already finished") == 1


def test_bad_input_is_said_once(tmp_path: Path) -> None:
    code, out, err = torchrun(tmp_path, "--out", "run", "--split", "nonsense")
    assert code != 0
    assert (out + err).count("unknown split 'nonsense'") == 1
    assert "fedlesam/cli" not in err, "no traceback of ours"
    assert not (tmp_path / "run").exists()


# The same, without torchrun: rank 1 is forked and assists


def led(serve: Any = assist, workers: int = 2) -> World:
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
    execute(config(algorithm="fedavg"), tmp_path / "run")
    stale = tmp_path / "run" / "memory" / "worker1"
    stale.mkdir(parents=True)
    (stale / "round000000-anchor.safetensors").write_bytes(b"of another run")

    class Elsewhere(RunFolder):
        def clear(self) -> None:
            """What the leader's file system does not show it."""

    world = led()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "RunFolder", Elsewhere)
        patch.setattr(runner, "shutil", types.SimpleNamespace(rmtree=lambda *_, **__: None))
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
    with pytest.raises(ValueError, match="holds another run"):
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


class Hosts:
    """Two network namespaces and a cable; the addresses exist only in there."""

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:6]
        self.names = [f"fl{mark}{side}" for side in "ab"]
        self.cables = [f"ve{mark}{side}" for side in "ab"]
        self.addresses = ["10.203.17.1", "10.203.17.2"]

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        for name, cable, address in zip(self.names, self.cables, self.addresses, strict=True):
            ip("link", "set", cable, "netns", name)
            inside = ("netns", "exec", name, "ip")
            ip(*inside, "addr", "add", f"{address}/24", "dev", cable)
            ip(*inside, "link", "set", cable, "up")
            ip(*inside, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self.cables[0]], capture_output=True)

    def run(self, host: int, folder: Path, flags: list[str]) -> subprocess.Popen[str]:
        place = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(host)]
        meeting = ["--master-addr", self.addresses[0], "--master-port", "29517"]
        command = ["ip", "netns", "exec", self.names[host], *TORCHRUN, *place, *meeting, *RUN, *flags]
        return start(command, folder, GLOO_SOCKET_IFNAME=self.cables[host])


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip() or f"ip {' '.join(arguments)} failed")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("two hosts need network namespaces: iproute2 is not installed")
    pair = Hosts()
    try:
        try:
            pair.make()
        except OSError as error:
            pytest.skip(f"two hosts need network namespaces, which cannot be made here: {error}")
        yield pair
    finally:
        pair.remove()


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
