"""A real SuperLink and real SuperNodes on loopback, with TLS and authentication. None of them outlives its block."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedlesam.flower.keys import make_keys

ROOT = Path(__file__).resolve().parents[2]
APP = ROOT / "examples" / "flower-cifar"
BIN = Path(sys.executable).parent
PATIENCE = 600.0
"""Of what takes seconds on an idle machine: the tests end, and do not fail because others are at work."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait(what: str, ready: Callable[[], Any], patience: float = PATIENCE, pause: float = 0.2) -> Any:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        found = ready()
        if found:
            return found
        time.sleep(pause)
    raise TimeoutError(f"{what}: not within {patience:.0f} s")


def members(home: Path) -> dict[int, str]:
    """The living processes that belong to a machine, by its FLWR_HOME: some of them make sessions of their own."""
    mark, found = f"FLWR_HOME={home}".encode(), {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    return found


class Machine:
    """One process and what it starts."""

    def __init__(self, name: str, folder: Path, command: list[str]) -> None:
        self.name, self.log, self.home = name, folder / f"{name}.log", folder / f"{name}-home"
        self.out = self.log.open("ab")
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(self.home),
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, how: int = signal.SIGTERM) -> None:
        """It and all it started; a process that does not listen is killed, and a ClientApp of a run that is no more."""
        if how == signal.SIGTERM:
            self.process.terminate()
            with contextlib.suppress(TimeoutError, subprocess.TimeoutExpired):
                self.process.wait(15)
                wait(f"{self.name} to end", lambda: not members(self.home), 3)
        while left := members(self.home):
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.1)
        self.process.wait(15)
        self.out.close()


def environment(home: Path) -> dict[str, str]:
    """No telemetry, no look for updates, no installation of what an app asks for; nothing in the user's home."""
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "COLUMNS": "400",
    }


class Deployment:
    def __init__(self, folder: Path, secure: bool = True) -> None:
        self.folder, self.secure, self.machines = folder, secure, {}  # type: ignore[var-annotated]
        self.port, self.proxy = free_port(), None
        self.keys = folder / "keys"
        make_keys(self.keys, [], 3, days=2)
        home = folder / "cli-home"
        home.mkdir()
        security = f'root-certificates = "{self.keys / "ca.crt"}"' if secure else "insecure = true"
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n{security}\n'
        (home / "config.toml").write_text(text)

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(self, *_: object) -> None:
        for machine in reversed(list(self.machines.values())):
            machine.end()

    def start(self, name: str, command: list[str]) -> Machine:
        self.machines[name] = Machine(name, self.folder, command)
        return self.machines[name]

    def superlink(self) -> Machine:
        flags = ["--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key", "--ssl-ca-certfile", "ca.crt"]
        files = [flag if flag.startswith("--") else str(self.keys / flag) for flag in flags]
        security = [*files, "--enable-supernode-auth"] if self.secure else ["--insecure"]
        flags = [*security, "--port", str(self.port), "--disable-runtime-dependency-installation"]
        machine = self.start("superlink", [str(BIN / "flower-superlink"), *flags])
        wait("the SuperLink", lambda: "Uvicorn running" in machine.said() or machine.process.poll() is not None, 60)
        assert machine.process.poll() is None, machine.said()
        return machine

    def supernode(
        self,
        client: int,
        *,
        name: str = "",
        key: Path | None = None,
        ca: Path | None = None,
        more: str = "",
        through: int | None = None,
        forked: bool = False,
    ) -> Machine:
        """One that connects through a proxy's port, or whose messages our executor runs, if asked for."""
        name, port = name or f"node{client}", str(free_port())
        roots = ["--root-certificates", str(ca or self.keys / "ca.crt")]
        security = [*roots, "--auth-supernode-private-key", str(key or self.keys / f"node{client}")]
        flags = ["--superlink", f"127.0.0.1:{through or self.port}", "--port", port, "--max-retries", "3"]
        config = ["--node-config", f"partition-id={client} num-partitions=3 {more}".strip()]
        flags += ["--isolation", "process"] if forked else []
        command = [str(BIN / "flower-supernode"), *(security if self.secure else ["--insecure"]), *flags, *config]
        if forked:
            self.start(f"{name}-executor", [str(BIN / "fedlesam"), "deploy", "executor", "--port", port])
        return self.start(name, command)

    def restart(self, client: int) -> None:
        """As a service manager does: until the SuperLink has noticed that the one before is gone."""

        def up() -> bool:
            before = len(self.machines[f"node{client}"].said())
            machine = self.supernode(client)
            wait("a SuperNode", lambda: machine.process.poll() is not None or "SuperNode ID" in machine.said()[before:])
            if machine.process.poll() is None:
                return True
            machine.end()
            time.sleep(3)
            return False

        wait(f"node {client} to be accepted again", up)

    def flwr(self, *arguments: str, patience: float = PATIENCE) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments],
            cwd=self.folder,
            env=environment(self.folder / "cli-home"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patience,
        )
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def register(self, nodes: int = 3) -> None:
        for node in range(nodes):
            self.flwr("supernode", "register", str(self.keys / f"node{node}.pub"), "here")

    def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.flwr("supernode", "list", "here", "--format", "json"))["nodes"]
        return found

    def online(self) -> int:
        return sum(node["status"] == "online" for node in self.nodes())

    def run(self, *flags: str, **config: Any) -> str:
        """The id of a run that has been started."""
        text = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in config.items())
        said = self.flwr("run", str(APP), "here", "--run-config", text, *flags, "--format", "json")
        return str(json.loads(said)["run-id"])

    def status(self, run: str) -> str:
        (found,) = json.loads(self.flwr("list", "here", "--run-id", run, "--format", "json"))["runs"]
        return str(found["status"])

    def finish(self, run: str) -> None:
        """Wait for the end of a run, and that it was a good one. To ask costs a second of a core: not all the time."""
        status = wait(f"run {run}", lambda: ("finished" in (found := self.status(run))) and found, pause=4)
        if "completed" not in status:
            logs = "\n".join(f"== {name}\n{machine.said()[-3000:]}" for name, machine in self.machines.items())
            raise AssertionError(f"{status}\n{logs}")


@contextlib.contextmanager
def three_nodes(folder: Path, *, forked: int | None = None, through: Any = None, **more: str) -> Iterator[Deployment]:
    """Of one node our executor runs the messages; `through` opens a proxy, for that node, too."""
    with Deployment(folder) as deployment:
        deployment.superlink()
        deployment.register()
        with (
            through(folder / "proxy", deployment.keys, deployment.port)
            if through
            else contextlib.nullcontext() as proxy
        ):
            deployment.proxy = proxy
            for client in range(3):
                special = {"forked": True, "through": proxy[0] if proxy else None} if client == forked else {}
                deployment.supernode(client, more=more.get(f"node{client}", ""), **special)
            wait("three SuperNodes", lambda: deployment.online() == 3, 120)
            yield deployment
