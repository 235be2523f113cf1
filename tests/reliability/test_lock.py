"""One process per run folder, and what `fedlesam runs` says of the runs of a folder."""

import json
import os
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import References, digits, result, small
from processes import PATIENCE, Forked, children, fedlesam, fork, wait_for

from fedlesam.federation import Record
from fedlesam.runs import runner
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.lock import holder, locked
from fedlesam.runs.overview import find_runs, read_overview
from fedlesam.runs.runner import execute


def hold(config: RunConfig, path: Path, rounds: int = 2) -> Forked:
    """A process that has trained some rounds of a run and then stays."""

    def watch(record: Record) -> None:
        while record.round + 1 == rounds:
            time.sleep(60)

    process = fork(lambda: execute(config, path, watch=watch, data=digits()))
    wait_for(lambda: len(RunFolder(path).read_metrics()) >= rounds, process)
    return process


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Forked, Path]]:
    process = hold(small("fedlesam-s"), tmp_path / "run")
    yield process, tmp_path / "run"
    if process.alive():
        process.end()


@pytest.mark.parametrize("setup", [{}, {"workers": 2}, {"workers": 2, "store": "pinned"}], ids=str)
def test_a_second_process_is_refused_and_a_killed_one_is_not_in_the_way(
    setup: dict[str, Any], references: References, tmp_path: Path
) -> None:
    config = small("fedlesam-s", **setup)
    first = hold(config, tmp_path / "run")
    try:
        before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
        with pytest.raises(ValueError, match=f"in use by process {first.pid} on {platform.node()}"):
            execute(config, tmp_path / "run", data=digits())
        with pytest.raises(ValueError, match="in use"):
            execute(small("fedavg"), tmp_path / "run", data=digits(), overwrite=True)
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
        workers = children(first.pid)
        assert len(workers) == setup.get("workers", 1) - 1
        for worker in workers:
            assert not any(path.endswith("run.lock") for path in open_files(worker)), "a worker holds no lock"
        assert any(path.endswith("run.lock") for path in open_files(first.pid))
        os.kill(first.pid, signal.SIGKILL)
        execute(config, tmp_path / "run", data=digits())
    finally:
        first.end()
    assert result(tmp_path / "run") == references(config)


def open_files(pid: int) -> list[str]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(path.readlink()))
        except FileNotFoundError:
            continue
    return found


def test_the_command_says_who(held: tuple[Forked, Path], tmp_path: Path) -> None:
    first, path = held
    config = str(path / "config.toml")
    code, _, err = fedlesam(tmp_path / "second", "run", "--config", config, "--out", str(path)).wait()
    assert code == 2
    assert f"error: {path}: is in use by process {first.pid}" in err
    assert "Traceback" not in err
    assert first.alive()


def test_two_processes_that_begin_at_once(references: References, tmp_path: Path) -> None:
    """The second one looked when the folder was not there, and has its data ready when the first is training."""
    config, path = small("fedlesam-s"), tmp_path / "run"
    real = runner.build

    def build(*args: Any, **kwargs: Any) -> Any:
        experiment = real(*args, **kwargs)
        (tmp_path / "built").touch()
        wait_for((tmp_path / "go").exists)
        return experiment

    def second() -> None:
        runner.build = build
        try:
            execute(config, path, data=digits())
        except ValueError as error:
            (tmp_path / "said").write_text(str(error))
            os._exit(2)

    late = fork(second)
    wait_for((tmp_path / "built").exists, late)
    first = hold(config, path)
    try:
        before = (path / "metrics.jsonl").read_bytes()
        (tmp_path / "go").touch()
        assert late.wait().code == 2
        assert f"in use by process {first.pid}" in (tmp_path / "said").read_text()
        assert (path / "metrics.jsonl").read_bytes() == before
    finally:
        first.end()
    execute(config, path, data=digits())
    assert result(path) == references(config)


def test_two_processes_that_begin_at_once_and_the_first_is_done(references: References, tmp_path: Path) -> None:
    """The second one gets the lock, but the folder is not what it looked at."""
    config, path, real = small("fedlesam-s"), tmp_path / "run", runner.build

    def build(*args: Any, **kwargs: Any) -> Any:
        experiment = real(*args, **kwargs)
        assert fork(lambda: execute(config, path, data=digits())).wait().code == 0
        return experiment

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "build", lambda *a, **k: patch.undo() or build(*a, **k))
        with pytest.raises(ValueError, match="another process has just begun a run here"):
            execute(small("fedavg"), path, data=digits())
    assert result(path) == references(config)


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    def work() -> None:
        with locked(tmp_path):
            (tmp_path / "mark").touch()
            time.sleep(PATIENCE)

    process = fork(work)
    wait_for((tmp_path / "mark").exists, process)
    about = holder(tmp_path)
    assert about is not None
    assert about["pid"] == process.pid
    process.end()
    assert holder(tmp_path) is None
    with locked(tmp_path):
        about = holder(tmp_path)
        assert about is not None
        assert about["pid"] == os.getpid()


# The overview


def test_the_states_of_runs(held: tuple[Forked, Path], tmp_path: Path) -> None:
    process, _ = held

    def stop(error: BaseException) -> Any:
        def watch(record: Record) -> None:
            if record.round == 3:
                raise error

        return watch

    runs = tmp_path
    execute(small("fedavg"), runs / "done", data=digits())
    with pytest.raises(KeyboardInterrupt):
        execute(small("fedsmoo"), runs / "stopped by hand", watch=stop(KeyboardInterrupt()), data=digits())
    with pytest.raises(OSError, match="the disk is on fire"):
        execute(small("fedsmoo"), runs / "failed", watch=stop(OSError("the disk is on fire")), data=digits())
    killed = hold(small("fedlesam-s"), runs / "killed", 4)
    killed.end()
    (runs / "spoilt").mkdir()
    (runs / "spoilt" / "config.toml").write_bytes(b"\xff rounds = ")

    code, out, err = fedlesam(tmp_path, "runs", str(runs), "--json").wait()
    assert code == 0, err
    found = {Path(row["path"]).name: row for row in json.loads(out)}
    states = {name: (row["state"], row["round"], row["rounds"]) for name, row in found.items()}
    assert states == {
        "run": ("running", 2, 6),
        "done": ("finished", 6, 6),
        "stopped by hand": ("interrupted", 4, 6),
        "failed": ("stopped", 4, 6),
        "killed": ("interrupted", 4, 6),
        "spoilt": ("damaged", 0, 0),
    }
    for name, row in found.items():
        assert (row["checkpoint_bytes"] > 0) == (name not in ("done", "spoilt"))
        assert (row["seconds_left"] is not None) == (name == "run")
        if name != "spoilt":
            assert row["accuracy"] == RunFolder(runs / name).read_metrics()[-1]["test_accuracy"]
    assert found["run"]["seconds_left"] > 0
    assert "the disk is on fire" in found["failed"]["why"]

    code, out, err = fedlesam(tmp_path, "runs", str(runs)).wait()
    assert code == 0, err
    for words in ("running", "finished", "interrupted", "stopped: the disk is on fire", "damaged", "2/6", "kB"):
        assert words in " ".join(out.split()), out
    assert process.alive()


def test_a_run_that_goes_on_is_timed_from_there(tmp_path: Path) -> None:
    config = small("fedlesam-s")
    hold(config, tmp_path / "run", 4).end()
    again = hold(config, tmp_path / "run", 5)
    try:
        about = holder(tmp_path / "run")
        assert about is not None
        assert about["round"] == 3
        assert read_overview(RunFolder(tmp_path / "run")).seconds_left is not None
    finally:
        again.end()


def test_a_lock_that_says_nothing_yet(tmp_path: Path) -> None:
    """Between taking it and writing into it."""
    config = small("fedavg")
    execute(config, tmp_path / "run", data=digits())
    for name in ("summary.json", "run.lock"):
        (tmp_path / "run" / name).unlink()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:3]))
    with locked(tmp_path / "run"):
        (tmp_path / "run" / "run.lock").write_bytes(b"")
        (seen,) = find_runs(tmp_path)
    assert (seen.state, seen.seconds_left) == ("running", None)


def test_metrics_that_cannot_be_read_spoil_one_row_only(tmp_path: Path) -> None:
    for name in ("a", "b"):
        execute(small("fedavg", rounds=1), tmp_path / name, data=digits())
    (tmp_path / "a" / "metrics.jsonl").unlink()
    (tmp_path / "a" / "metrics.jsonl").mkdir()
    assert [run.state for run in find_runs(tmp_path)] == ["damaged", "finished"]
