"""The page of runs while they train, from a server that only this machine reaches and that only reads."""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedlesam.report import ledger
from fedlesam.report.charts import charts_of
from fedlesam.report.groups import compare_runs
from fedlesam.report.page import page, waiting_page
from fedlesam.report.summaries import tables_of
from fedlesam.runs.folder import find_folders
from fedlesam.runs.read import read_run

HOST = "127.0.0.1"
PORT = 8610


class LivePage:
    """The page of some run folders as they are now. It is made again only when they have changed.

    Args:
        folders: Run folders, or folders that hold some; they may be empty yet.
        targets: Values of the table of costs to a target.
    """

    def __init__(self, folders: Sequence[Path], targets: Sequence[float] = ()) -> None:
        self.folders, self.targets = list(folders), sorted(targets)
        self._lock = threading.Lock()
        self._made: tuple[str, str] | None = None

    def state(self) -> str:
        """A name for what is in the folders: another one means that there is something new."""
        found = hashlib.sha256()
        try:
            for folder in find_folders(self.folders):
                for path in (folder.config, folder.metrics, folder.probes, folder.summary):
                    stat = path.stat() if path.exists() else None
                    found.update(f"{path} {stat and (stat.st_size, stat.st_mtime_ns)}\n".encode())
        except (ValueError, OSError) as error:
            found.update(str(error).encode())
        return found.hexdigest()[:16]

    def text(self) -> str:
        """The page, or one that says what it waits for."""
        with self._lock:
            state = self.state()
            if self._made is None or self._made[0] != state:
                self._made = state, self._make(state)
            return self._made[1]

    def _make(self, state: str) -> str:
        try:
            runs = [read_run(folder.path) for folder in find_folders(self.folders)]
            begun = [run for run in runs if any(record.get("test_loss") is not None for record in run.records)]
            if not begun:
                return waiting_page(f"{len(runs)} runs have begun, and none has been evaluated yet.", state)
            comparison = compare_runs(begun)
            tables = tables_of(comparison, self.targets or ledger.default_targets(comparison))
            return page(comparison, charts_of(comparison), tables, live=state)
        except (ValueError, OSError) as error:
            return waiting_page(f"{error}.", state)


class Handler(BaseHTTPRequestHandler):
    """Two addresses: `/` is the page, `/state` names what is in the folders."""

    server: "Server"

    def do_GET(self) -> None:
        """Answer with the page or its state. Any other path is not there: no file is ever served."""
        if self.headers.get("Host") not in self.server.names:  # another site's name may lead to this address
            self.send_error(403, "this server answers to its own address only")
        elif self.path == "/":
            self._answer("text/html; charset=utf-8", self.server.live.text())
        elif self.path == "/state":
            self._answer("text/plain; charset=utf-8", self.server.live.state())
        else:
            self.send_error(404)

    def _answer(self, kind: str, text: str) -> None:
        body = text.encode("utf-8")
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A line for every request would hide what matters."""


class Server(ThreadingHTTPServer):
    """Serves one live page to this machine.

    Args:
        live: The page.
        port: Where; None takes the usual port, or a free one if that is taken.
    """

    daemon_threads = True

    def __init__(self, live: LivePage, port: int | None = None) -> None:
        self.live = live
        for one in _ports(port):
            try:
                super().__init__((HOST, one), Handler)
                break
            except OSError as error:
                taken = error
        else:
            raise ValueError(f"port {port} cannot be used ({taken.strerror}); choose another, or none") from taken
        self.names = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return f"http://{HOST}:{self.server_port}/"


def _ports(port: int | None) -> Iterator[int]:
    yield from (PORT, 0) if port is None else (port,)
