"""`fedlesam run`: its folder, its settings, and methods, models and splits of your own."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import TINY, Call, contents
from safetensors.torch import load_file

from fedlesam.runs.folder import RunFolder


def test_run_writes_a_folder_and_repeating_it_changes_nothing(call: Call, tmp_path: Path) -> None:
    args = ["run", "--algorithm", "fedlesam-s", "--rounds", "2", *TINY, "--out", "x"]
    first = call(*args)
    assert first.code == 0
    assert "results: x" in first.out
    summary = RunFolder(tmp_path / "x").read_summary()
    for name, key in (("last round", "last"), ("mean of the last evaluations", "mean_of_last"), ("best round", "best")):
        assert f"accuracy, {name}: {100 * summary['accuracy'][key]:.2f} %" in first.out
    assert "round 2/2" in first.err
    before = contents(tmp_path / "x")
    again = call(*args)
    assert again.code == 0
    assert "x: this run is already finished" in again.out
    assert "round" not in again.err
    assert contents(tmp_path / "x") == before


def bits(folder: Path) -> list[Any]:
    """What a run computed."""
    records = [{**record, "seconds": 0} for record in RunFolder(folder).read_metrics()]
    return [(folder / "model.safetensors").read_bytes(), records]


def test_an_unfinished_folder_is_gone_on_with_or_overwritten(call: Call, tmp_path: Path) -> None:
    args = ["run", "--rounds", "2", *TINY, "--out", "x", "--no-keep"]
    call(*args)
    expected = bits(tmp_path / "x")
    for more in ([], ["--overwrite"]):
        for name in ("summary.json", "model.safetensors"):  # as a kill leaves it
            (tmp_path / "x" / name).unlink()
        (tmp_path / "x" / "metrics.jsonl").write_text('{"round": 0, "active": [1], "made": "up"}\n{"rou')
        assert RunFolder(tmp_path / "x").read_summary() == {}
        done = call(*args, *more)
        assert (done.code, "error" in done.err) == (0, False)
        assert RunFolder(tmp_path / "x").read_summary()["state"] == "finished"
        assert bits(tmp_path / "x") == expected, "without a checkpoint it begins anew"


def test_another_config_is_refused_with_the_differences(call: Call, tmp_path: Path) -> None:
    call("run", "--rounds", "1", *TINY, "--out", "x")
    before = contents(tmp_path / "x")
    refused = call("run", "--rounds", "1", *TINY, "--out", "x", "--lr", "0.2", "--rho", "0.5")
    assert refused.code == 2
    assert (
        "holds another run (lr: you gave 0.2, the folder has 0.1; rho: you gave 0.5, the folder has 0.01)"
        in refused.err
    )
    assert contents(tmp_path / "x") == before


def test_the_default_folder_is_found_again(call: Call, tmp_path: Path) -> None:
    args = ["run", "--rounds", "1", *TINY]
    call(*args)
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("fedlesam-digits-")
    assert "already finished" in call(*args).out
    call(*args, "--seed", "1")
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_config_flags_and_set(call: Call, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('rounds = 3\nlr = 0.5\nactive = "50%"\nseed = 1\n[hyper]\nrho = 0.2\n')
    small = ["--clients", "4", "--epochs", "1", "--model", "mlp:hidden=2"]
    done = call("run", "--config", "x.toml", "--rounds", "2", "--seed", "2", "--set", "seed=3", *small, "--out", "x")
    assert done.code == 0
    config = RunFolder(tmp_path / "x").read_config()
    assert (config.rounds, config.lr, config.active, config.seed, config.hyper["rho"]) == (2, 0.5, 0.5, 3, 0.2)


def test_the_resolved_config_reproduces_the_run(call: Call, tmp_path: Path) -> None:
    call("run", "--algorithm", "fedsmoo", "--rounds", "2", *TINY, "--epochs", "1-2", "--out", "x")
    assert call("run", "--config", "x/config.toml", "--out", "y").code == 0
    for name in ("model.safetensors", "config.toml", "split.safetensors"):
        assert (tmp_path / "x" / name).read_bytes() == (tmp_path / "y" / name).read_bytes(), name
    ours, theirs = (RunFolder(tmp_path / name).read_metrics() for name in "xy")
    for record in [*ours, *theirs]:
        record.pop("seconds")
    assert ours == theirs


def test_json_and_quiet(call: Call, tmp_path: Path) -> None:
    args = ["--rounds", "1", *TINY]
    done = call("run", *args, "--out", "x", "--json")
    assert json.loads(done.out) == {"folder": "x", **RunFolder(tmp_path / "x").read_summary()}
    assert done.err == ""
    assert json.loads(call("run", *args, "--out", "x", "--json").out)["state"] == "finished"
    quiet = call("run", *args, "--out", "y", "-q")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    both = call("compare", "fedavg", *args, "--out", "z", "--quiet")
    assert (both.code, both.out, both.err) == (0, "", "")


def test_per_client_accuracy_is_printed(call: Call, tmp_path: Path) -> None:
    done = call("run", "--rounds", "1", *TINY, "--per-client", "--out", "x")
    found = RunFolder(tmp_path / "x").read_summary()["per_client"]
    parts = [f"{name} {100 * found[key]:.2f} %" for name, key in (("mean", "mean"), ("worst tenth", "worst_tenth"))]
    assert f"accuracy per client: {', '.join(parts)}, spread {100 * found['spread']:.2f} %" in done.out


def test_a_run_in_which_nobody_answers_says_so(call: Call) -> None:
    done = call("run", *TINY, "--rounds", "1", "--dropout", "0.999999", "--out", "x")
    assert done.code == 3
    assert "no client ever answered, so nothing was learnt; all of them dropped out: lower dropout" in done.err


def test_one_client_is_not_all_of_them(call: Call) -> None:
    assert call("run", *TINY, "--rounds", "1", "--active", "1", "--out", "x").code == 0
    other = call("run", *TINY, "--rounds", "1", "--active", "1.0", "--out", "x")
    assert other.code == 2 and "active: you gave 1.0, the folder has 1" in other.err


@pytest.mark.usefixtures("forked_jobs")
def test_tune_and_runs_name_the_measure(call: Call) -> None:
    """The mean of the last evaluations here, the last evaluation there."""
    args = ["tune", "--over", "lr=0.1", *TINY, "--rounds", "1", "--out", "t"]
    tuned = call(*args)
    assert tuned.code == 0 and "held-out accuracy %, mean of the last 10 evaluations" in tuned.out
    assert json.loads(call(*args, "--json").out)["measure"] == "mean_of_last"
    assert "Accuracy: of the last evaluation." in call("runs", "t").out


def test_numbers_that_are_not_finite_end_with_3(call: Call, tmp_path: Path) -> None:
    stop = ["--on-client-error", "stop"]
    done = call("run", "--rounds", "2", *TINY, "--lr", "1e30", "--clip", "0", "--out", "x", *stop)
    assert done.code == 3
    assert done.err.splitlines()[-1].startswith("error: round 0, client ")
    assert len(done.err.splitlines()) == 2  # the first says what is going on
    assert RunFolder(tmp_path / "x").read_summary()["state"] == "stopped"
    assert (tmp_path / "x" / "metrics.jsonl").read_text() == ""


# your own


def test_your_own_method_model_and_split(call: Call, tmp_path: Path) -> None:
    (tmp_path / "rules_of_mine.py").write_text(
        "import fedlesam as fl\n"
        "from fedlesam.rules import LocalAscent\n"
        "from torch import nn\n"
        "def method(kappa=0.1): return fl.Algorithm(LocalAscent(kappa))\n"
        "fixed = fl.Algorithm()\n"
        "def needs(kappa): return fl.Algorithm(LocalAscent(kappa))\n"
        "def net(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
        "def halves(labels, clients, seed):\n"
        "    half = len(labels) // 2\n"
        "    return [range(half), range(half, len(labels))]\n"
    )
    own = ["--model", "rules_of_mine:net", "--split", "rules_of_mine:halves", "--rounds", "1", "--active", "1"]
    done = call("run", "--algorithm", "rules_of_mine:method", *own, "--set", "kappa=0.3", "--out", "x")
    assert (done.code, done.err.count("error")) == (0, 0)
    config = RunFolder(tmp_path / "x").read_config()
    assert config.hyper == {"kappa": 0.3}
    assert load_file(tmp_path / "x" / "model.safetensors")["1.weight"].shape == (10, 64)
    summary = RunFolder(tmp_path / "x").read_summary()
    assert summary["split"]["scheme"] == "rules_of_mine:halves"
    steps = 5 * -(-719 // 10), 5 * -(-718 // 10)
    assert summary["backward_passes"] in {2 * n for n in steps}
    assert call("run", "--algorithm", "rules_of_mine:fixed", *own, "--out", "y").code == 0
    missing = call("run", "--algorithm", "rules_of_mine:needs", *own, "--out", "z")
    assert (missing.code, missing.err) == (
        2,
        "error: rules_of_mine:needs needs kappa: give it with --set kappa=VALUE\n",
    )
    ranked = call("compare", "fedavg", "rules_of_mine:method", *own, "--out", "c", "--json")
    assert {row["algorithm"] for row in json.loads(ranked.out)["ranking"]} == {"fedavg", "rules_of_mine:method"}


def test_more_rounds_extend_a_run_unless_it_has_no_keep(call: Call, tmp_path: Path) -> None:
    call("run", "--rounds", "1", *TINY, "--out", "x")
    extended = call("run", "--rounds", "3", *TINY, "--out", "x")
    assert extended.code == 0 and "already finished" not in extended.out and "round 3/3" in extended.err
    call("run", "--rounds", "3", *TINY, "--out", "y", "--no-keep")
    assert not (tmp_path / "y" / "checkpoints").exists()
    assert (tmp_path / "x" / "model.safetensors").read_bytes() == (tmp_path / "y" / "model.safetensors").read_bytes()
    refused = call("run", "--rounds", "4", *TINY, "--out", "y")
    assert refused.code == 2 and "without a checkpoint to resume from" in refused.err
