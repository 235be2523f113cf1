"""SIGKILL before and after a checkpoint, before and after a reading: probes.jsonl is that of a run nothing stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import Case, References, result, small
from instrument import Plan

from fedlesam.runs.checkpoint import manifest_file
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder

PROBES = (
    "sharpness:every=1,steps=2,samples=30 hessian:every=2,k=1,draws=2,samples=30 "
    "drift:every=1,samples=30 estimate:every=1,samples=30"
)
INSTANTS = [
    Plan("before replace checkpoints/round000002.json"),
    Plan("after replace checkpoints/round000002.json"),
    Plan("committed 2"),
    Plan("half write_text .probes.jsonl", 8),
    Plan("after replace probes.jsonl", 10),
    Plan("half pwrite metrics.jsonl", 3),
]
MORE = [*(Plan("half write_text .probes.jsonl", nth) for nth in (1, 9, 11)), Plan("after replace probes.jsonl", 4)]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Of runs with probes, which to the other tests are the same runs."""
    return References(tmp_path_factory.mktemp("probed"))


def probed(algorithm: str = "fedlesam-s", **change: Any) -> RunConfig:
    return small(algorithm, **{"rounds": 4, "probe": PROBES, **change})


def lines(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in RunFolder(run).probes.read_text(encoding="utf-8").splitlines()]
    return [{**line, "seconds": 0} for line in found]


def expected_lines(references: References, config: RunConfig) -> list[dict[str, Any]]:
    """Of the run that nothing stopped: all there, and complete."""
    references(config)
    found = next(lines(path.parent) for path in references.path.glob("*/probes.jsonl") if alike(path.parent, config))
    estimates = [line for line in found if line["probe"] == "estimate"]
    assert [line["round"] for line in estimates] == list(range(config.rounds))
    assert all("cosine_previous" in line["values"] for line in estimates[1:])
    return found


def alike(run: Path, config: RunConfig) -> bool:
    return RunFolder(run).read_config().algorithm == config.algorithm


@pytest.mark.parametrize(
    "plan",
    [*INSTANTS, *(pytest.param(plan, marks=pytest.mark.slow) for plan in MORE)],
    ids=lambda plan: f"{plan.pattern}, {plan.nth}",
)
def test_killed_once(plan: Plan, references: References, tmp_path: Path) -> None:
    case = Case(tmp_path, probed())
    expected = expected_lines(references, case.config)
    assert case.attempt(plan).killed
    assert case.attempt().code == 0, case.error
    assert lines(case.run) == expected
    assert result(case.run) == references(case.config)


@pytest.mark.parametrize("every", [1, 2])
def test_no_client_keeps_the_model_before(every: int, references: References, tmp_path: Path) -> None:
    """FedAvg's clients remember nothing; every second round has a checkpoint, or each."""
    case = Case(tmp_path, probed("fedavg", probe="estimate:every=1,samples=30", checkpoint_every=every))
    expected = expected_lines(references, case.config)
    assert case.attempt(Plan("committed 2")).killed
    assert case.attempt(Plan("half pwrite metrics.jsonl", 1)).killed
    assert case.attempt().code == 0, case.error
    assert lines(case.run) == expected


def test_going_on_from_an_older_checkpoint(references: References, tmp_path: Path) -> None:
    case = Case(tmp_path, probed())
    expected = expected_lines(references, case.config)
    assert case.attempt(Plan("committed 3")).killed
    newest = case.run / "checkpoints" / manifest_file(3)
    newest.write_bytes(newest.read_bytes()[:-9])
    case.committed = 2
    assert case.attempt().code == 0, case.error
    assert case.loaded == 2
    assert lines(case.run) == expected


def test_a_reading_made_by_hand_in_between_replaces_none(references: References, tmp_path: Path) -> None:
    """`fedlesam probe` of the stopped run, with other settings: the run's own reading of that round comes too."""
    case = Case(tmp_path, probed())
    expected = expected_lines(references, case.config)
    assert case.attempt(Plan("committed 2")).killed
    by_hand = {"round": 2, "probe": "sharpness", "values": {"ascent": 1.0}, "metadata": {"radius": 9.0}, "seconds": 0}
    with RunFolder(case.run).probes.open("a", encoding="utf-8") as file:
        file.write(json.dumps(by_hand) + "\n")
    assert case.attempt().code == 0, case.error
    found = lines(case.run)
    assert by_hand in found
    assert [line for line in found if line != by_hand] == expected
