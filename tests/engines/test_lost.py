"""Hosts that are cut off and processes that are stopped: the run ends on every side. The slow are left alone."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from hosts import ENVIRONMENT, RUN, SMALL, TORCHRUN, Hosts, communicate, processes, start

from fedlesam.engines import meeting
from fedlesam.engines import world as world_room
from fedlesam.engines.world import WorkerLost, World
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.runner import execute

NET = """
import ctypes, os, time
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        time.sleep(float(os.environ.get("SLOW", 0)))
        if self.steps == 3 and os.environ.get("RANK") == os.environ.get("BUSY", "nobody"):
            ctypes.PyDLL(None).sleep(5)  # holds the interpreter's lock
        return self.layers(x)
"""
OWN = {"model": "own_net:Net", "checkpoint_every": 1, "evaluate_every": 9}
FLAGS = [part for name, value in OWN.items() for part in (f"--{name.replace('_', '-')}", str(value))]
ONE_HOST = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *RUN, *FLAGS]


def alone(run: Path) -> None:
    """The same settings, on one worker."""
    execute(configs.resolve(RunConfig(**{"algorithm": "fedlesam-s", "threads": 1, **SMALL, **OWN})), run)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the model and a run without incidents are."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "own_net.py").write_text(NET)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        alone(folder / "serial")
        yield folder


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """Marks the processes of a test; none may be left."""
    yield str(tmp_path)
    left = processes(MARK=str(tmp_path))
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left


def slow(place: Path, mark: str) -> dict[str, str]:
    """Rounds that take a second."""
    return {"SLOW": "0.1", "MARK": mark, "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{place}"}


def await_round(run: Path, *running: subprocess.Popen[str]) -> None:
    """Until the run is under way."""
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
        assert all(process.poll() is None for process in running), [p.communicate() for p in running]
        time.sleep(0.05)


def same(place: Path, run: Path) -> None:
    assert RunFolder(run).read_summary()["state"] == "finished"
    assert (place / "serial" / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    left, right = ([{**r, "seconds": 0} for r in RunFolder(p).read_metrics()] for p in (place / "serial", run))
    assert left == right


def resume(place: Path, run: Path, state: str | None = "stopped") -> None:
    assert RunFolder(run).read_summary().get("state") == state
    assert 0 < len(RunFolder(run).read_metrics()) < 3
    alone(run)
    same(place, run)


def test_a_cut_cable_ends_both_sides(hosts: Hosts, place: Path, mark: str, tmp_path: Path) -> None:
    flags = [*FLAGS, "--out", str(tmp_path / "run"), "-q", "--lost-after", "3"]
    both = [hosts.run(host, tmp_path, flags, **slow(place, mark)) for host in (0, 1)]
    try:
        await_round(tmp_path / "run", *both)
        hosts.plug("down")
        said = [err for _, err in communicate(*both)]
    finally:
        hosts.plug("up")
    for host, other in ((0, 1), (1, 0)):
        name = re.escape(f"({hosts.addresses[other]})")
        assert re.search(rf"error: process {other} on host \S+ {name} has not been heard for 3 s: .*again", said[host])
        assert re.search(r"exitcode +: 4 ", said[host]), said[host]
        assert "fedlesam/cli" not in said[host], "no traceback of ours"
    resume(place, tmp_path / "run")


@pytest.mark.slow
def test_a_cable_that_is_plugged_in_again(hosts: Hosts, place: Path, mark: str, tmp_path: Path) -> None:
    flags = [*FLAGS, "--out", str(tmp_path / "run"), "-q", "--lost-after", "8"]
    both = [hosts.run(host, tmp_path, flags, **slow(place, mark)) for host in (0, 1)]
    try:
        await_round(tmp_path / "run", *both)
        hosts.plug("down")
        time.sleep(3)
    finally:
        hosts.plug("up")
    said = communicate(*both)
    assert [process.returncode for process in both] == [0, 0], said
    same(place, tmp_path / "run")


@pytest.mark.slow
def test_restarts_after_a_cut(hosts: Hosts, place: Path, mark: str, tmp_path: Path) -> None:
    flags = [*FLAGS, "--out", str(tmp_path / "run"), "-q", "--lost-after", "3"]
    restarts = ["--max-restarts", "2"]
    both = [hosts.run(host, tmp_path, flags, restarts, **slow(place, mark)) for host in (0, 1)]
    try:
        await_round(tmp_path / "run", *both)
        before = {pid for rank in "01" for pid in processes(MARK=mark, RANK=rank)}
        hosts.plug("down")
        while before & {pid for rank in "01" for pid in processes(MARK=mark, RANK=rank)}:
            time.sleep(0.1)
    finally:
        hosts.plug("up")
    said = communicate(*both)
    assert [process.returncode for process in both] == [0, 0], said
    same(place, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_of_torchrun(rank: int, place: Path, mark: str, tmp_path: Path) -> None:
    process = start([*ONE_HOST, "--out", "run", "-q", "--lost-after", "2"], tmp_path, **slow(place, mark))
    await_round(tmp_path / "run", process)
    (worker,) = (pid for pid in processes(MARK=mark, RANK=str(rank)) if b"fedlesam" in command_of(pid))
    os.kill(worker, signal.SIGSTOP)
    ((_, err),) = communicate(process)
    assert process.returncode == 1
    assert re.search(r"exitcode +: 4 ", err), err
    if rank == 1:
        assert re.search(r"error: process 1 on host \S+ \(\S+\) has not been heard for 2 s", err), err
    resume(place, tmp_path / "run", "stopped" if rank == 1 else None)


def command_of(pid: int) -> bytes:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b" ".join(words) if not any(word.endswith(b"heartbeat.py") for word in words) else b""


@pytest.mark.slow
def test_a_busy_process_is_left_alone(place: Path, mark: str, tmp_path: Path) -> None:
    """It holds the interpreter's lock for longer than it may be silent."""
    busy = {**slow(place, mark), "SLOW": "0", "BUSY": "1"}
    process = start([*ONE_HOST, "--out", "run", "-q", "--lost-after", "2"], tmp_path, **busy)
    ((_, err),) = communicate(process)
    assert process.returncode == 0, err
    same(place, tmp_path / "run")


def test_a_stopped_worker(place: Path, mark: str, tmp_path: Path) -> None:
    command = [sys.executable, *RUN, *FLAGS, "--out", "run", "-q", "--workers", "2", "--lost-after", "1"]
    process = start(command, tmp_path, **slow(place, mark))
    await_round(tmp_path / "run", process)
    (worker,) = (pid for pid in processes(MARK=mark) if pid != process.pid and b"fedlesam" in command_of(pid))
    os.kill(worker, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(worker, signal.SIGCONT)
    time.sleep(0.3)
    assert process.poll() is None
    os.kill(worker, signal.SIGSTOP)
    ((_, err),) = communicate(process)
    assert process.returncode == 4, err
    assert f"error: worker 1, process {worker} of this machine, has been stopped for 1 s; everything" in err
    resume(place, tmp_path / "run")


def test_a_process_that_cannot_see_to_its_end_just_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main thread computes on, or sits in a library that nothing wakes."""
    monkeypatch.setattr(world_room, "GRACE", 0.1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        monkeypatch.setattr(sys, "stderr", open(2, "w", closefd=False))  # noqa: SIM115
        world = World(1, 2)
        world.watch = types.SimpleNamespace(say=lambda said: None)  # type: ignore[assignment]
        world.lose("process 0 on host alpha is silent")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert "error: process 0 on host alpha is silent; everything up to the last checkpoint is kept" in said.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4


def test_a_loss_after_the_end_is_none() -> None:
    world = World(0, 2)
    world.close()
    world.lose("process 1 is silent")
    world.check()


# A host that never comes


def test_it_is_said_who_is_missing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(meeting, "LOG_EVERY", 0.5)
    monkeypatch.setattr(meeting, "GIVE_UP", 2.0)
    store = dist.HashStore()
    with pytest.raises(WorkerLost, match="process 1, 2 of 3 did not come to head:29500 within"):
        meeting.agree(store, 0, 3)
    assert re.search("waiting for process 1, 2 of 3 at head:29500, for [12] s now", caplog.text)
    with pytest.raises(WorkerLost, match="process 0 of 3, or another"):
        meeting.agree(store, 1, 3)


def test_it_is_said_that_nobody_comes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(meeting, "LOG_EVERY", 0.5)
    monkeypatch.setattr(meeting, "GIVE_UP", 2.0)
    with pytest.raises(WorkerLost, match=f"the 2 processes of this run did not all come to 127.0.0.1:{port}"):
        meeting.open_store(2)
    assert f"waiting for all 2 processes of this run at 127.0.0.1:{port}" in caplog.text
