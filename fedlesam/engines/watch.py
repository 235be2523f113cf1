"""Who watches the others while this process computes or waits: a heartbeat between hosts, a look at forked workers."""

import contextlib
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
"""Seconds; a run may say otherwise once its settings are read."""


def check_lost_after(owner: str, seconds: float) -> float:
    """A ValueError unless it is a time to wait, or 0."""
    check_number(owner, "lost_after", seconds, at_least=0)
    if 0 < seconds < 1:
        raise ValueError(f"{owner}: lost_after must be at least 1 second, or 0 to wait for ever, got {seconds}")
    return seconds


class Watch:
    """The process beside this one that beats for it; `lost` is called, in a thread, with a sentence about a peer."""

    def __init__(self, rank: int, hosts: list[str], store: Any, lost: Callable[[str], None]) -> None:
        command = [sys.executable, "-I", "-S", heartbeat.__file__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        about = {"rank": rank, "hosts": hosts, "after": LOST_AFTER, "parent": os.getpid()}
        try:
            if rank == 0:
                secret, (reachable, bind) = secrets.token_hex(32), own_address(hosts)
                port = self._begin({**about, "secret": secret, "bind": bind, "addresses": []})["port"]
                addresses = [[address, port] for address in dict.fromkeys(reachable)]
                store.set("heartbeat", json.dumps({"secret": secret, "addresses": addresses}))
            else:
                self._begin({**about, "bind": "", **json.loads(store.get("heartbeat"))})
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        threading.Thread(target=self._listen, args=(lost,), daemon=True).start()

    @property
    def _output(self) -> Any:
        return self.process.stdout

    def _begin(self, about: dict[str, Any]) -> dict[str, Any]:
        """Once rank 0 can be called, and elsewhere once it answered."""
        self.say(about)
        answer: dict[str, Any] | None = json.loads(self._output.readline() or "null")
        if answer is None or "lost" in answer:
            why = answer["lost"] if answer is not None else f"nothing can listen at {about['bind']}"
            raise WorkerLost(f"no heartbeat: {why}; MASTER_ADDR must be an address that all hosts of the run can reach")
        return answer

    def say(self, said: dict[str, Any]) -> None:
        """To the process beside; one that is gone the others will miss."""
        stream: Any = self.process.stdin
        with contextlib.suppress(OSError, ValueError):
            stream.write(json.dumps(said).encode() + b"\n")
            stream.flush()

    def _listen(self, lost: Callable[[str], None]) -> None:
        with contextlib.suppress(ValueError):  # closed
            for line in self._output:
                lost(json.loads(line)["lost"])

    def close(self) -> None:
        """Nobody need hear of this process any more."""
        self.say({"bye": True})
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def own_address(hosts: Sequence[str]) -> tuple[list[str], str]:
    """Where the others may reach this host, and where to listen: the interface from which MASTER_ADDR is reached.

    A host that is the master itself may know its name as a loopback address, which is no use to others.
    """
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, _, _, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        mine: str = probe.getsockname()[0]
    if not mine.startswith("127.") and mine != "::1":
        return [mine], mine
    if len(set(hosts)) == 1:
        return [mine], mine
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
    """End connections under a library that waits on them without end: it raises as if the peer had died."""
    for number in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)


def watch_children(children: Sequence[Any], after: float, lost: Callable[[str], None]) -> None:
    """Until a forked worker dies, or one that was stopped for `after` seconds is killed; `lost` hears of it.

    Looks are counted and not seconds: when this process is stopped too, as by Ctrl-Z, nothing counts.
    """
    pace, looks = min(1.0, after / 6) or None, dict.fromkeys(range(len(children)), 0)
    while not wait([child.sentinel for child in children], timeout=pace) and pace is not None:
        for number, child in enumerate(children):
            looks[number] = looks[number] + 1 if heartbeat.stopped(child.pid) else 0
            if looks[number] * pace > after:
                lost(f"worker {number + 1}, process {child.pid} of this machine, has been stopped for {after:g} s")
                os.kill(child.pid, signal.SIGKILL)
                return
    lost("a worker process died")
