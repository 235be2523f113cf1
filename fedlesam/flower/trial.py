"""`fedlesam deploy try`: a whole Flower deployment on this machine, with TLS and authenticated SuperNodes."""

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlesam.engines.meeting import WorkerLost
from fedlesam.engines.signals import Interrupted
from fedlesam.flower.app import ROUNDS, App
from fedlesam.flower.check import check_app
from fedlesam.flower.keys import make_keys
from fedlesam.flower.processes import Child, no_orphans

HOST = "127.0.0.1"
NODES = 3
START = 180.0
"""Seconds that the SuperLink has to start."""
POLL = 0.2
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Flower reports nothing, looks for no update and installs nothing."""

DECORATION = re.compile(r"\x1b\[[0-9;]*m|^(INFO|WARNING|ERROR|DEBUG)\s*:\s*")
CHATTER = re.compile(
    r"Using SuperLink|Successfully (started|installed)|Start `flwr-serverapp`|Starting logstream|All logs|^\s*$"
)
RUN = re.compile(r"Successfully started run (\d+)")


class RunFailed(RuntimeError):
    """The run did not complete."""


@dataclass
class Trial:
    """One run of an app on this machine.

    Args:
        app: the app.
        show: called with every line for the user.
        nodes: SuperNodes; None takes the app's `clients`.
        rounds: None takes the app's own number.
        settings: more settings of the run, as `flwr run --run-config` takes them.
        node_settings: more settings of every node, as `flower-supernode --node-config` takes them.
        forked: whether a node's messages run in forks of a process that has imported PyTorch (executor.py), or each in
            a process of its own, as Flower does it.
        keep: whether the logs are kept after a run that completed.
    """

    app: App
    show: Callable[[str], None]
    nodes: int | None = None
    rounds: int | None = None
    settings: str = ""
    node_settings: str = ""
    forked: bool = True
    keep: bool = False
    children: list[Child] = field(default_factory=list)
    """The processes that were started."""
    signum: int = 0
    """The signal that asked it to stop; 0 for none."""

    def __post_init__(self) -> None:
        self.count = self.nodes or self.app.clients or NODES
        wrong = [found.text for found in check_app(self.app) if found.level in ("missing", "insecure")]
        if wrong:
            raise ValueError("; ".join(wrong))
        overrides: dict[str, Any] = {}
        if self.app.clients is not None:
            overrides["clients"] = self.count
        if self.rounds is not None:
            name = next((name for name in ROUNDS if name in self.app.config), None)
            if name is None:
                raise ValueError(
                    f"{self.app.pyproject}: [tool.flwr.app.config] has none of {', '.join(ROUNDS)}, so --rounds cannot "
                    "be set; name the app's own setting with --run-config"
                )
            overrides[name] = self.rounds
        text = " ".join(f"{name}={json.dumps(value)}" for name, value in overrides.items())
        self.run_config = f"{text} {self.settings}".strip()
        self.programs = Path(sys.executable).parent
        absent = [name for name in ("flwr", "flower-superlink", "flower-supernode") if not self._program(name)]
        if absent:
            raise ValueError(f"Flower's {', '.join(absent)} cannot be found: pip install 'fedlesam[flower]'")

    def run(self) -> None:
        """Start everything, run the app, and end everything again."""
        folder = Path(tempfile.mkdtemp(prefix="fedlesam-try-"))
        began, good = time.monotonic(), False
        try:
            with self._heed_signals(), no_orphans(self.children):
                self._run(folder)
            good = True
            self.show(f"done in {time.monotonic() - began:.0f} s; everything is stopped")
        finally:
            shutil.rmtree(folder / "keys", ignore_errors=True)
            if good and not self.keep:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                self.show(f"logs: {folder}")

    def _run(self, folder: Path) -> None:
        keys, port = folder / "keys", _free_port()
        make_keys(keys, [], self.count, days=2)
        self.show(f"SuperLink on {HOST}:{port}: TLS, {self.count} SuperNodes with keys made for this run")
        tls = ["--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key", "--ssl-ca-certfile", "ca.crt"]
        files = [flag if flag.startswith("--") else str(keys / flag) for flag in tls]
        safe = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        link = self._start(folder, "superlink", "flower-superlink", *files, *safe, "--host", HOST, "--port", str(port))
        self._wait_for(link, port)
        self._register(port, keys)
        ports = [self._start_node(folder, node, port, keys) for node in range(self.count)]
        if self.forked:
            flags = [flag for port in ports for flag in ("--port", str(port))]
            self._start(folder, "executor", sys.executable, "-P", "-m", "fedlesam", "deploy", "executor", *flags)
        self.show("first round: every SuperNode is asked which client it is, and PyTorch is loaded; some seconds")
        self._run_app(folder, port, keys)

    def _start_node(self, folder: Path, node: int, superlink: int, keys: Path) -> int:
        port = _free_port()
        config = f"partition-id={node} num-partitions={self.count} {self.node_settings}".strip()
        safe = ["--root-certificates", str(keys / "ca.crt"), "--auth-supernode-private-key", str(keys / f"node{node}")]
        where = ["--superlink", f"{HOST}:{superlink}", "--host", HOST, "--port", str(port)]
        how = ["--isolation", "process" if self.forked else "subprocess"]
        self._start(folder, f"node{node}", "flower-supernode", *safe, *where, *how, "--node-config", config)
        return port

    def _run_app(self, folder: Path, port: int, keys: Path) -> None:
        home = folder / "flwr"
        home.mkdir()
        connection = (
            f'[superlink.try]\naddress = "{HOST}:{port}"\nroot-certificates = {json.dumps(str(keys / "ca.crt"))}\n'
        )
        (home / "config.toml").write_text(connection, encoding="utf-8")
        more = ["--run-config", self.run_config] if self.run_config else []
        arguments = ["run", str(self.app.folder.resolve()), "try", "--stream", *more]
        run = self._start(folder, "flwr", "flwr", *arguments, piped=True)
        number = None
        with (folder / "run.log").open("w", encoding="utf-8") as log:
            for line in self._lines(run):
                log.write(f"{line}\n")
                number = int(found[1]) if (found := RUN.search(line)) else number
                if not CHATTER.search(text := DECORATION.sub("", DECORATION.sub("", line))):
                    self.show(f"  {text}")
        if number is None:
            raise RunFailed(f"the run was not started: {run.tail()}")
        status = self._status(port, keys, number)
        if status != "finished:completed":
            raise RunFailed(f"the run ended as {status}; the last lines of the ServerApp are above")

    def _lines(self, run: Child) -> Iterator[str]:
        """The lines of a process as they come, as long as all others live."""
        assert run.process.stdout is not None
        rest, descriptor = b"", run.process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while True:
                self._check()
                if not selector.select(POLL):
                    continue
                content = os.read(descriptor, 65536)
                if not content:
                    break
                *lines, rest = (rest + content).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
        if rest:
            yield rest.decode(errors="replace")

    @contextlib.contextmanager
    def _heed_signals(self) -> Iterator[None]:
        """A handler that raised would be ignored where Python calls it inside fork's own callbacks: `_check` raises."""

        def stop(signum: int, frame: object) -> None:
            self.signum = signum

        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before: Mapping[int, Any] = {signum: signal.signal(signum, stop) for signum in wanted}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _check(self) -> None:
        """Raise if a signal came, or if a process died."""
        if self.signum:
            raise Interrupted(self.signum)
        dead = next((child for child in self.children if child.ended and child.name != "flwr"), None)
        if dead is not None:
            code = dead.process.returncode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise WorkerLost(f"{dead.name} {how}, so all others were stopped. Its last lines:\n{dead.tail()}")

    def _start(self, folder: Path, name: str, program: str, *arguments: str, piped: bool = False) -> Child:
        self._check()
        command = [program if Path(program).is_absolute() else self._program(program), *arguments]
        path = f"{self.programs}{os.pathsep}{os.environ.get('PATH', '')}"
        threads = str(max(1, (os.cpu_count() or 1) // self.count))
        own = {"FLWR_HOME": str(folder / name), "PATH": path}
        environment = {"OMP_NUM_THREADS": threads, **os.environ, **QUIET, **own}
        child = Child(name, command, folder / f"{name}.log", environment, piped)
        self.children.append(child)
        return child

    def _program(self, name: str) -> str:
        beside = self.programs / name
        return str(beside) if beside.exists() else shutil.which(name) or ""

    def _wait_for(self, superlink: Child, port: int) -> None:
        deadline = time.monotonic() + START
        while True:
            self._check()
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
                return
            if time.monotonic() > deadline:
                raise WorkerLost(f"the SuperLink did not start within {START:.0f} s: {superlink.tail()}")
            time.sleep(POLL)

    def _control(self, port: int, keys: Path) -> Any:
        from flwr.supercore.control.control_http_client import ControlHttpClient

        return ControlHttpClient.from_server_address(f"{HOST}:{port}", False, (keys / "ca.crt").read_bytes(), [])

    def _register(self, port: int, keys: Path) -> None:
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key
        from flwr.proto.control_pb2 import RegisterNodeRequest
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        with self._control(port, keys) as control:
            for node in range(self.count):
                key: Any = load_ssh_public_key((keys / f"node{node}.pub").read_bytes())
                control.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(key)))

    def _status(self, port: int, keys: Path, number: int) -> str:
        from flwr.proto.control_pb2 import ListRunsRequest

        with self._control(port, keys) as control:
            deadline = time.monotonic() + 30
            while True:
                self._check()
                status = control.ListRuns(ListRunsRequest(run_id=number)).run_dict[number].status
                if status.status == "finished" or time.monotonic() > deadline:
                    return f"{status.status}:{status.sub_status}" + (f" ({status.details})" if status.details else "")
                time.sleep(POLL)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])
