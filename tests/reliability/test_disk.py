"""A disk that is full, fails or cannot be written to: one clear line, and the folder resumes when it is mended."""

import errno
import os
import shutil
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Case, References, flags, result, small
from instrument import NEEDS_SPACE, Plan
from processes import fedlesam

from fedlesam.runs import costs
from fedlesam.runs.build import build
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.overview import size_of

SETUPS: dict[str, dict[str, Any]] = {
    "one worker": {"memory": 5_000},
    "two workers": {"workers": 2},
    "pinned": {"workers": 2, "store": "pinned", "memory": 0},
}


def calls(labels: list[str]) -> list[tuple[str, int]]:
    """The calls that can fail in the second commit and before it, and which occurrence of its label each is."""
    start, end = labels.index("committed 1"), labels.index("committed 2")
    found = {}
    for number, label in enumerate(labels[start:end], start):
        if label.startswith(("before", "half")):
            found[label] = 1 + sum(label in other for other in labels[:number])
    return list(found.items())


def check_fails_well(case: Case, plan: Plan, expected: Any) -> None:
    """An error that is said, or none at all where it does no harm; then the run can be finished."""
    ended = case.attempt(plan)
    assert ended.code in (0, 2), (plan, case.error)
    if ended.code == 2:
        assert not case.finished
        assert os.strerror(plan.errno) in case.error
        assert "\n" not in case.error
        ended = case.attempt()
        assert ended.code == 0, (plan, case.error)
    assert result(case.run) == expected, plan


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
@pytest.mark.parametrize("setup", ["one worker", "pinned"])
def test_every_call_fails_once(setup: str, part: int, references: References, tmp_path: Path) -> None:
    """The dangerous kind: the next call works again, so a run may go on with half of a change."""
    config = small("fedlesam-s", rounds=3, keep=1, **SETUPS[setup])
    expected, first = references(config), Case(tmp_path / "first", config)
    assert first.attempt().code == 0
    found = calls(first.labels())
    assert {label.split()[1] for label, _ in found} >= {
        "save_file",
        "write_parts",
        "replace",
        "fsync",
        "write_text",
        "unlink",
    }
    every = 4 if setup == "one worker" else 8
    for label, nth in found[part::every]:
        number = errno.ENOSPC if label.split()[1] in NEEDS_SPACE else errno.EIO
        case = Case(tmp_path / label.replace("/", "_"), config)
        check_fails_well(case, Plan(label, nth, do="fail", errno=number), expected)


@pytest.mark.parametrize("setup", SETUPS)
def test_the_disk_is_full_from_some_call_on(setup: str, references: References, tmp_path: Path) -> None:
    config = small("fedsmoo", rounds=3, **SETUPS[setup])
    expected, first = references(config), Case(tmp_path / "first", config)
    assert first.attempt().code == 0
    found = [(label, nth) for label, nth in calls(first.labels()) if label.split()[1] in NEEDS_SPACE]
    for label, nth in found[:: max(1, len(found) // 5)]:
        case = Case(tmp_path / label.replace("/", "_"), config)
        check_fails_well(case, Plan(label, nth, do="full"), expected)


@pytest.mark.parametrize("setup", ["two workers", "pinned"])
def test_a_worker_finds_the_disk_full(setup: str, references: References, tmp_path: Path) -> None:
    config = small("fedsmoo", rounds=3, **SETUPS[setup])
    case = Case(tmp_path, config)
    plan = Plan("half save_file", 2, "worker", "full")
    assert case.attempt(plan).code == 2
    assert os.strerror(errno.ENOSPC) in case.error
    assert case.attempt().code == 0, case.error
    assert result(case.run) == references(config)


def test_a_worker_cannot_take_up_its_clients(references: References, tmp_path: Path) -> None:
    """Pinned memories go from the checkpoint to the workers' folders when a run goes on."""
    config = small("fedsmoo", **SETUPS["pinned"])
    case = Case(tmp_path, config)
    assert case.attempt(Plan("committed 4")).killed
    assert case.attempt(Plan("replace memory/worker1", 1, "worker", "full")).code == 2
    assert os.strerror(errno.ENOSPC) in case.error
    assert case.attempt().code == 0, case.error
    assert case.loaded == 4
    assert result(case.run) == references(config)


@pytest.mark.parametrize("nth", [1, 5])
@pytest.mark.parametrize(
    "setup", [{"memory": 0}, {"workers": 2}, {"memory": 0, "workers": 2, "store": "pinned"}], ids=str
)
def test_what_is_old_cannot_be_deleted(nth: int, setup: dict[str, Any], references: References, tmp_path: Path) -> None:
    """In the commit of a round, of which no half may come into a checkpoint."""
    config = small("fedsmoo", checkpoint_every="1h", **setup)
    case = Case(tmp_path, config)
    check_fails_well(case, Plan("before unlink memory/", nth, do="fail", errno=errno.EIO), references(config))


def test_what_a_run_has_on_disk_counts_when_it_goes_on(
    references: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There need be room for the rest of it, not for all of it once more."""
    config = small("fedsmoo")
    case = Case(tmp_path, config)
    assert case.attempt(Plan("committed 5")).killed
    predicted = costs.predict(config, build(config).federation)
    taken = size_of(case.run / "checkpoints")
    assert taken > predicted.checkpoint / 2
    least = predicted.disk + predicted.checkpoints - taken
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=least - 1))
    assert case.attempt().code == 2
    assert "choose another --out" in case.error
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=least))
    assert case.attempt().code == 0, case.error
    assert case.loaded == 5
    assert result(case.run) == references(config)


# Real ones


class Disk:
    """A small file system in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, *options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr.strip())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    made = Disk(path)
    try:
        made.mount("size=1m")
    except OSError as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")
    yield made
    subprocess.run(["umount", "-l", str(path)], capture_output=True)


@pytest.mark.parametrize("setup", SETUPS)
def test_a_full_disk(setup: str, disk: Disk, references: References, tmp_path: Path) -> None:
    config = small("fedsmoo", model="faulty:Net", **SETUPS[setup])
    run, filler = disk.path / "run", disk.path / "filler"
    command = ["run", *flags(config), "--out", str(run), "-q"]
    code, out, err = fedlesam(tmp_path, *command, FAULT="fill 20", FILL=str(filler)).wait()
    assert filler.exists()
    assert code == 2, err
    assert out == ""
    errors = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1, err
    assert errors[0].startswith("error: ")
    assert "No space left on device" in errors[0] or "no space is left" in errors[0]
    filler.unlink()
    code, _, err = fedlesam(tmp_path, *command).wait()
    assert code == 0, err
    assert result(run) == references(config)


def test_a_read_only_folder(disk: Disk, references: References, tmp_path: Path) -> None:
    """A new run, and one to go on with."""
    config = small("fedsmoo", model="faulty:Net")
    run = disk.path / "run"
    command = ["run", *flags(config), "--out", str(run), "-q"]
    assert fedlesam(tmp_path, *command, FAULT="SIGINT 40").wait()[0] == 130
    done = len(RunFolder(run).read_metrics())
    disk.mount("remount", "ro")
    for folder in (run, disk.path / "new"):
        code, out, err = fedlesam(tmp_path, *command[:-3], "--out", str(folder), "-q").wait()
        assert (code, out) == (2, ""), err
        assert err.startswith("error: ")
        assert "Read-only file system" in err
        assert str(folder) in err
        assert len(err.splitlines()) == 1
    disk.mount("remount", "rw")
    assert len(RunFolder(run).read_metrics()) == done
    assert fedlesam(tmp_path, *command).wait()[0] == 0
    assert result(run) == references(config)
