"""fedlesam deploy try: real processes, which are gone afterwards whatever happens."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")

from flwr.app import Context, RecordDict
from flwr.cli.config_utils import load_and_validate
from local_grid import LocalGrid
from machines import APP, environment, wait

from fedlesam.flower.app import read_app
from fedlesam.flower.trial import Trial

pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for left-over processes in /proc"),
]


class Trying:
    """`fedlesam deploy try` as a process, its temporary folder in a place of its own."""

    def __init__(self, place: Path, *arguments: str) -> None:
        self.place, self.temporary, self.log = place, place / "tmp", place / "said"
        self.temporary.mkdir()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedlesam", "deploy", "try", *arguments],
                env={**environment(place / "home"), "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text()

    def running(self) -> dict[int, str]:
        """The living processes that it started, by what only they are given."""
        found = {}
        for entry in (entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
            try:
                told = (entry / "environ").read_bytes()
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if f"TMPDIR={self.temporary}".encode() not in told.split(b"\0") or int(entry.name) == self.process.pid:
                del found[int(entry.name)]
        return found

    def find(self, program: str) -> int | None:
        return next((pid for pid, command in self.running().items() if program in command), None)

    def wait_for(self, program: str) -> int:
        wait(program, lambda: self.find(program) or self.process.poll() is not None)
        assert self.process.poll() is None, self.said()
        return self.find(program) or 0

    def kept(self) -> list[str]:
        return sorted(path.name for folder in self.temporary.iterdir() for path in folder.iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    mark = f"TMPDIR={tmp_path / 'tmp'}".encode()
    for entry in (entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


def test_the_example_from_start_to_end(place: Path) -> None:
    """Every process that listens does so on this machine only."""
    trying = Trying(place, str(APP), "--nodes", "2", "--rounds", "2", "--run-config", 'algorithm="fedsmoo"')
    trying.wait_for("flwr-serverapp")
    ports = set(re.findall(r"--port (\d+)", " ".join(trying.running().values())))
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    hosts = {f[1].split(":")[0] for f in listening if f[3] == "0A" and str(int(f[1].split(":")[1], 16)) in ports}
    assert hosts == {"0100007F"}, "127.0.0.1, written backwards"
    assert trying.process.wait(600) == 0, trying.said()
    assert "CorrectedAscent" in trying.said()
    assert "2 clients, 2 active" in trying.said()
    assert float(re.findall(r"after round 2: .*test-accuracy ([0-9.]+)", trying.said())[0]) > 0.3
    assert trying.running() == {}
    assert list(trying.temporary.iterdir()) == [], "neither keys nor logs"
    assert not (APP / "keys").exists()


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything(how: signal.Signals, code: int, place: Path) -> None:
    trying = Trying(place, str(APP))
    trying.wait_for("flower-supernode")
    trying.process.send_signal(how)
    assert trying.process.wait(60) == code, trying.said()
    assert trying.running() == {}
    assert "keys" not in trying.kept()
    assert "superlink.log" in trying.kept()


def test_one_that_dies_stops_the_others(place: Path) -> None:
    trying = Trying(place, str(APP))
    os.kill(trying.wait_for("partition-id=1"), signal.SIGKILL)
    assert trying.process.wait(60) == 4, trying.said()
    assert "node1 was killed by SIGKILL" in trying.said()
    assert trying.running() == {}
    assert "keys" not in trying.kept()


def test_killed_itself_it_leaves_no_process(place: Path) -> None:
    trying = Trying(place, str(APP))
    trying.wait_for("flower-supernode")
    trying.process.kill()
    trying.process.wait(15)
    wait("the others to end", lambda: not trying.running(), 60)


def test_a_run_that_fails_is_said(place: Path) -> None:
    trying = Trying(place, str(APP), "--nodes", "1", "--run-config", 'model="no-such-model"')
    assert trying.process.wait(600) == 1, trying.said()
    assert "unknown model 'no-such-model'" in trying.said()
    assert "the run ended as finished:failed" in trying.said()
    assert trying.running() == {}


def test_the_app_that_is_part_of_the_package(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from fedlesam.flower import sample

    sample.write_sample(tmp_path)
    assert load_and_validate(tmp_path / "pyproject.toml")[1] == [], "Flower has nothing to say about it"
    config = {**read_app(tmp_path).config, "rounds": 2}
    with caplog.at_level("INFO", logger="flwr"):
        sample.server(LocalGrid(sample.client, 3, config), Context(1, 0, {}, RecordDict(), config))
    assert float(re.findall(r"after round 2: .*test-accuracy ([0-9.]+)", caplog.text)[0]) > 0.5


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = tmp_path / "app"
    shutil.copytree(APP, app)
    pyproject = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(pyproject.replace("rounds = 5", "epochs-of-all = 5"))
    with pytest.raises(ValueError, match="none of rounds, num-server-rounds"):
        Trial(read_app(app), print, rounds=3)
    (app / "flower_cifar" / "client_app.py").unlink()
    with pytest.raises(ValueError, match=r"clientapp is 'flower_cifar.client_app:app', and there is no such file"):
        Trial(read_app(app), print)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ValueError, match=r"flower-superlink, flower-supernode cannot be found: pip install 'fedlesam\["
    ):
        Trial(read_app(APP), print)
