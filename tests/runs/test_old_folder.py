"""A folder of an older version, with its names: it is read, and its checkpoint is resumed.

tests/runs/old_folder is a run of FedLESAM with dropout, interrupted after two of four rounds.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedlesam.runs.folder import RunFolder
from fedlesam.runs.read import load_run, read_run
from fedlesam.runs.runner import execute

OLD = Path(__file__).parent / "old_folder"
DROPPED = {"5": "dropout", "9": "dropout"}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    shutil.copytree(OLD, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def test_it_is_of_the_older_form() -> None:
    assert "left_out" in (OLD / "metrics.jsonl").read_text()
    assert "left_out" in (OLD / "summary.json").read_text()


def test_it_is_read_by_the_names_of_today(folder: RunFolder) -> None:
    run = read_run(folder.path)
    assert run.config.algorithm == "fedlesam"
    assert run.records[1]["dropped"] == DROPPED
    assert "left_out" not in run.records[1]
    assert (run.summary["state"], run.summary["dropped"]) == ("interrupted", 2)


def test_it_is_resumed_and_ends_as_a_new_run_does(folder: RunFolder, tmp_path: Path) -> None:
    config = folder.read_config()
    seen: list[int] = []
    summary = execute(config, folder.path, watch=lambda record: seen.append(record.round))
    assert seen == [2, 3], "two rounds were done"
    assert summary["state"] == "finished"
    execute(config, tmp_path / "new")
    assert summary["dropped"] == RunFolder(tmp_path / "new").read_summary()["dropped"]
    old, new = (load_file(path / "model.safetensors") for path in (folder.path, tmp_path / "new"))
    for name in new:
        torch.testing.assert_close(old[name], new[name], atol=1e-3, rtol=1e-3)


def test_lines_of_both_forms_in_one_file(folder: RunFolder) -> None:
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    new = {**lines[0], "round": 2, "dropped": {"3": "an error"}}
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in [*lines, new]))
    assert [record.get("dropped") for record in folder.read_metrics()] == [None, DROPPED, {"3": "an error"}]


def test_load_run(folder: RunFolder) -> None:
    """Settings, records, summary and the trained module, from the folder alone."""
    run = load_run(str(folder.path))
    assert [record["round"] for record in run.history] == [0, 1]
    stored = load_file(folder.path / "model.safetensors")
    assert stored.keys() == run.model.state_dict().keys()
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, stored[name])
    assert repr(run.federation().algorithm).startswith("Algorithm(")
    assert {path.name for path in folder.path.iterdir()} == {path.name for path in OLD.iterdir()}, "nothing is written"
