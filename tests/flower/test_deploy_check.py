"""fedlesam deploy check: what it says about apps, connections and SuperLinks."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")

from machines import APP, Deployment, environment, free_port

from fedlesam.cli import cli
from fedlesam.flower.app import App, read_app
from fedlesam.flower.check import (
    Connection,
    check_app,
    check_connection,
    check_environment,
    check_nodes,
    read_connection,
)
from fedlesam.flower.keys import make_keys

pytestmark = pytest.mark.extras


def levels(findings: Any, text: str) -> list[str]:
    return [finding.level for finding in findings if text in finding.text]


def write_app(folder: Path, config: str = "", components: str = "") -> App:
    folder.mkdir(exist_ok=True)
    components = components or 'serverapp = "app:server"\nclientapp = "app:client"'
    tables = {"": 'publisher = "x"', ".components": components, ".config": config}
    text = "\n".join(f"[tool.flwr.app{name}]\n{lines}" for name, lines in tables.items())
    (folder / "pyproject.toml").write_text(text)
    (folder / "app.py").touch()
    return read_app(folder)


def test_the_example_is_in_order() -> None:
    found = list(check_app(read_app(APP)))
    assert {finding.level for finding in found} <= {"ok", "note"}
    assert levels(found, "folder is empty") == ["note"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('algorithm = "fedlesan"', "did you mean 'fedlesam'"),
        ('folder = "here"', "must be a full path"),
        ("clients = 3\nminimum = 5", "no round can end"),
    ],
)
def test_settings_that_cannot_work(config: str, says: str, tmp_path: Path) -> None:
    assert levels(check_app(write_app(tmp_path, config)), says) == ["missing"]


def test_an_app_without_its_parts(tmp_path: Path) -> None:
    found = list(check_app(write_app(tmp_path, components='serverapp = "gone:app"')))
    assert levels(found, "serverapp") == ["missing"]
    assert levels(found, "clientapp") == ["missing"]
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(ValueError, match=r"no \[tool.flwr.app\]"):
        read_app(tmp_path)


def test_private_keys_in_the_app(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    key = app.folder / "keys" / "node0"
    key.parent.mkdir()
    key.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    key.chmod(0o644)
    assert levels(check_app(app), str(key)) == ["insecure", "insecure"]
    key.chmod(0o600)
    assert levels(check_app(app), str(key)) == ["insecure"]


@pytest.mark.parametrize(
    ("config", "online", "level", "says"),
    [
        ("clients = 3", 2, "missing", "start the others"),
        ("clients = 3", 3, "ok", "one for each of 3 clients"),
        ("clients = 3", 4, "note", "partition-id 0 to 2 are used"),
        ("", 0, "missing", "0 SuperNodes are connected"),
        ("", 1, "ok", "1 SuperNode is connected"),
    ],
)
def test_connected_nodes_against_clients(config: str, online: int, level: str, says: str, tmp_path: Path) -> None:
    found = check_nodes(online, write_app(tmp_path, config))
    assert found.level == level
    assert says in found.text


def test_what_the_environment_leaves_on() -> None:
    assert len(list(check_environment({}))) == 2
    off = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
    assert not list(check_environment(off))


def test_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert levels(read_connection(None), "knows no SuperLink") == ["missing"]
    text = """
[superlink]
default = "far"
[superlink.far]
address = "example.org:8000"
insecure = true
[superlink.signed]
address = "example.org:8000"
root-certificates = "gone.crt"
[superlink.bad]
address = "example.org"
[superlink.sim]
address = ":local:"
"""
    (tmp_path / "config.toml").write_text(text)

    def connection(name: str | None) -> Connection:
        (found,) = read_connection(name)
        assert isinstance(found, Connection)
        return found

    assert levels(check_connection(connection(None)), "in the clear") == ["insecure"]
    assert levels(check_connection(connection("signed")), "gone.crt") == ["missing"]
    assert levels(read_connection("bad"), "must be host:port") == ["missing"]
    assert levels(read_connection("sim"), "simulation") == ["note"]
    with pytest.raises(ValueError, match="did you mean 'signed'"):
        list(read_connection("signd"))


def run_check(home: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[int, list[dict[str, str]]]:
    for key, value in environment(home).items():
        monkeypatch.setenv(key, value)
    done = CliRunner().invoke(cli, ["deploy", "check", str(APP), "--json", *more], standalone_mode=False)
    assert done.exception is None, done.output
    return int(done.return_value), json.loads(done.output)


def said(found: list[dict[str, str]], text: str) -> list[str]:
    return [finding["level"] for finding in found if text in finding["text"]]


def write_connection(home: Path, port: int, security: str) -> None:
    home.mkdir(exist_ok=True)
    text = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n{security}\n'
    (home / "config.toml").write_text(text)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("secure")) as running:
        running.superlink()
        yield running


def test_a_secure_superlink(secure: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = run_check(secure.folder / "cli-home", monkeypatch)
    assert said(found, "a SuperNode with an unknown key is refused") == ["ok"]
    assert said(found, "whoever reaches this port can start runs") == ["note"], "on loopback; elsewhere it is insecure"
    assert said(found, "0 SuperNodes are connected, the app has 3 clients") == ["missing"]
    assert said(found, "renew it") == ["missing"], "the certificate of this test is good for two days"
    assert code == 1
    assert secure.nodes() == [], "nothing is left of the question"


def test_another_authority(secure: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_keys(tmp_path / "keys", [], 0, days=2)
    write_connection(tmp_path / "home", secure.port, f'root-certificates = "{tmp_path / "keys" / "ca.crt"}"')
    code, found = run_check(tmp_path / "home", monkeypatch)
    assert said(found, "its certificate is not accepted") == ["insecure"]
    assert code == 1


def test_an_insecure_superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Deployment(tmp_path, secure=False) as running:
        running.superlink()
        code, found = run_check(tmp_path / "cli-home", monkeypatch)
        assert said(found, "any SuperNode is accepted") == ["note"], "on loopback; elsewhere it is insecure"
        assert said(found, "no TLS") == ["note"]
        assert not any(node["status"] == "online" for node in running.nodes())
        write_connection(tmp_path / "tls", running.port, f'root-certificates = "{running.keys / "ca.crt"}"')
        code, found = run_check(tmp_path / "tls", monkeypatch)
        assert said(found, "does not speak TLS") == ["insecure"]
        assert code == 1


def test_nobody_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_connection(tmp_path, free_port(), "insecure = true")
    code, found = run_check(tmp_path, monkeypatch)
    assert said(found, "cannot be reached") == ["missing"]
    assert code == 1


def test_something_else_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not Flower's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)

        def answer() -> None:
            for _ in range(2):
                peer, _ = server.accept()
                peer.settimeout(5)
                with peer:
                    if peer.recv(65536):
                        peer.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        write_connection(tmp_path, server.getsockname()[1], "insecure = true")
        code, found = run_check(tmp_path, monkeypatch)
    assert said(found, "is refused") == []
    assert said(found, "not a SuperLink") == ["missing"]
    assert code == 1


def test_the_exit_code_of_the_program(tmp_path: Path) -> None:
    import subprocess
    import sys

    write_connection(tmp_path / "home", free_port(), "insecure = true")
    done = subprocess.run(
        [sys.executable, "-m", "fedlesam", "deploy", "check", str(APP)],
        env=environment(tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert "cannot be reached" in done.stdout
    assert "1 to mend" in done.stdout
