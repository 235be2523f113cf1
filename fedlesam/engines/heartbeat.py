"""The heartbeat process: each process of a cluster run starts one, and it signals to the others that its parent lives.

It is a process of its own, since the parent may compute for hours, hold the interpreter's lock or wait in a library; it
beats as long as the parent is neither dead nor stopped. The heartbeats of all ranks are connected to that of rank 0, in
both directions. A rank that is silent for `after` seconds is lost: all are notified, and end. This file is run as a
script and needs only the standard library. Every line between hosts is signed with the run's secret; a connection that
sends any other line is closed.
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
"""Bytes of the longest line."""
PATIENCE = 5.0
"""Seconds in which a new connection must identify itself."""
STRANGERS = 64
"""Connections at a time that have not identified themselves."""
RELEASE = 5.0
"""Seconds until a stopped parent is killed after the run is lost; the others end first."""
GRACE = 60.0
"""Seconds until any other parent is killed that did not end by itself."""


def sign(secret: bytes, message: dict[str, Any]) -> bytes:
    """A message as a signed line.

    Args:
        secret: of the run.
        message: anything that JSON holds.
    """
    content = json.dumps(message).encode()
    return hmac.digest(secret, content, "sha256").hex().encode() + b" " + content + b"\n"


def verify(secret: bytes, line: bytes) -> dict[str, Any]:
    """The message of a line; a ValueError if it is not signed with the secret.

    Args:
        secret: of the run.
        line: from the network.
    """
    signature, _, content = line.strip().partition(b" ")
    if not hmac.compare_digest(signature, hmac.digest(secret, content, "sha256").hex().encode()):
        raise ValueError("not signed with the secret of this run")
    message = json.loads(content)
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


def stopped(pid: int) -> bool:
    """Whether a signal has stopped a process; a debugger does not count. Known on Linux only.

    Args:
        pid: of the process.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


class Heart:
    """The heartbeat of one rank, and when those it watches were last heard.

    Args:
        rank: of the parent.
        hosts: the host of every rank.
        secret: of the run.
        after: seconds until a silent rank is lost; 0 means never.
        parent: its process id.
    """

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
        """Seconds between two beats."""
        return min(1.0, self.after / 6) if self.after else 1.0

    @property
    def quiet(self) -> float:
        """Seconds of silence after which a connection to rank 0 is given up."""
        return max(3 * self.pace, self.after / 3)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message over all connections.

        Args:
            message: JSON; it is signed.
        """
        for line in self.lines.values():
            if not line.is_closing():
                line.write(sign(self.secret, message))

    def report(self, sentence: str) -> None:
        """The run is lost: notify the others and the parent, once.

        Args:
            sentence: Who is lost, for people.
        """
        if not self.lost.is_set():
            self.send({"lost": sentence})
            print(json.dumps({"lost": sentence}), flush=True)
            self.lost.set()

    def announce(self, message: dict[str, Any]) -> None:
        """Notify the parent, once, that the connections are ready.

        Args:
            message: JSON, with the port where there is one.
        """
        if not self.begun:
            self.begun = True
            print(json.dumps(message), flush=True)

    def set_after(self, after: float) -> None:
        """Set after how many seconds a silent rank is lost.

        Args:
            after: In seconds; 0 means never.
        """
        if after != self.after:
            self.after = after
            self.restart()

    def restart(self) -> None:
        """Count silence from now on."""
        self.heard = dict.fromkeys(self.heard, time.monotonic())

    def receive(self, rank: int, message: dict[str, Any]) -> None:
        """Handle a signed message of another rank.

        Args:
            rank: Of the sender.
            message: Its content.
        """
        if rank in self.heard:
            self.heard[rank] = time.monotonic()
        if "lost" in message:
            self.report(str(message["lost"]))
        if "bye" in message:
            self.heard.pop(rank, None)
        if rank == 0 and "after" in message:
            self.set_after(float(message["after"]))
            self.announce({"there": True})

    def name(self, rank: int) -> str:
        """A rank with its host and address.

        Args:
            rank: Of a process of the run.
        """
        address = self.addresses.get(rank)
        return f"process {rank} on host {self.hosts[rank]}" + (f" ({address})" if address else "")

    def check(self) -> None:
        """Report ranks that have been silent for too long."""
        silent = [rank for rank, last in self.heard.items() if time.monotonic() - last > self.after]
        if self.after and silent:
            who = " and ".join(self.name(rank) for rank in silent[:3]) + (" and others" if len(silent) > 3 else "")
            have = "have" if len(silent) > 1 else "has"
            self.report(f"{who} {have} not been heard for {self.after:g} s: dead, stopped, or cut off from the network")

    async def beat(self) -> None:
        """Beat until the parent is gone or the run is lost."""
        while not self.lost.is_set() and os.getppid() == self.parent:
            before = time.monotonic()
            if not stopped(self.parent):
                self.send({"after": self.after} if self.rank == 0 else {})
            await asyncio.sleep(self.pace)
            if time.monotonic() - before > 2 * self.pace + 1:
                self.restart()  # this process itself was stopped, and received nothing
            self.check()

    async def accept(self, reader: asyncio.StreamReader, line: asyncio.StreamWriter) -> None:
        """At rank 0: serve a new connection, of another rank or of a stranger.

        Args:
            reader: What comes in.
            line: What goes out.
        """
        rank: Any = 0
        self.strangers += 1
        try:
            with contextlib.suppress(OSError, ValueError, TimeoutError):
                if self.strangers <= STRANGERS:
                    rank = verify(self.secret, await asyncio.wait_for(reader.readline(), PATIENCE)).get("rank")
        finally:
            self.strangers -= 1
        if type(rank) is not int or not 0 < rank < len(self.hosts):
            line.close()
            return
        if rank in self.lines:
            self.lines[rank].close()
        self.lines[rank] = line
        self.addresses[rank] = line.get_extra_info("peername")[0]
        self.receive(rank, {})
        if not stopped(self.parent):
            line.write(sign(self.secret, {"after": self.after}))
        await self.listen(rank, reader, line)

    async def listen(self, rank: int, reader: asyncio.StreamReader, line: asyncio.StreamWriter) -> None:
        """Receive from one rank until the connection is closed, invalid or, at the others, quiet for too long.

        Args:
            rank: Of the other side.
            reader: What comes in.
            line: What goes out.
        """
        with contextlib.suppress(OSError, ValueError, TimeoutError):
            while content := await asyncio.wait_for(reader.readline(), None if self.rank == 0 else self.quiet):
                self.receive(rank, verify(self.secret, content))
        line.close()

    async def connect(self, addresses: list[list[Any]]) -> None:
        """At the others: connect to rank 0 under one of its addresses, and again when the connection is lost.

        Args:
            addresses: Pairs of host and port, in the order in which they are tried.
        """
        while 0 in self.heard:
            for host, port in addresses:
                with contextlib.suppress(OSError, TimeoutError):
                    reader, line = await asyncio.wait_for(asyncio.open_connection(host, port, limit=LINE), self.quiet)
                    self.lines[0], self.addresses[0] = line, line.get_extra_info("peername")[0]
                    line.write(sign(self.secret, {"rank": self.rank}))
                    await self.listen(0, reader, line)
            await asyncio.sleep(self.pace / 2)

    async def follow_parent(self, commands: asyncio.StreamReader) -> None:
        """Execute the parent's commands until it ends, confirms the loss or is gone.

        Args:
            commands: JSON, a line for each command.
        """
        while line := await commands.readline():
            command = json.loads(line)
            if "after" in command:
                self.set_after(float(command["after"]))
            if "bye" in command:
                self.send({"bye": True})
            if "bye" in command or "heard" in command:
                return

    async def release(self) -> None:
        """After a loss: kill a parent that waits in a library or is stopped, since it holds the run's folder."""
        await asyncio.sleep(RELEASE if stopped(self.parent) else GRACE)
        if os.getppid() == self.parent:
            print(f"error: process {self.rank} does not end by itself and is killed", file=sys.stderr, flush=True)
            os.kill(self.parent, signal.SIGKILL)

    async def run(self, commands: asyncio.StreamReader, bind: str, addresses: list[list[Any]]) -> None:
        """Run until the parent ends or the run is lost.

        Args:
            commands: Of the parent, a line for each.
            bind: The address at which rank 0 listens.
            addresses: Of rank 0, as pairs of host and port; unused at rank 0 itself.
        """
        if self.rank == 0:
            server = await asyncio.start_server(self.accept, bind, 0, limit=LINE)
            self.announce({"port": server.sockets[0].getsockname()[1]})
            network = asyncio.create_task(server.serve_forever())
        else:
            network = asyncio.create_task(self.connect(addresses))
        following, beating = asyncio.create_task(self.follow_parent(commands)), asyncio.create_task(self.beat())
        await asyncio.wait({following, beating}, return_when=asyncio.FIRST_COMPLETED)
        if self.lost.is_set() and not following.done():
            await asyncio.wait({following, asyncio.create_task(self.release())}, return_when=asyncio.FIRST_COMPLETED)
        network.cancel()
        for line in self.lines.values():
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(line.drain(), 1)


async def main() -> None:
    """The settings are the first line of standard input, where no other process can read the secret."""
    commands = asyncio.StreamReader(limit=2**20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    settings = json.loads(await commands.readline() or "null")
    if settings is not None:
        bind, addresses = settings.pop("bind"), settings.pop("addresses")
        with contextlib.suppress(BrokenPipeError):
            await Heart(**settings).run(commands, bind, addresses)
    os._exit(0)


if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)  # it ends with its parent, which may still write a checkpoint
    asyncio.run(main())
