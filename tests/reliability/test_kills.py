"""SIGKILL and power loss at chosen instants of a run, resumed, compared bit for bit with the uninterrupted run.

Instants are labels of harness.py: a phase of a call, and the file it is about. `make torture` draws a thousand.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from harness import Case, References, digits, inside, result, small
from instrument import Plan
from power_loss import Loss
from processes import fork
from worlds import slow_unless

from fedlesam.core import disk
from fedlesam.runs import runner
from fedlesam.runs.folder import RunFolder

METHODS = ("fedlesam-s", "fedsmoo", "fedadam")
SETUPS: dict[str, dict[str, Any]] = {
    "one worker": {"memory": 8_000},
    "two workers": {"workers": 2, "checkpoint_every": 2},
    "pinned": {"workers": 2, "store": "pinned", "memory": 0},
}

INSTANTS: list[tuple[Plan, Loss]] = [
    (Plan("step", 25), "nothing"),
    (Plan("half save_file", 6), "all"),
    (Plan("before fsync checkpoints/.round000004.json", 1), "all"),
    (Plan("half write_text checkpoints/.round000004.json", 1), "nothing"),
    (Plan("after replace checkpoints/round000004.safetensors", 1), "all"),
    (Plan("after replace checkpoints/round000004.json", 1), "some"),
    (Plan("half pwrite metrics.jsonl", 5), "nothing"),
    (Plan("after unlink checkpoints/", 1), "some"),
]
"""For all methods. A checkpoint of round 4 is written whether one is due every round or every second."""

MEMORIES: dict[str, list[tuple[Plan, Loss]]] = {
    "one worker": [
        (Plan("half save_file memory/.round000003-client", 1), "nothing"),
        (Plan("half write_parts checkpoints/clients/.round000004-segment", 1), "all"),
        (Plan("after replace checkpoints/clients/round000004-segment", 1), "some"),
    ],
    "two workers": [
        (Plan("half save_file memory/.round000003-client", 1), "nothing"),
        (Plan("half save_file memory/.round000002-client", 1, "worker"), "nothing"),
        (Plan("after replace checkpoints/clients/round000004-segment0", 1), "all"),
    ],
    "pinned": [
        (Plan("half save_file memory/worker1/.round000002-client", 1, "worker"), "nothing"),
        (Plan("after fsync checkpoints/clients/.round000003-segment1", 1, "worker"), "all"),
        (Plan("after replace checkpoints/clients/round000004-segment0", 1), "some"),
    ],
}
"""While a client's memory is being written, for methods with one."""

CASES = [
    pytest.param(
        *(method, setup, plan, loss),
        id=f"{method}-{setup}-{plan.role}-{plan.pattern}-{loss}",
        marks=slow_unless(method == "fedlesam-s" or setup == "pinned"),
    )
    for method in METHODS
    for setup in SETUPS
    for plan, loss in INSTANTS[:: 1 if setup == "one worker" else 2] + (MEMORIES[setup] if method != "fedadam" else [])
    if setup != "pinned" or method == "fedsmoo"
]


def test_there_are_enough() -> None:
    assert len(CASES) >= 30


@pytest.mark.parametrize(("method", "setup", "plan", "loss"), CASES)
def test_a_killed_run_resumes_exactly(
    method: str, setup: str, plan: Plan, loss: Loss, references: References, tmp_path: Path
) -> None:
    case = Case(tmp_path, small(method, **SETUPS[setup]))
    expected = references(case.config)
    ended = case.attempt(plan)
    assert ended.killed, "by SIGKILL"
    assert "step" in case.labels()
    assert plan.pattern in case.labels(plan.role)[-1]
    assert not case.finished, "strictly inside the run"
    assert len(RunFolder(case.run).read_metrics()) < case.config.rounds
    case.lose_power(loss)
    check_resumes(case, expected)


def check_resumes(case: Case, expected: Any) -> None:
    ended = case.attempt()
    assert ended.code == 0, case.error
    assert result(case.run) == expected


# Every call of a commit


def commit_of(labels: list[str], round: int) -> list[str]:
    """All that happens to the disk between two commits, each label once; after a call is before the next one."""
    start, end = labels.index(f"committed {round - 1}"), labels.index(f"committed {round}")
    return list(
        dict.fromkeys(label for label in labels[start + 1 : end + 1] if not label.startswith(("step", "after")))
    )


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_every_call_of_a_commit(part: int, references: References, tmp_path: Path) -> None:
    """Memory partly in RAM and partly in files; a third each with nothing, all and some of the unsynced lost."""
    config = small("fedlesam-s", memory=5_000, rounds=4, keep=1)
    expected, first = references(config), Case(tmp_path / "first", config)
    assert first.attempt().code == 0
    labels = commit_of(first.labels(), 3)
    calls = {"pwrite", "save_file", "write_parts", "replace", "fsync", "write_text", "unlink"}
    assert {label.split()[1] for label in labels} >= calls
    assert len(labels) > 35
    for number, label in enumerate(labels):
        if number % 4 != part:
            continue
        case = Case(tmp_path / str(number), config)
        nth = 1 + sum(label in other for other in first.labels()[: first.labels().index("committed 2")])
        assert case.attempt(Plan(label, nth)).killed, label
        assert not case.finished
        case.lose_power(("nothing", "all", "some")[number // 4 % 3])
        check_resumes(case, expected)


def test_again_and_again(references: References, tmp_path: Path) -> None:
    """A machine that fails once a round, in turn in every way, also while it resumes."""
    config = small("fedsmoo", workers=2)
    case, losses = Case(tmp_path, config), ("nothing", "all", "some")
    plans = [Plan("after unlink", 2), Plan("committed", 1), Plan("step", 6, "worker"), Plan("half save_file", 2)]
    kills = 0
    for loss in losses * 2:
        for plan in plans:
            kills += case.attempt(plan).killed
            case.lose_power(loss)
    assert kills >= 6
    check_resumes(case, references(config))


@pytest.mark.parametrize("pattern", ["before fsync run", "half save_file", "after create metrics", "step"])
def test_killed_before_the_first_round_is_done(pattern: str, references: References, tmp_path: Path) -> None:
    config = small("fedlesam-s")
    case = Case(tmp_path, config)
    assert case.attempt(Plan(pattern, 1)).killed
    case.lose_power("some")
    check_resumes(case, references(config))


@pytest.mark.parametrize("pattern", ["before fsync .summary", "after replace summary", "after unlink", "after rmdir"])
def test_killed_while_it_closes(pattern: str, references: References, tmp_path: Path) -> None:
    config = small("fedlesam-s", memory=0)
    case = Case(tmp_path, config)
    last = {"after unlink": "after unlink checkpoints/round000005.json"}.get(pattern, pattern)
    assert case.attempt(Plan(last, 1)).killed
    check_resumes(case, references(config))


def test_killed_while_it_closes_and_again_while_it_cleans_up(references: References, tmp_path: Path) -> None:
    """That the run is finished was not lasting when the second process began to delete its checkpoints."""
    config = small("fedlesam-s")
    case = Case(tmp_path, config)
    assert case.attempt(Plan("after replace summary.json")).killed
    case.lose_power("nothing")
    assert case.attempt(Plan("after unlink checkpoints/", 3)).killed
    labels = case.labels()
    assert "after fsync run" in labels[: labels.index("before open checkpoints")], "so it is made lasting first"
    case.lose_power("some")
    check_resumes(case, references(config))


def test_killed_while_it_closes_a_run_is_extended(references: References, tmp_path: Path) -> None:
    """What a finished run keeps is whole, whenever the process that finished it died."""
    for number, place in enumerate(("after replace summary.json", "before replace summary.json")):
        case = Case(tmp_path / str(number), small("fedlesam-s", rounds=4, keep_last=True))
        assert case.attempt(Plan(place)).killed
        longer = small("fedlesam-s", rounds=6, keep_last=True)
        assert case.attempt(config=longer).code == 0
        found, expected = result(case.run), references(small("fedlesam-s", rounds=6))
        assert (found.metrics, found.model) == (expected.metrics, expected.model)


# Power loss


def test_a_finished_run_is_lasting(references: References, tmp_path: Path) -> None:
    """Not one checkpoint was due, so nothing was synced before the end."""
    config = small("fedlesam-s", checkpoint_every="1h")
    case = Case(tmp_path, config)
    assert case.attempt().code == 0
    case.lose_power("all")
    assert case.finished
    assert result(case.run).metrics == references(config).metrics
    assert result(case.run).model == references(config).model


def test_a_promised_checkpoint_is_lasting(tmp_path: Path) -> None:
    """`attempt` asserts that a run goes on from the last checkpoint there was; here it is seen to."""
    case = Case(tmp_path, small("fedlesam-s", memory=5_000))
    assert case.attempt(Plan("committed 4")).killed
    case.lose_power("all")
    assert case.attempt().code == 0
    assert case.loaded == 4


def test_a_torn_file_of_a_first_try_is_not_taken(references: References, tmp_path: Path) -> None:
    """A power loss in the first commit: a segment that was renamed lies there, empty."""
    config = small("fedlesam-s", checkpoint_every=2)
    case = Case(tmp_path, config)
    assert case.attempt(Plan("after replace checkpoints/clients/round000002-segment0", 1)).killed
    torn = list((case.run / "checkpoints" / "clients").iterdir())
    assert [path.name for path in torn] == ["round000002-segment0.safetensors"]
    for path in torn:
        path.write_bytes(b"")
    assert case.attempt(Plan("committed 2")).killed
    assert case.attempt().code == 0
    assert case.loaded == 2, "and the next checkpoint is good"
    assert result(case.run) == references(config)


def test_the_harness_notices_a_missing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sync of a folder, or of memories, a promised checkpoint is lost."""
    for name in ("sync_folder", "sync_file"):
        with monkeypatch.context() as patch:
            patch.setattr(disk, name, lambda *_: None)
            case = Case(tmp_path / name, small("fedlesam-s"))
            assert case.attempt(Plan("committed 4")).killed
            case.lose_power("all")
            with pytest.raises(AssertionError, match="is lost"):
                finish(case)


def finish(case: Case) -> None:
    assert case.attempt().code == 0, f"is lost: {case.error}"


# A worker alone


@pytest.mark.parametrize("store", ["shared", "pinned"])
def test_a_worker_is_killed(store: str, references: References, tmp_path: Path) -> None:
    """Its leader says so, and ends; the run resumes."""
    config = small("fedsmoo", workers=2, store=store)
    case = Case(tmp_path, config)
    ended = case.attempt(Plan("step", 14, "worker", "kill me"))
    assert ended.code == 4
    assert re.match("WorkerLost: .*start the run again", case.error)
    assert case.committed >= 1
    check_resumes(case, references(config))


def test_nobody_is_left_behind(tmp_path: Path) -> None:
    """`wait` ends when the leader and its workers have all closed a pipe they share; SIGKILL is for the leader."""
    case = Case(tmp_path, small("fedsmoo", workers=3))
    assert case.attempt(Plan("step", 5)).killed


def test_what_is_tested_is_what_users_run(references: References, tmp_path: Path) -> None:
    """The instrument itself changes nothing."""
    config = small("fedlesam-s")
    assert fork(lambda: runner.execute(config, tmp_path / "plain", data=digits())).wait().code == 0
    case = Case(tmp_path / "watched", config)
    assert case.attempt().code == 0
    assert result(case.run) == result(tmp_path / "plain") == references(config)
    assert len(list(inside(case.labels()))) > 300
