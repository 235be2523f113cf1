"""A small process beside each process of a cluster run that tells the others it is there, and hears them.

A process of its own, since the one it stands for may compute for hours, hold the interpreter's lock or wait in a
library; as long as that one is neither dead nor stopped, it is heard. Everyone beats to the process beside rank 0 and
hears its beats. Who is not heard for `after` seconds is lost: everyone is told, and ends. It runs as a script and needs
only the standard library. Every line between hosts is signed with the run's secret; who sends another is cut off.
"""

import asyncio
import contextlib
import hmac
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

LINE = 4096
"""No honest line is longer."""
PATIENCE = 5.0
"""Seconds a caller has to say who it is."""
STRANGERS = 64
"""Callers at a time that have not said who they are."""
RELEASE = 5.0
"""Seconds until a stopped process is killed after the run was lost; the others end first."""
GRACE = 60.0
"""Seconds until any other is killed that did not end by itself."""


def sign(secret: bytes, said: dict[str, Any]) -> bytes:
    """A message as a line."""
    content = json.dumps(said).encode()
    return hmac.digest(secret, content, "sha256").hex().encode() + b" " + content + b"\n"


def verify(secret: bytes, line: bytes) -> dict[str, Any]:
    """What a line says; ValueError if it is not one of ours."""
    seal, _, content = line.strip().partition(b" ")
    if not hmac.compare_digest(seal, hmac.digest(secret, content, "sha256").hex().encode()):
        raise ValueError("not signed with the secret of this run")
    said = json.loads(content)
    if not isinstance(said, dict):
        raise ValueError("not a message")
    return said


def stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal; one that a debugger holds was not. Known on Linux only."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


class Heart:
    """One process's beat, and when it heard the others."""

    def __init__(self, rank: int, hosts: list[str], secret: str, after: float, parent: int) -> None:
        self.rank, self.hosts, self.secret = rank, hosts, secret.encode()
        self.after, self.parent = after, parent
        watched = range(1, len(hosts)) if rank == 0 else [0]
        self.heard = dict.fromkeys(watched, time.monotonic())
        self.addresses: dict[int, str] = {}
        self.lines: dict[int, asyncio.StreamWriter] = {}
        self.strangers, self.begun = 0, False
        self.lost = asyncio.Event()

    @property
    def pace(self) -> float:
        return min(1.0, self.after / 6) if self.after else 1.0

    @property
    def quiet(self) -> float:
        return max(3 * self.pace, self.after / 3)

    def tell(self, said: dict[str, Any]) -> None:
        """To everyone there is a line to."""
        for line in self.lines.values():
            if not line.is_closing():
                line.write(sign(self.secret, said))

    def report(self, sentence: str) -> None:
        """The run is lost: the others and the parent are told, once."""
        if not self.lost.is_set():
            self.tell({"lost": sentence})
            print(json.dumps({"lost": sentence}), flush=True)
            self.lost.set()

    def begin(self, said: dict[str, Any]) -> None:
        """The parent is told, once, that the others can be heard from now on."""
        if not self.begun:
            self.begun = True
            print(json.dumps(said), flush=True)

    def wait(self, after: float) -> None:
        """From now on who is silent for `after` seconds is lost; with 0 nobody is."""
        if after != self.after:
            self.after = after
            self.restart()

    def restart(self) -> None:
        self.heard = dict.fromkeys(self.heard, time.monotonic())

    def hear(self, rank: int, said: dict[str, Any]) -> None:
        """A signed message of a peer."""
        if rank in self.heard:
            self.heard[rank] = time.monotonic()
        if "lost" in said:
            self.report(str(said["lost"]))
        if "bye" in said:
            self.heard.pop(rank, None)
        if rank == 0 and "after" in said:
            self.wait(float(said["after"]))
            self.begin({"there": True})

    def name(self, rank: int) -> str:
        address = self.addresses.get(rank)
        return f"process {rank} on host {self.hosts[rank]}" + (f" ({address})" if address else "")

    def look(self) -> None:
        """Is anybody silent for too long?"""
        silent = [rank for rank, last in self.heard.items() if time.monotonic() - last > self.after]
        if self.after and silent:
            who = " and ".join(self.name(rank) for rank in silent[:3]) + (" and others" if len(silent) > 3 else "")
            have = "have" if len(silent) > 1 else "has"
            self.report(f"{who} {have} not been heard for {self.after:g} s: dead, stopped, or cut off from the network")

    async def beat(self) -> None:
        """Until the parent is gone or the run is lost."""
        while not self.lost.is_set() and os.getppid() == self.parent:
            before = time.monotonic()
            if not stopped(self.parent):
                self.tell({"after": self.after} if self.rank == 0 else {})
            await asyncio.sleep(self.pace)
            if time.monotonic() - before > 2 * self.pace + 1:
                self.restart()  # this process was stopped itself, and could hear nobody
            self.look()

    async def welcome(self, reader: asyncio.StreamReader, line: asyncio.StreamWriter) -> None:
        """At rank 0: one of the others calls, or a stranger does."""
        rank = 0
        self.strangers += 1
        try:
            if self.strangers <= STRANGERS:
                hello = verify(self.secret, await asyncio.wait_for(reader.readline(), PATIENCE))
                rank = hello.get("rank", 0)
        except (OSError, ValueError, TimeoutError):
            rank = 0
        finally:
            self.strangers -= 1
        if type(rank) is not int or not 0 < rank < len(self.hosts):
            line.close()
            return
        former, self.lines[rank] = self.lines.get(rank), line
        if former is not None:
            former.close()
        self.addresses[rank] = line.get_extra_info("peername")[0]
        self.hear(rank, {})
        if not stopped(self.parent):
            line.write(sign(self.secret, {"after": self.after}))
        await self.listen(rank, reader, line)

    async def listen(self, rank: int, reader: asyncio.StreamReader, line: asyncio.StreamWriter) -> None:
        """To one peer, until it hangs up or talks nonsense; a quiet line to rank 0 may be dead, and is given up."""
        with contextlib.suppress(OSError, ValueError, TimeoutError):
            while content := await asyncio.wait_for(reader.readline(), None if self.rank == 0 else self.quiet):
                self.hear(rank, verify(self.secret, content))
        line.close()

    async def call(self, addresses: list[list[Any]]) -> None:
        """Elsewhere: call rank 0 under one of its addresses, and again whenever the line is dead."""
        while 0 in self.heard:
            for host, port in addresses:
                with contextlib.suppress(OSError, TimeoutError):
                    reaching = asyncio.open_connection(host, port, limit=LINE)
                    reader, line = await asyncio.wait_for(reaching, self.quiet)
                    self.lines[0], self.addresses[0] = line, line.get_extra_info("peername")[0]
                    line.write(sign(self.secret, {"rank": self.rank}))
                    await self.listen(0, reader, line)
            await asyncio.sleep(self.pace / 2)

    async def obey(self, words: asyncio.StreamReader) -> None:
        """The parent's words, until it says goodbye, has heard of the loss or is gone."""
        while line := await words.readline():
            said = json.loads(line)
            if "after" in said:
                self.wait(float(said["after"]))
            if "bye" in said:
                self.tell({"bye": True})
                return
            if "heard" in said:
                return

    async def release(self) -> None:
        """After a loss: a parent that does not answer sits in a library or is stopped, and holds the run's folder."""
        seconds = RELEASE if stopped(self.parent) else GRACE
        await asyncio.sleep(seconds)
        if os.getppid() == self.parent:
            print(f"error: process {self.rank} does not end by itself and is killed", file=sys.stderr, flush=True)
            os.kill(self.parent, signal.SIGKILL)

    async def live(self, words: asyncio.StreamReader, bind: str, addresses: list[list[Any]]) -> None:
        """Until the parent ends or the run is lost."""
        if self.rank == 0:
            server = await asyncio.start_server(self.welcome, bind, 0, limit=LINE)
            self.begin({"port": server.sockets[0].getsockname()[1]})
            calling = asyncio.create_task(server.serve_forever())
        else:
            calling = asyncio.create_task(self.call(addresses))
        obeying, beating = asyncio.create_task(self.obey(words)), asyncio.create_task(self.beat())
        await asyncio.wait({obeying, beating}, return_when=asyncio.FIRST_COMPLETED)
        if self.lost.is_set() and not obeying.done():
            await asyncio.wait({obeying, asyncio.create_task(self.release())}, return_when=asyncio.FIRST_COMPLETED)
        calling.cancel()
        for line in self.lines.values():
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(line.drain(), 1)


async def live() -> None:
    """The first line of standard input says whose heart this is; no other process can read it there."""
    words = asyncio.StreamReader(limit=2**20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    about = json.loads(await words.readline() or "null")
    if about is not None:
        bind, addresses = about.pop("bind"), about.pop("addresses")
        with contextlib.suppress(BrokenPipeError):
            await Heart(**about).live(words, bind, addresses)
    os._exit(0)


if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)  # it ends with its parent, which may have a checkpoint to write
    asyncio.run(live())
