"""Hyper-parameters are chosen on held-out training data, and the test data is never looked at."""

import json
import sys
from pathlib import Path

import pytest
import torch

from fedlesam.cli import main
from fedlesam.runs import config as configs
from fedlesam.runs import config_file, tune
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder

QUICK = ["--model", "mlp:hidden=8", "--clients", "6", "--active", "3", "--epochs", "1", "--rounds", "3", "--json"]


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fedlesam", "tune", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


POISON = """
import torch
from fedlesam.data.dataset import DataSet, Images
from fedlesam.data import load

class Untouchable(Images):
    armed = False
    def __getattribute__(self, name):
        if name in ("x", "y") and Untouchable.armed:
            raise RuntimeError("the test data was looked at")
        return super().__getattribute__(name)

def poisoned():
    from fedlesam.data import dataset
    digits = load("digits")
    real = dataset.select
    def select(*arguments):  # the loader's own checks are over; from here on nobody may look
        Untouchable.armed = True
        return real(*arguments)
    dataset.select = select
    return DataSet("poisoned", digits.train, Untouchable(digits.test.x, digits.test.y), digits.classes, digits.mean,
                   digits.std, digits.scale, fingerprint="poisoned")
"""


def test_the_test_data_is_never_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "poison.py").write_text(POISON)
    monkeypatch.chdir(tmp_path)
    over = ["--algorithm", "fedsam", "--data", "poison:poisoned", "--over", "rho=0.01,0.5", "--out", "t", *QUICK]
    code, out, err = call(monkeypatch, capsys, *over)
    assert code == 0, err
    assert all(trial["score"] is not None for trial in json.loads(out)["trials"])


def test_the_poison_works(tmp_path: Path) -> None:
    """The test above would pass for nothing if a run that does evaluate on the test data went through as well."""
    import subprocess

    (tmp_path / "poison.py").write_text(POISON)
    arguments = ["run", "--data", "poison:poisoned", "--out", "r", *QUICK]
    done = subprocess.run([sys.executable, "-m", "fedlesam", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "the test data was looked at" in done.stderr


@pytest.mark.usefixtures("forked_jobs")
def test_the_best_comes_first_and_repeats_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate that learns nothing against one that does; the winner is trained on everything afterwards."""
    over = ["--algorithm", "fedavg", "--over", "lr=1e-9,0.1", "--out", str(tmp_path / "t"), *QUICK]
    code, out, _ = call(monkeypatch, capsys, *over, "--seeds", "2", "--jobs", "2")
    first, second = json.loads(out)["trials"]
    assert code == 0 and first["values"] == {"lr": 0.1} and first["score"]["mean"] > second["score"]["mean"]
    runs = list((tmp_path / "t" / "runs").iterdir())
    assert len(runs) == 4
    for run in runs:
        config = RunFolder(run).read_config()
        assert config.held_out == 0.1 and config.threads == 1
    best = configs.update(RunConfig(), config_file.read(tmp_path / "t" / "best.toml"))
    assert best.lr == 0.1 and best.held_out is None
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "t" / "runs").rglob("*")}
    assert call(monkeypatch, capsys, *over, "--seeds", "2")[1] == out
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "t" / "runs").rglob("*")}


def test_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own: two threads of a forked one wait for each other."""
    over = ["--over", "lr=0.1", "--out", str(tmp_path), *QUICK, "--threads", "2"]
    assert call(monkeypatch, capsys, *over)[0] == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert RunFolder(run).read_config().threads == 2


@pytest.mark.usefixtures("forked_jobs")
def test_the_budget_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tune.budget(RunConfig(rounds=7, held_out=200), 6, 2)
    assert text.startswith("budget: 6 trials x 2 seeds = 12 runs, 84 rounds") and "200 samples" in text
    over = ["--over", "rho=0.1", "--out", str(tmp_path / "t"), *[a for a in QUICK if a != "--json"]]
    assert "budget: 1 trials" in call(monkeypatch, capsys, *over)[2]


def test_the_grid_is_every_combination() -> None:
    space = tune.parse_space(["rho=0.1,1", "batch-size=5,10,20"])
    assert tune.grid(space) == [{"rho": r, "batch_size": b} for r in (0.1, 1.0) for b in (5, 10, 20)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to tune"),
        (["--over", "rho"], "expected NAME=VALUE"),
        (["--over", "rho="], "expected NAME=VALUE"),
        (["--over", "rho=a"], "expected a number, got 'a'"),
        (["--over", "rho=0.1,1", "--over", "rho=2"], "rho is named twice"),
        (["--over", "rho=0.1..1"], "a range needs --trials"),
        (["--over", "rho=1..0.1", "--trials", "2"], "must run upwards"),
        (["--over", "split=iid,pooled"], "belongs to the problem"),
        (["--over", "seed=1,2"], "belongs to the problem"),
        (["--over", "kappa=1,2"], "fedlesam has no kappa"),
        (["--over", "rho=0.1", "--overwrite"], "does not replace anything"),
    ],
)
def test_bad_input(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(monkeypatch, capsys, *arguments)
    assert code == 2 and said in err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("forked_jobs")
def test_optuna_draws_the_same_trials_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    over = ["--algorithm", "fedsam", "--over", "rho=0.001..1", "--over", "batch-size=10..40", "--over", "lr=0.1,0.2"]
    over += ["--out", str(tmp_path / "t"), *QUICK]
    code, out, _ = call(monkeypatch, capsys, *over, "--trials", "3")
    trials = json.loads(out)["trials"]
    assert code == 0 and len(trials) == 3
    for trial in trials:
        assert 0.001 <= trial["values"]["rho"] <= 1 and trial["values"]["lr"] in (0.1, 0.2)
        assert isinstance(trial["values"]["batch_size"], int) and 10 <= trial["values"]["batch_size"] <= 40
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "t" / "runs").rglob("*")}
    assert call(monkeypatch, capsys, *over, "--trials", "3")[1] == out
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "t" / "runs").rglob("*")}


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"fedlesam\[tune\]"):
        tune.Optuna({"rho": tune.Range(0.1, 1)}, 2, 0, 1)


def test_held_out_data_changes_no_default_run() -> None:
    assert configs.identity(configs.resolve(RunConfig())) == configs.identity(
        configs.resolve(RunConfig(samples=None, held_out=None))
    )
    assert torch.get_num_threads() == 1
