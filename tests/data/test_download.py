"""Downloads from a server on this machine that breaks off, lies and refuses."""

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
from data_files import images, write_binary

from fedlesam.data import download, fetch, load
from fedlesam.data.catalogue import OFFICIAL

FILE = "cifar-10-binary.tar.gz"
BODY = np.random.default_rng(0).bytes(300_000)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    body = BODY
    stops: list[int]
    """Bytes after which each answer in turn breaks off."""
    status = 200
    length = True
    seen: list[str]

    def handle_error(self, *_: Any) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        server.seen.append(self.path)
        if server.status != 200:
            self.send_error(server.status)
            return
        self.send_response(200)
        if server.length:
            self.send_header("Content-Length", str(len(server.body)))
        self.end_headers()
        self.wfile.write(server.body[: server.stops.pop(0) if server.stops else None])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    serves(monkeypatch, BODY)
    monkeypatch.setattr("pooch.core.time.sleep", lambda _: None)
    running = Server(("127.0.0.1", 0), Handler)
    running.stops, running.seen = [], []
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


def serves(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """`body` counts as the official file."""
    known = replace(OFFICIAL["cifar10"], md5={FILE: hashlib.md5(body).hexdigest()})
    monkeypatch.setitem(OFFICIAL, "cifar10", known)


def get(server: Server, folder: Path, **options: Any) -> list[Path]:
    return fetch("cifar10", folder, base_url=f"http://127.0.0.1:{server.server_address[1]}", **options)


def test_whole(server: Server, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int | None]] = []
    (path,) = get(server, tmp_path / "new", progress=lambda *call: calls.append(call))
    assert path == tmp_path / "new" / "cifar10" / FILE
    assert path.read_bytes() == BODY
    assert [child.name for child in path.parent.iterdir()] == [FILE]
    assert server.seen == [f"/{FILE}"]
    assert {call[::2] for call in calls} == {(FILE, len(BODY))}
    assert len(calls) > 3
    assert [call[1] for call in calls] == sorted(call[1] for call in calls)
    assert calls[-1] == (FILE, len(BODY), len(BODY))


def test_not_again(server: Server, tmp_path: Path) -> None:
    calls: list[Any] = []
    get(server, tmp_path)
    assert get(server, tmp_path / "cifar10", progress=lambda *call: calls.append(call)) == [tmp_path / "cifar10" / FILE]
    assert len(server.seen) == 1
    assert calls == [(FILE, len(BODY), len(BODY))]


def test_tries_again_after_breaks(server: Server, tmp_path: Path) -> None:
    calls: list[Any] = []
    server.stops = [200_000, 0, 299_999]
    assert len(server.stops) == download.RETRIES
    (path,) = get(server, tmp_path, progress=lambda *call: calls.append(call[1]))
    assert path.read_bytes() == BODY
    assert len(server.seen) == 1 + download.RETRIES
    assert max(calls) == len(BODY)


def test_gives_up_and_keeps_nothing(server: Server, tmp_path: Path) -> None:
    server.stops = [100_000] * 9
    with pytest.raises(ValueError, match="cannot be fetched"):
        get(server, tmp_path)
    assert len(server.seen) == 1 + download.RETRIES
    assert not list((tmp_path / "cifar10").iterdir())
    server.stops = []
    assert get(server, tmp_path)[0].read_bytes() == BODY


def test_server_without_lengths(server: Server, tmp_path: Path) -> None:
    """A short answer is found by its checksum."""
    totals: list[Any] = []
    server.length, server.stops = False, [100_000]
    assert get(server, tmp_path, progress=lambda *call: totals.append(call[2]))[0].read_bytes() == BODY
    assert set(totals[:-1]) == {None}


@pytest.mark.parametrize("body", [b"", b"<html>not found</html>", BODY[:-1] + b"x", BODY + b"x"])
def test_wrong_contents_are_not_kept(body: bytes, server: Server, tmp_path: Path) -> None:
    server.body = body
    with pytest.raises(ValueError, match=r"(?s)cannot be fetched .*hash") as error:
        get(server, tmp_path)
    assert hashlib.md5(BODY).hexdigest() in str(error.value)
    assert not list((tmp_path / "cifar10").iterdir())


def test_another_file_in_the_way_is_left_alone(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "cifar10" / FILE
    path.parent.mkdir()
    path.write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"is not the official file .* remove it"):
        get(server, tmp_path)
    assert path.read_bytes() == b"mine"
    assert not server.seen


@pytest.mark.parametrize("status", [403, 404, 503])
def test_refusals(status: int, server: Server, tmp_path: Path) -> None:
    server.status = status
    with pytest.raises(ValueError, match=f"cannot be fetched .*{status}"):
        get(server, tmp_path)
    assert not list((tmp_path / "cifar10").iterdir())


def test_offline_says_which_file_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.core.time.sleep", lambda _: None)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(ValueError, match="cannot be fetched") as error:
            fetch("fashion-mnist", tmp_path, base_url=url)
    message = str(error.value)
    assert "put the file train-images-idx3-ubyte.gz (md5 8d4fb7e6c68d591d4c3dfef9ec88bf0d)" in message
    assert str(tmp_path / "fashion-mnist") in message


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cifar10: cannot be made"):
        fetch("cifar10", tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("digits", "part of the package"),
        ("folder:x", "your own"),
        ("a:b", "your own"),
        ("cifar", "did you mean 'cifar10'"),
    ],
)
def test_names_without_a_download(name: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        fetch(name, tmp_path)


def test_what_was_fetched_loads(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = images("cifar10")
    write_binary(tmp_path / "server", made, packed=True)
    server.body = (tmp_path / "server" / FILE).read_bytes()
    serves(monkeypatch, server.body)
    server.stops = [10_000]
    get(server, tmp_path)
    assert np.array_equal(load("cifar10", tmp_path).train.x.numpy(), made.train_x)


def test_official_addresses() -> None:
    for known in OFFICIAL.values():
        assert known.base_url.startswith("https://")
        assert set(known.fetched) <= set(known.md5)
        assert all(len(value) == 32 for value in known.md5.values())
