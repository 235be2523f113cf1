"""`fedlesam watch`: a live page from a server that only this machine reaches and that only reads."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_runs import fake_run

from fedlesam.report.watch import LivePage, Server


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def server(runs: Path) -> Iterator[Server]:
    with Server(LivePage([runs]), port=None) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def get(server: Server, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_follows_the_folders(server: Server, runs: Path) -> None:
    status, waiting = get(server, "/")
    assert status == 200 and "holds none" in waiting
    _, empty = get(server, "/state")
    fake_run(runs / "a", "fedavg", rounds=3, finished=False)
    _, one = get(server, "/state")
    assert one != empty
    _, page = get(server, "/")
    assert f'data-state="{one}"' in page and "fedavg" in page and "fedsam" not in page
    fake_run(runs / "b", "fedsam", rounds=3)
    assert get(server, "/state")[1] != one and "fedsam" in get(server, "/")[1]


def test_a_run_without_an_evaluation_is_waited_for(server: Server, runs: Path) -> None:
    folder = fake_run(runs / "a", "fedavg", rounds=1, finished=False)
    (folder / "metrics.jsonl").write_text("")
    assert "none has been evaluated yet" in get(server, "/")[1]


def test_runs_that_cannot_be_compared_are_refused_on_the_page(server: Server, runs: Path) -> None:
    fake_run(runs / "a", "fedavg", rounds=2)
    fake_run(runs / "b", "fedavg", rounds=2, data="cifar10")
    status, page = get(server, "/")
    assert status == 200 and "No charts yet" in page and "cifar10" in page


def test_only_this_machine_and_only_to_read(server: Server, runs: Path) -> None:
    fake_run(runs / "a", "fedavg", rounds=2)
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/", host="evil.example")[0] == 403
    assert get(server, "/../../etc/passwd")[0] == 404 and get(server, "/a/config.toml")[0] == 404
    assert get(server, "/", method="POST")[0] == 501


def test_a_port_that_is_taken(runs: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} cannot be used"):
            Server(LivePage([runs]), port)


def test_ctrl_c_stops_it(runs: Path) -> None:
    command = [sys.executable, "-u", "-m", "fedlesam", "watch", str(runs)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    assert process.communicate()[0] == "stopped\n" and process.returncode == 0


def test_a_folder_that_is_not_there_yet_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from fedlesam.cli.watch_command import command
    from fedlesam.report import watch

    monkeypatch.setattr(watch.Server, "serve_forever", lambda self: None)
    (tmp_path / "there").mkdir()
    shown = CliRunner().invoke(command, [str(tmp_path / "there"), str(tmp_path / "nothing")]).output
    assert f"{tmp_path / 'nothing'}: does not exist yet" in shown and f"{tmp_path / 'there'}:" not in shown
