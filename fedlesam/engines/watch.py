"""Detects lost processes while this one computes or waits: a heartbeat between hosts, a poll of forked workers."""

import contextlib
import ipaddress
import json
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from fedlesam.core.checks import check_number
from fedlesam.engines import heartbeat
from fedlesam.engines.meeting import WorkerLost

LOST_AFTER = 60.0
"""Seconds, until the settings of the run are read."""


def check_lost_after(owner: str, seconds: float) -> float:
    """Refuse a `lost_after` that is neither 0 nor at least a second.

    Args:
        owner: what the setting belongs to, for the message.
        seconds: the setting.
    """
    check_number(owner, "lost_after", seconds, at_least=0)
    if 0 < seconds < 1:
        raise ValueError(f"{owner}: lost_after must be at least 1 second, or 0 to wait for ever, got {seconds}")
    return seconds


class Watch:
    """The heartbeat process of this process (heartbeat.py).

    Args:
        rank: of this process.
        hosts: the host of every rank.
        store: the store of torch.distributed, in which rank 0 publishes its address.
        lost: called in a thread with a sentence about a process that is lost.
    """

    def __init__(self, rank: int, hosts: list[str], store: Any, lost: Callable[[str], None]) -> None:
        command = [sys.executable, "-I", "-S", heartbeat.__file__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._input: Any = self.process.stdin
        self._output: Any = self.process.stdout
        settings = {"rank": rank, "hosts": hosts, "after": LOST_AFTER, "parent": os.getpid()}
        try:
            if rank == 0:
                secret, (reachable, bind) = secrets.token_hex(32), own_address(hosts)
                port = self._begin({**settings, "secret": secret, "bind": bind, "addresses": []})["port"]
                addresses = [[address, port] for address in dict.fromkeys(reachable)]
                store.set("heartbeat", json.dumps({"secret": secret, "addresses": addresses}))
            else:
                self._begin({**settings, "bind": "", **json.loads(store.get("heartbeat"))})
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        threading.Thread(target=self._listen, args=(lost,), daemon=True).start()

    def _begin(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Start the heartbeat. Rank 0 returns when it listens, the others when rank 0 has answered."""
        self.send(settings)
        answer: dict[str, Any] | None = json.loads(self._output.readline() or "null")
        if answer is None or "lost" in answer:
            why = answer["lost"] if answer is not None else f"nothing can listen at {settings['bind']}"
            raise WorkerLost(f"no heartbeat: {why}; MASTER_ADDR must be an address that all hosts of the run can reach")
        return answer

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the heartbeat process. If that is gone, the other hosts will notice.

        Args:
            message: anything that JSON holds.
        """
        with contextlib.suppress(OSError, ValueError):
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()

    def _listen(self, lost: Callable[[str], None]) -> None:
        with contextlib.suppress(ValueError):  # closed
            for line in self._output:
                lost(json.loads(line)["lost"])

    def close(self) -> None:
        """End the heartbeat: the others do not miss this process."""
        self.send({"bye": True})
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def own_address(hosts: Sequence[str]) -> tuple[list[str], str]:
    """The addresses under which others may reach this host, and the one to listen at.

    It is that of the interface from which MASTER_ADDR is reached. The master itself may know its own name as a loopback
    address, which others cannot use.

    Args:
        hosts: the host of every rank.
    """
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, _, _, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
    if not ipaddress.ip_address(own.partition("%")[0]).is_loopback or len(set(hosts)) == 1:
        return [own], own
    return [master[0], hosts[0]], "0.0.0.0" if family == socket.AF_INET else "::"


def sockets() -> set[int]:
    """The file numbers of this process's sockets."""
    found = set()
    for path in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                found.add(int(path.name))
    return found


def cut(connections: Collection[int]) -> None:
    """Shut connections down, so that a library that waits on them raises as if the peer had died.

    Args:
        connections: file numbers of sockets.
    """
    for number in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)


def watch_children(children: Sequence[Any], after: float, lost: Callable[[str], None]) -> None:
    """Wait until a forked worker dies; kill one that a signal has stopped for too long.

    Polls are counted, not seconds: while this process is stopped too, as by Ctrl-Z, no time counts.

    Args:
        children: the worker processes.
        after: seconds that one may be stopped; 0 means for ever.
        lost: called with a sentence about the worker that is lost.
    """
    pace, polls = min(1.0, after / 6) or None, dict.fromkeys(range(len(children)), 0)
    while not wait([child.sentinel for child in children], timeout=pace) and pace is not None:
        for number, child in enumerate(children):
            polls[number] = polls[number] + 1 if heartbeat.stopped(child.pid) else 0
            if polls[number] * pace > after:
                lost(f"worker {number + 1}, process {child.pid} of this machine, has been stopped for {after:g} s")
                os.kill(child.pid, signal.SIGKILL)
                return
    lost("a worker process died")
