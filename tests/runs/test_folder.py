"""The run folder: what is in it, and who may use it."""

import dataclasses
import json
from pathlib import Path

import pytest

from fedlesam.core.disk import write_json, write_text
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.versions import versions

CONFIG = configs.resolve(RunConfig(rounds=3))


def folder_with(path: Path, state: str | None, config: RunConfig = CONFIG) -> RunFolder:
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.config.write_text(configs.write(config))
    if state is not None:
        folder.summary.write_text(json.dumps({"state": state}))
    return folder


def test_a_folder_that_is_not_there_or_empty_is_free(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "new").needs_run(CONFIG, overwrite=False)
    assert not (tmp_path / "new").exists(), "asking makes nothing"
    assert RunFolder(tmp_path).needs_run(CONFIG, overwrite=False)


def test_a_finished_run_is_not_done_again(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "x", "finished")
    assert not folder.needs_run(CONFIG, overwrite=False)
    assert not folder.needs_run(CONFIG, overwrite=True)
    elsewhere = dataclasses.replace(CONFIG, data_dir="elsewhere")
    assert not folder.needs_run(elsewhere, overwrite=False), "where the data lies makes no other run"


@pytest.mark.parametrize("state", [None, "interrupted", "stopped"])
def test_an_unfinished_run_is_gone_on_with(tmp_path: Path, state: str | None) -> None:
    folder = folder_with(tmp_path / "x", state)
    before = {path: path.read_bytes() for path in folder.path.iterdir()}
    assert folder.needs_run(CONFIG, overwrite=False)
    assert folder.needs_run(CONFIG, overwrite=True)
    assert {path: path.read_bytes() for path in folder.path.iterdir()} == before, "asking changes nothing"


def test_what_a_start_that_was_cut_off_leaves_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("{}")
    (tmp_path / ".config.toml.01234567.part").write_text("lr =")
    assert RunFolder(tmp_path).is_empty()
    assert RunFolder(tmp_path).needs_run(CONFIG, overwrite=False)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="not a run folder"):
        RunFolder(tmp_path).needs_run(CONFIG, overwrite=True)


@pytest.mark.parametrize("state", [None, "finished", "stopped"])
def test_another_run_is_refused_with_the_differences(tmp_path: Path, state: str | None) -> None:
    other = dataclasses.replace(CONFIG, rounds=5, hyper={**CONFIG.hyper, "rho": 0.7})
    folder = folder_with(tmp_path / "x", state, other)
    with pytest.raises(ValueError, match="holds another run") as refusal:
        folder.needs_run(CONFIG, overwrite=False)
    message = str(refusal.value)
    assert "(rounds: you gave 3, the folder has 5; rho: you gave 0.01, the folder has 0.7)" in message
    assert "--out" in message
    assert "--overwrite" in message
    assert folder.needs_run(CONFIG, overwrite=True)


def test_a_run_is_not_shortened(tmp_path: Path) -> None:
    longer = dataclasses.replace(CONFIG, rounds=CONFIG.rounds + 5)
    said = r"\(rounds: you gave 3, the folder has 8\); a run can be extended, not shortened: choose another folder"
    with pytest.raises(ValueError, match=said):
        folder_with(tmp_path / "x", "finished", longer).needs_run(CONFIG, overwrite=False)
    other = dataclasses.replace(longer, seed=5)
    with pytest.raises(ValueError, match="seed: you gave") as refused:
        folder_with(tmp_path / "y", "finished", other).needs_run(CONFIG, overwrite=False)
    assert "not shortened" not in str(refused.value)


def test_a_folder_with_other_things_is_refused_whatever_is_asked(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=f"{tmp_path}: is not empty and not a run folder; .*--out"):
            RunFolder(tmp_path).needs_run(CONFIG, overwrite)
        with pytest.raises(ValueError, match=r"thesis\.tex: is a file; choose a folder with --out"):
            RunFolder(tmp_path / "thesis.tex").needs_run(CONFIG, overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_somebody_elses_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[server]\nport = 80\n")
    with pytest.raises(ValueError, match=r"config\.toml, line 1: unknown setting 'server'"):
        RunFolder(tmp_path).needs_run(CONFIG, overwrite=True)


def test_clear_takes_only_what_a_run_wrote(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "x", "stopped")
    for file in (folder.metrics, folder.model, folder.split, folder.versions, folder.path / "notes.txt"):
        file.write_text("x")
    for inside in (folder.checkpoints / "clients", folder.memory):
        inside.mkdir(parents=True)
        (inside / "round000000-anchor.safetensors").write_text("x")
    (folder.path / "run.lock").write_text("{}")
    folder.clear()
    assert {p.name for p in folder.path.iterdir()} == {"notes.txt", "run.lock"}, "who clears holds the lock"
    RunFolder(tmp_path / "deep" / "er").clear()
    assert not (tmp_path / "deep").exists()


def test_metrics_cut_off_by_a_crash(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_metrics() == []
    folder.metrics.write_text('{"round": 0}\n{"round": 1}\n{"rou')
    assert folder.read_metrics() == [{"round": 0}, {"round": 1}]
    folder.metrics.write_text('{"round": 0}\n{"rou\n{"round": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: is not a record of a round"):
        folder.read_metrics()


def test_summaries(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_summary() == {}
    for wrong in ("{", "[1]"):
        folder.summary.write_text(wrong)
        with pytest.raises(ValueError, match=r"summary\.json: is not a summary of a run"):
            folder.read_summary()


def test_the_config_comes_back(tmp_path: Path) -> None:
    assert folder_with(tmp_path / "x", None).read_config() == CONFIG


def test_writing_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_text(path, "old")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert path.read_text() == "old"
    write_json(path, {"loss": 1})
    assert json.loads(path.read_text()) == {"loss": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_versions_name_what_made_the_numbers() -> None:
    found = versions()
    assert {"fedlesam", "torch", "numpy", "python", "machine", "commit"} <= set(found)
    import torch

    assert found["torch"] == torch.__version__
    assert all(isinstance(value, str) and value for value in found.values())
