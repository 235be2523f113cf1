"""`fl.load_run`: the trained module and the records of a run, from its folder alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedlesam as fl
from fedlesam.runs import build
from fedlesam.runs.config import RunConfig, resolve
from fedlesam.runs.runner import execute

MINE = """
from torch import nn

def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes))
"""


@pytest.mark.parametrize("model", ["mlp:hidden=4", "my_own_net:net"])
def test_the_model_needs_no_data_set(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_net.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    config = RunConfig(model=model, clients=6, active=2, rounds=2, epochs=1, batch_size=50, threads=1)
    execute(resolve(config), tmp_path / "x")

    def gone(config: RunConfig) -> None:
        raise AssertionError("the data set was loaded")

    monkeypatch.setattr(build, "load_data", gone)
    run = fl.load_run(tmp_path / "x")
    stored, state = load_file(tmp_path / "x" / "model.safetensors"), run.model.state_dict()
    assert stored.keys() == state.keys()
    assert all(torch.equal(state[name], stored[name]) for name in stored)
    assert not run.model.training
    assert run.model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_the_history_is_a_table(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    config = RunConfig(model="mlp:hidden=4", clients=6, active=2, rounds=3, epochs=1, batch_size=50, threads=1)
    execute(resolve(config), tmp_path)
    table = pandas.DataFrame(fl.load_run(str(tmp_path)).history)
    assert list(table["round"]) == [0, 1, 2]
    assert table["test_accuracy"].between(0, 1).all()


def test_a_run_is_shown_in_a_line(tmp_path: Path) -> None:
    config = RunConfig(model="mlp:hidden=4", clients=6, active=2, rounds=2, epochs=1, batch_size=50, threads=1)
    execute(resolve(config), tmp_path)
    run = fl.load_run(tmp_path)
    accuracy = f"test accuracy {100 * run.records[-1]['test_accuracy']:.2f} %"
    assert repr(run) == f"Run(fedlesam in {tmp_path}; finished, 2 of 2 rounds; {accuracy})"
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "summary.json").unlink()
    assert repr(fl.load_run(tmp_path)) == f"Run(fedlesam in {tmp_path}; not finished, 0 of 2 rounds)"


@pytest.mark.parametrize("damage", ['"shape": 3', '"shape": [1, 8]', '"shape": [1, 8, "8"]', '"shape": [0, 8, 8]'])
def test_a_damaged_shape_is_refused(damage: str, tmp_path: Path) -> None:
    config = RunConfig(model="mlp:hidden=4", clients=6, active=2, rounds=1, epochs=1, batch_size=50, threads=1)
    execute(resolve(config), tmp_path)
    summary = (tmp_path / "summary.json").read_text()
    there = '"shape": [\n    1,\n    8,\n    8\n  ]'
    assert there in summary
    (tmp_path / "summary.json").write_text(summary.replace(there, damage))
    with pytest.raises(ValueError, match=r"summary\.json: is not a summary of a run"):
        fl.load_run(tmp_path)
