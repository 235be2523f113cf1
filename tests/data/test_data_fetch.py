"""Downloads from a server on this machine that breaks off, forgets, lies and refuses."""

import hashlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import images, write_python

from fedlesam.data import download
from fedlesam.data.catalogue import load
from fedlesam.data.download import fetch
from fedlesam.data.official import OFFICIAL

FILE = "cifar-10-python.tar.gz"
BODY = np.random.default_rng(0).bytes(300_000)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    body = BODY
    ranges = True
    stops: list[int]
    """Bytes after which each answer in turn breaks off."""
    status = 200
    length = True
    seen: list[str | None]

    def handle_error(self, *_: Any) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        wanted = self.headers.get("Range")
        server.seen.append(wanted)
        if server.status != 200:
            self.send_error(server.status)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.ranges else 0
        if start >= len(server.body):
            self.send_error(416)
            return
        rest = server.body[start:]
        self.send_response(206 if start else 200)
        if server.length:
            self.send_header("Content-Length", str(len(rest)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.body) - 1}/{len(server.body)}")
        self.end_headers()
        stop = server.stops.pop(0) if server.stops else len(rest)
        self.wfile.write(rest[:stop])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    known = replace(OFFICIAL["cifar10"], md5={FILE: hashlib.md5(BODY).hexdigest()})
    monkeypatch.setitem(OFFICIAL, "cifar10", known)
    running = Server(("127.0.0.1", 0), Handler)
    running.stops, running.seen = [], []
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


def get(server: Server, folder: Path, **options: Any) -> list[Path]:
    return fetch("cifar10", folder, base_url=f"http://127.0.0.1:{server.server_address[1]}/", wait=0.001, **options)


def test_whole(server: Server, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int | None]] = []
    (path,) = get(server, tmp_path / "new", progress=lambda *call: calls.append(call))
    assert path == tmp_path / "new" / "cifar10" / FILE
    assert path.read_bytes() == BODY
    assert [child.name for child in path.parent.iterdir()] == [FILE]
    assert calls[0] == (FILE, 0, len(BODY))
    assert calls[-1] == (FILE, len(BODY), len(BODY))
    assert [call[1] for call in calls] == sorted(call[1] for call in calls)


def test_not_again(server: Server, tmp_path: Path) -> None:
    calls: list[Any] = []
    get(server, tmp_path)
    assert get(server, tmp_path / "cifar10", progress=lambda *call: calls.append(call)) == [tmp_path / "cifar10" / FILE]
    assert len(server.seen) == 1
    assert calls == [(FILE, len(BODY), len(BODY))]


def test_resumes_after_breaks(server: Server, tmp_path: Path) -> None:
    """More breaks than tries: only those without a new byte count."""
    server.stops = [100_000, 50_000, 1, 70_000, 5, 6, 7]
    (path,) = get(server, tmp_path)
    assert path.read_bytes() == BODY
    starts = np.cumsum([100_000, 50_000, 1, 70_000, 5, 6, 7])
    assert server.seen == [None, *(f"bytes={start}-" for start in starts)]


def test_another_process_resumes(server: Server, tmp_path: Path) -> None:
    server.stops = [120_000, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="broke off after 120,000 of 300,000"):
        get(server, tmp_path)
    part = tmp_path / "cifar10" / (FILE + ".part")
    assert part.read_bytes() == BODY[:120_000]
    assert not part.with_suffix("").exists()
    server.stops, server.seen = [], []
    assert get(server, tmp_path)[0].read_bytes() == BODY
    assert server.seen == ["bytes=120000-"]
    assert not part.exists()


def test_server_that_ignores_ranges(server: Server, tmp_path: Path) -> None:
    calls: list[Any] = []
    server.ranges, server.stops = False, [100_000, 200_000]
    assert get(server, tmp_path, progress=lambda *call: calls.append(call))[0].read_bytes() == BODY
    assert calls[-1] == (FILE, len(BODY), len(BODY))


def test_server_without_lengths(server: Server, tmp_path: Path) -> None:
    totals: list[Any] = []
    server.length = False
    assert get(server, tmp_path, progress=lambda *call: totals.append(call[2]))[0].read_bytes() == BODY
    assert set(totals) == {None}


@pytest.mark.parametrize("size", [1000, len(BODY), len(BODY) + 5])
def test_part_of_something_else(size: int, server: Server, tmp_path: Path) -> None:
    part = tmp_path / "cifar10" / (FILE + ".part")
    part.parent.mkdir()
    part.write_bytes(bytes(size))
    assert get(server, tmp_path)[0].read_bytes() == BODY
    assert not part.exists()


def test_part_that_is_complete(server: Server, tmp_path: Path) -> None:
    part = tmp_path / "cifar10" / (FILE + ".part")
    part.parent.mkdir()
    part.write_bytes(BODY)
    assert get(server, tmp_path)[0].read_bytes() == BODY


def test_wrong_checksum_keeps_nothing(server: Server, tmp_path: Path) -> None:
    server.body = BODY[:-1] + b"x"
    with pytest.raises(ValueError, match=r"has the md5 .*, the official file's is .*put the file cifar-10-python"):
        get(server, tmp_path)
    assert not list((tmp_path / "cifar10").iterdir())


def test_wrong_file_in_place_is_left(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "cifar10" / FILE
    path.parent.mkdir()
    path.write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"its md5 is .* remove it"):
        get(server, tmp_path)
    assert path.read_bytes() == b"mine"
    assert not server.seen


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (403, 1), (503, download.TRIES)])
def test_refusals(status: int, requests: int, server: Server, tmp_path: Path) -> None:
    server.status = status
    with pytest.raises(ValueError, match="cannot be fetched"):
        get(server, tmp_path)
    assert len(server.seen) == requests


def test_offline_says_which_file_to_put_where(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(ValueError, match="cannot be fetched") as error:
            fetch("fashion-mnist", tmp_path, base_url=url, wait=0.001)
    message = str(error.value)
    assert "put the file train-images-idx3-ubyte.gz (md5 8d4fb7e6c68d591d4c3dfef9ec88bf0d)" in message
    assert str(tmp_path / "fashion-mnist") in message


def test_too_large(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LARGEST", 1000)
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        get(server, tmp_path)


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be made"):
        fetch("cifar10", tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "match"),
    [("digits", "embedded"), ("folder:x", "your own"), ("a:b", "your own"), ("cifar", "did you mean 'cifar10'")],
)
def test_names_without_a_download(name: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        fetch(name, tmp_path)


def test_what_was_fetched_loads(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = images("cifar10")
    write_python(tmp_path / "server", made, packed=True)
    server.body = (tmp_path / "server" / FILE).read_bytes()
    known = replace(OFFICIAL["cifar10"], md5={FILE: hashlib.md5(server.body).hexdigest()})
    monkeypatch.setitem(OFFICIAL, "cifar10", known)
    server.stops = [10_000]
    get(server, tmp_path)
    assert np.array_equal(load("cifar10", tmp_path).train.x.numpy(), made.train_x)


def test_official_addresses() -> None:
    for known in OFFICIAL.values():
        assert known.base_url.startswith("https://")
        assert set(known.fetched) <= set(known.md5)
        assert all(len(value) == 32 for value in known.md5.values())
