"""Hosts to test a cluster on: network namespaces of this machine, and torchrun in them."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

PATIENCE = 180
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SMALL = {"clients": 6, "active": 4, "rounds": 3, "epochs": 1, "batch_size": 50, "model": "mlp:hidden=4"}
FLAGS = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
RUN = ["-m", "fedlesam", "run", "--algorithm", "fedlesam-s", "--threads", "1", *FLAGS]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


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

    def plug(self, state: str) -> None:
        """The second host's cable: up or down."""
        ip("netns", "exec", self.names[1], "ip", "link", "set", self.cables[1], state)

    def run(
        self, host: int, folder: Path, flags: list[str], torchrun: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[str]:
        place = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(host), *torchrun]
        meeting = ["--master-addr", self.addresses[0], "--master-port", "29517"]
        command = ["ip", "netns", "exec", self.names[host], *TORCHRUN, *place, *meeting, *RUN, *flags]
        return start(command, folder, GLOO_SOCKET_IFNAME=self.cables[host], **environment)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip() or f"ip {' '.join(arguments)} failed")


def processes(**environment: str) -> list[int]:
    """Those whose environment has these values."""
    wanted = {f"{name}={value}".encode() for name, value in environment.items()}
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted <= set(path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found
