"""The command line: in this process where it is cheap, as real processes where it matters."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from PIL import Image
from safetensors.torch import load_file

from fedlesam.cli import COMMANDS, cli, main
from fedlesam.runs.folder import RunFolder

TINY = ["--clients", "6", "--active", "2", "--epochs", "1", "--batch-size", "50", "--model", "mlp:hidden=4"]
SLOTS_AND_COSTS = {
    "fedavg": ("-", "-", "Average", 1, 1, 1, 1),
    "fedadam": ("-", "-", "Adam", 1, 1, 1, 1),
    "scaffold": ("-", "ControlVariates", "Average", 1, 2, 2, 2),
    "fedcm": ("-", "ClientMomentum", "Average", 1, 2, 1, 1),
    "feddyn": ("-", "DynamicRegulariser", "Dynamic", 1, 1, 1, 2),
    "fedsam": ("LocalAscent", "-", "Average", 2, 1, 1, 1),
    "mofedsam": ("LocalAscent", "ClientMomentum", "Average", 2, 2, 1, 1),
    "fedgamma": ("LocalAscent", "ControlVariates", "Average", 2, 2, 2, 2),
    "fedsmoo": ("CorrectedAscent", "DynamicRegulariser", "Dynamic", 2, 2, 2, 3),
    "fedlesam": ("GlobalAscent", "-", "Average", 1, 1, 1, 2),
    "fedlesam-s": ("GlobalAscent", "ControlVariates", "Average", 1, 2, 2, 3),
    "fedlesam-d": ("GlobalAscent", "DynamicRegulariser", "Dynamic", 1, 1, 1, 3),
    "fedprox": ("-", "Proximal", "Average", 1, 1, 1, 1),
    "fedlesam-m": ("GlobalAscent", "ClientMomentum", "Average", 1, 2, 1, 2),
    "freesam": ("PreviousStepAscent", "-", "Average", 1, 1, 1, 1),
    "freesam-s": ("PreviousStepAscent", "ControlVariates", "Average", 1, 2, 2, 2),
    "freesam-d": ("PreviousStepAscent", "DynamicRegulariser", "Dynamic", 1, 1, 1, 2),
    "fedlesam-released": ("ReleasedAscent", "-", "Average", 1, 2, 1, 1),
    "fedlesam-released-s": ("ReleasedAscent", "ControlVariates", "Average", 1, 3, 2, 2),
    "fedlesam-released-d": ("ReleasedAscent", "DynamicRegulariser", "Dynamic", 1, 2, 1, 2),
    "random-round": ("RandomRoundAscent", "-", "Average", 1, 1, 1, 1),
    "random-step": ("RandomStepAscent", "-", "Average", 1, 1, 1, 1),
}


@dataclass
class Done:
    code: int
    out: str
    err: str


Call = Callable[..., Done]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`fedlesam ...` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("FEDLESAM_TRACEBACK", raising=False)

    def fedlesam(*args: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["fedlesam", *args])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return Done(int(end.value.code or 0), said.out, said.err)

    return fedlesam


def process(*args: str, folder: Path, code: str | None = None, **environment: str) -> Done:
    """A real one, its output in pipes."""
    start = ["-m", "fedlesam"] if code is None else ["-c", code]
    clean = {k: v for k, v in os.environ.items() if k not in ("FEDLESAM_TRACEBACK", "FORCE_COLOR", "PYTHONWARNINGS")}
    done = subprocess.run(
        [sys.executable, *start, *args],
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


# help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(call: Call, command: str) -> None:
    done = call(command, "--help")
    assert done.code == 0
    assert done.out.startswith("Usage: ")
    assert f"fedlesam {command} " in done.out
    assert done.err == ""


@pytest.mark.parametrize("command", ["run", "compare", "split"])
def test_help_teaches_with_examples_in_groups(call: Call, command: str) -> None:
    text = call(command, "-h").out
    groups = [line for line in text.splitlines() if line and not line.startswith(" ") and line.endswith(":")]
    assert groups[0] == "What to train:"
    assert groups[-1] == "Examples:", "last, where they are seen"
    examples = text.rpartition("Examples:")[2].strip().splitlines()
    assert len(examples) >= 2
    assert all(line.strip().startswith("fedlesam ") for line in examples)


def test_the_examples_of_the_help_are_commands_that_parse() -> None:
    for name in ("run", "compare", "split", "report"):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        for example in command.examples:  # type: ignore[attr-defined]
            words = example.partition("#")[0].split()
            assert words[0] == "fedlesam"
            asked = cli.get_command(click.Context(cli), words[1])
            assert asked is not None
            given = [word for word in words[2:] if not word.endswith("config.toml") and word != "--config"]
            asked.make_context(words[1], given)


def test_every_setting_of_the_protocol_has_a_flag(call: Call) -> None:
    text = call("run", "--help").out
    flags = "--algorithm --data --data-dir --model --split --clients --active --rounds --seed --threads --out --config"
    flags += " --lr --lr-g --lr-decay --rho --alpha --lam --prox --weight-decay --epochs --batch-size --clip"
    flags += " --dropout --max-update-norm --on-client-error --checkpoint-every --keep --lost-after"
    flags += " --clip-scope --momentum --evaluate-every --per-client --set --quiet --json --overwrite --weighting"
    for flag in flags.split():
        assert f"{flag} " in text or f"{flag}\n" in text, flag


def test_the_list_of_commands(call: Call) -> None:
    text = call("--help").out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert call().out.startswith("Usage:") or call().err.startswith("Usage:")


@pytest.mark.parametrize(
    "args", [["--help"], ["run", "--help"], ["compare", "--help"], ["report", "--help"], ["--version"]]
)
def test_help_does_not_import_torch(tmp_path: Path, args: list[str]) -> None:
    code = (
        "import sys\n"
        "from fedlesam.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n"
        "    heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "    sys.exit(f'imported {heavy}' if heavy else end.code)\n"
    )
    done = process(*args, folder=tmp_path, code=code)
    assert (done.code, done.err) == (0, "")
    assert done.out


# lists


def test_list_algorithms_shows_the_whole_catalogue_with_their_costs(call: Call) -> None:
    rows = json.loads(call("list", "algorithms", "--json").out)
    shown = {
        row["name"]: (
            *(row[slot].partition("(")[0] for slot in ("perturbation", "correction", "server rule")),
            *(float(row[cost]) for cost in ("passes", "down", "up", "stored")),
        )
        for row in rows
    }
    assert shown == SLOTS_AND_COSTS
    by_name = {row["name"]: row for row in rows}
    assert by_name["fedlesam"]["perturbation"] == "GlobalAscent(0.01)"
    assert by_name["feddyn"]["correction"] == "DynamicRegulariser(0.1)"
    assert by_name["fedadam"]["server rule"] == "Adam(0.1, 0.9, 0.99, 0.01)"


def test_list_algorithms_as_a_table(call: Call) -> None:
    lines = call("list", "algorithms").out.splitlines()
    found = {
        line.split()[0]: line.split()[-4:] for line in lines if line.split() and line.split()[0] in SLOTS_AND_COSTS
    }
    assert found == {name: [str(n) for n in row[3:]] for name, row in SLOTS_AND_COSTS.items()}


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("models", {"mlp", "cnn", "lenet", "resnet18", "module:callable"}),
        ("data", {"digits"}),
        ("splits", {"iid", "pooled", "dirichlet:B[,repeat]", "dirichlet-by-class:B", "by:FILE", "file:PATH"}),
    ],
)
def test_other_lists(call: Call, what: str, names: set[str]) -> None:
    rows = json.loads(call("list", what, "--json").out)
    assert names <= {next(iter(row.values())) for row in rows}
    text = call("list", what).out
    assert all(name in text for name in names)


# run


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
    args = ["run", "--rounds", "2", *TINY, "--out", "x"]
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
    assert "holds another run (lr: 0.2 here, 0.1 there; rho: 0.5 here, 0.01 there)" in refused.err
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


def test_numbers_that_are_not_finite_end_with_3(call: Call, tmp_path: Path) -> None:
    stop = ["--on-client-error", "stop"]
    done = call("run", "--rounds", "2", *TINY, "--lr", "1e30", "--clip", "0", "--out", "x", *stop)
    assert done.code == 3
    assert done.err.startswith("error: round 0, client ")
    assert len(done.err.splitlines()) == 1
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


# compare and demo


def test_compare_with_seeds(call: Call, tmp_path: Path) -> None:
    args = ["compare", "fedavg", "fedsam", "--seeds", "2", "--rho", "0.3", "--rounds", "2", *TINY, "--out", "c"]
    done = call(*args, "--json")
    assert done.code == 0
    answer = json.loads(done.out)
    assert answer["folder"] == "c"
    assert [row["seeds"] for row in answer["ranking"]] == [2, 2]
    means = [row["mean_of_last"] for row in answer["ranking"]]
    assert means == sorted(means, reverse=True)
    assert {p.name for p in (tmp_path / "c").iterdir()} == {
        "fedavg-seed0",
        "fedavg-seed1",
        "fedsam-seed0",
        "fedsam-seed1",
        "accuracy.png",
        "split.png",
        "report.html",
    }
    for row in answer["ranking"]:
        seeds = [RunFolder(tmp_path / "c" / f"{row['algorithm']}-seed{s}").read_summary() for s in (0, 1)]
        assert row["last"] == pytest.approx(sum(s["accuracy"]["last"] for s in seeds) / 2)
        assert row["backward_passes"] == seeds[0]["backward_passes"]
    assert RunFolder(tmp_path / "c" / "fedsam-seed1").read_config().hyper["rho"] == 0.3
    assert "rho" not in RunFolder(tmp_path / "c" / "fedavg-seed0").read_config().hyper
    table = call(*args)
    assert table.code == 0
    assert "Means over 2 seeds" in table.out
    [gains] = [row["gains"] for row in answer["ranking"] if row["algorithm"] == "fedsam"]
    assert "Points over fedavg, paired by seed: mean and 95 % t-interval." in table.out
    for gain in (gains[name] for name in ("last", "mean_of_last", "best")):
        interval = f"{100 * gain['mean']:+.2f} [{100 * gain['low']:+.2f}, {100 * gain['high']:+.2f}]"
        assert interval in table.out and gain["low"] <= gain["mean"] <= gain["high"] and gain["seeds"] == 2
    assert len(re.findall(r"\d ± \d", table.out)) == 6, "every accuracy of both methods"
    assert "2.0x" in table.out, "fedsam's backward passes beside fedavg's"
    assert table.out.index(answer["ranking"][0]["algorithm"]) < table.out.index(answer["ranking"][1]["algorithm"])


def test_compare_refuses_what_nobody_takes(call: Call, tmp_path: Path) -> None:
    done = call("compare", "fedavg", "fedsam", "--alpha", "0.3", "--rounds", "1", *TINY, "--out", "c")
    assert (done.code, done.err) == (2, "error: none of fedavg, fedsam takes alpha\n")
    assert list(tmp_path.iterdir()) == []


def test_demo(call: Call, tmp_path: Path) -> None:
    done = call("demo", "--rounds", "2", "--out", "d")
    assert done.code == 0
    lines = done.out.splitlines()
    ranked = {line.split()[1]: int(line.split()[0]) for line in lines if line.split() and line.split()[0].isdigit()}
    assert set(ranked) == {"fedavg", "fedsam", "scaffold", "fedlesam", "fedlesam-s"}
    assert sorted(ranked.values()) == [1, 2, 3, 4, 5]
    for name, size in (("accuracy.png", (1080, 660)), ("split.png", (1080, 540))):
        assert f"picture: d/{name}" in done.out
        with Image.open(tmp_path / "d" / name) as image:
            image.load()
            assert (image.format, image.size) == ("PNG", size)
            assert len(image.convert("RGB").getcolors(10**6)) > 10
    assert lines[-1] == "report: d/report.html"
    assert (tmp_path / "d" / "report.html").exists()
    config = RunFolder(tmp_path / "d" / "fedsam-seed0").read_config()
    assert (config.clients, config.active, config.split, config.rounds) == (40, 0.1, "dirichlet:0.1", 2)


# split


def test_split_prints_saves_and_draws_and_run_takes_it_back(call: Call, tmp_path: Path) -> None:
    args = ["split", "--split", "pathological:3", "--clients", "8", "--seed", "7"]
    done = call(*args, "--save", "s/p3", "--picture", "p3.png")
    assert done.code == 0
    told = {name: value.strip() for name, _, value in (line.partition(":") for line in done.out.splitlines())}
    assert told["clients"] == "8"
    assert told["classes per client"] == "3 to 3, mean 3.0"
    assert told["repeated samples"] == "0"
    assert told["deviation from the drawn proportions"] == "none were drawn"
    answer = json.loads(call(*args, "--json").out)
    assert answer["hash"] == told["hash"]
    assert sum(answer["sizes"]) + answer["samples not used"] == 1437
    assert [sum(row) for row in answer["class_counts"]] == answer["sizes"]
    assert all(sum(n > 0 for n in row) == 3 for row in answer["class_counts"])
    with Image.open(tmp_path / "p3.png") as image:
        assert image.size == (1080, 540)
    run = call("run", "--split", "file:s/p3", "--rounds", "1", "--epochs", "1", "--active", "2", "--out", "x", "--json")
    assert json.loads(run.out)["split"]["hash"] == told["hash"]
    drawn = json.loads(call("split", "--split", "dirichlet:0.1", "--clients", "10", "--json").out)
    assert 0 < float(drawn["deviation from the drawn proportions"]) < 1


# bad input


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--algorithm", "fedlesm"], ["unknown algorithm 'fedlesm'", "did you mean 'fedlesam'"]),
        (["--data", "digit"], ["'digit'", "did you mean 'digits'"]),
        (["--model", "lnet"], ["unknown model 'lnet'", "did you mean 'lenet'"]),
        (["--split", "dirichlt:0.1"], ["unknown split 'dirichlt:0.1'", "did you mean 'dirichlet:B"]),
        (["--rho", "-0.1"], ["rho must be at least 0", "-0.1"]),
        (["--rho", "nan"], ["rho", "nan"]),
        (["--lr", "0"], ["lr must be above 0", "0.0"]),
        (["--lr", "-1"], ["lr must be above 0", "-1.0"]),
        (["--active", "0"], ["active must be from 1 to the number of clients, 40, got 0"]),
        (["--active", "41"], ["active must be from 1 to the number of clients, 40, got 41"]),
        (["--active", "1.5"], ["active as a share must be above 0 and at most 1, got 1.5"]),
        (["--active", "150%"], ["active as a share must be above 0 and at most 1, got 1.5"]),
        (["--active", "0%"], ["active as a share", "0.0"]),
        (["--active", "few"], ["--active", "'few'", "a count such as 10"]),
        (["--algorithm", "scaffold", "--weighting", "examples"], ["weighting by examples", "ControlVariates"]),
        (["--algorithm", "fedsmoo", "--weighting", "examples"], ["weighting by examples", 'weighting="clients"']),
        (["--algorithm", "feddyn", "--lr-g", "0.5"], ["lr_g", "0.5"]),
        (["--algorithm", "fedavg", "--rho", "0.1"], ["fedavg has no rho", "it takes lr_g"]),
        (["--split", "dirichlet:0"], ["dirichlet:0", "above 0"]),
        (["--split", "pathological:11"], ["11 classes", "only 10"]),
        (["--split", "pathological:9", "--clients", "400"], ["cannot serve 400 clients", "pathological:9,repeat"]),
        (["--clients", "1438"], ["1438 clients are more than the 1437 training samples"]),
        (["--split", "file:nothing"], ["file:nothing", "fedlesam split"]),
        (["--split", "by:nothing.csv"], ["by:nothing.csv"]),
        (["--rounds", "0"], ["rounds must be a whole number from 1, got 0"]),
        (["--rounds", "many"], ["--rounds: expected a whole number, got 'many'"]),
        (["--batch-size", "0"], ["batch_size must be a whole number from 1, got 0"]),
        (["--epochs", "5-1"], ["5-1", "1-5"]),
        (["--epochs", "0"], ["epochs must be a whole number from 1, got 0"]),
        (["--seed", "-1"], ["seed must be a whole number from 0, got -1"]),
        (["--clip-scope", "all"], ["'all'", "'loss', 'corrected'"]),
        (["--set", "rho"], ["--set rho", "NAME=VALUE"]),
        (["--set", "lr=fast"], ["--set lr: expected a number, got 'fast'"]),
        (["--set", "kapa=1"], ["fedlesam has no kapa", "rho, lr_g"]),
        (["--algorithm", "nowhere:method"], ["'nowhere:method'", "cannot import 'nowhere'"]),
        (["--algorithm", "math:pi"], ["'math:pi'"]),
        (["--config", "bad.toml"], ["bad.toml, line 2: unknown setting 'roundz': did you mean 'rounds'"]),
        (["--out", "full"], ["full: is not empty and not a run folder", "--out"]),
        (["--out", "bad.toml"], ["bad.toml: is a file; choose a folder with --out"]),
        (["--dropout", "1.5"], ["dropout must be at most 1, got 1.5"]),
        (["--dropout", "-0.1"], ["dropout must be at least 0, got -0.1"]),
        (["--dropout", "nan"], ["dropout", "nan"]),
        (["--dropout", "often"], ["--dropout: expected a number, got 'often'"]),
        (["--max-update-norm", "-1"], ["max_update_norm must be above 0, got -1.0"]),
        (["--max-update-norm", "inf"], ["--max-update-norm: expected a number", "inf"]),
        (["--on-client-error", "ignore"], ["--on-client-error: expected one of 'drop', 'stop', got 'ignore'"]),
        (["--checkpoint-every", "0"], ["checkpoint_every must be at least a round or some time, got 0"]),
        (["--checkpoint-every", "often"], ["--checkpoint-every: expected rounds such as 10", "'often'"]),
        (["--lost-after", "soon"], ["--lost-after: expected a number, got 'soon'"]),
        (["--keep", "0"], ["keep must be a whole number from 1, got 0"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_bad_input_is_one_clear_line(call: Call, tmp_path: Path, args: list[str], said: list[str]) -> None:
    (tmp_path / "bad.toml").write_text("lr = 0.1\nroundz = 3\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    before = contents(tmp_path)
    out = [] if "--out" in args else ["--out", "deep/x"]
    done = call("run", "--rounds", "1", *out, *args)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) == 1
    assert "Traceback" not in done.err
    for part in said:
        assert part in done.err
    assert contents(tmp_path) == before, "nothing half-written"
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["rum"], "unknown command 'rum': did you mean 'run'"),
        (["run", "--lrr", "1"], "No such option"),
        (["run", "--config", "nothing.toml"], "nothing.toml"),
        (["list", "methods"], "'methods'"),
        (["compare"], "METHOD"),
        (["compare", "fedavg", "--seeds", "0"], "0"),
        (["compare", "fedavg", "fedavg"], "named twice"),
        (["compare", "fedag"], "did you mean 'fedavg'"),
        (["demo", "--rounds", "0"], "0"),
        (["split", "--split", "dirichlet:0", "--save", "s", "--picture", "p.png"], "dirichlet:0"),
        (["split", "--clients", "0"], "got 0"),
    ],
    ids=str,
)
def test_other_mistakes_end_with_2_and_write_nothing(call: Call, tmp_path: Path, args: list[str], said: str) -> None:
    done = call(*args)
    assert done.code == 2
    assert done.out == ""
    assert said in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


def test_the_traceback_can_be_had(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLESAM_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["fedlesam", "run", "--lr", "0"])
    with pytest.raises(ValueError, match="lr must be above 0"):
        main()


# completion


@pytest.mark.parametrize(
    ("words", "begun", "expected"),
    [
        ([], "com", {"compare"}),
        (["run", "--algorithm"], "fedlesam-r", {"fedlesam-released", "fedlesam-released-s", "fedlesam-released-d"}),
        (["compare", "fedavg"], "sca", {"scaffold"}),
        (["run", "--model"], "re", {"resnet18"}),
        (["run", "--split"], "path", {"pathological:"}),
        (["run", "--clip-scope"], "", {"loss", "corrected"}),
        (["run"], "--weight", {"--weight-decay", "--weighting"}),
        (["run", "--on-client-error"], "", {"drop", "stop"}),
    ],
)
def test_completions(words: list[str], begun: str, expected: set[str]) -> None:
    found = ShellComplete(cli, {}, "fedlesam", "_FEDLESAM_COMPLETE").get_completions(words, begun)
    assert {item.value for item in found} == expected


# real processes


def test_a_real_run_and_its_repetition(tmp_path: Path) -> None:
    args = ["run", "--algorithm", "fedsam", "--rounds", "2", *TINY, "--out", "x"]
    done = process(*args, folder=tmp_path)
    assert done.code == 0
    assert "results: x" in done.out
    assert "\x1b" not in done.out + done.err, "no colours in a pipe"
    before = contents(tmp_path)
    again = process(*args, folder=tmp_path)
    assert again.code == 0
    assert "already finished" in again.out
    assert contents(tmp_path) == before


def test_a_real_mistake(tmp_path: Path) -> None:
    done = process("run", "--lr", "0", "--out", "x", folder=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: LocalTraining: lr must be above 0, got 0.0\n"
    assert list(tmp_path.iterdir()) == []


def test_a_real_comparison_in_a_pipe(tmp_path: Path) -> None:
    done = process("compare", "fedavg", "fedlesam", "--rounds", "1", *TINY, "--out", "c", folder=tmp_path)
    assert done.code == 0
    assert "\x1b" not in done.out + done.err
    assert "fedlesam" in done.out
    assert (tmp_path / "c" / "accuracy.png").exists()


def completed(tmp_path: Path, **variables: str) -> str:
    script = Path(sys.executable).with_name("fedlesam")
    done = subprocess.run(
        [script], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(tmp_path: Path, shell: str) -> None:
    script = completed(tmp_path, _FEDLESAM_COMPLETE=f"{shell}_source")
    assert f"_FEDLESAM_COMPLETE={shell}_complete" in script
    assert "fedlesam" in script


def test_a_shell_gets_its_completions(tmp_path: Path) -> None:
    found = completed(tmp_path, _FEDLESAM_COMPLETE="bash_complete", COMP_WORDS="fedlesam co", COMP_CWORD="1")
    assert {line.partition(",")[2] for line in found.split()} == {"compare", "cost"}


def wait_for(condition: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if condition():
            return
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)
    raise AssertionError("it never happened")


def test_ctrl_c_leaves_a_readable_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "x")
    args = ["run", "--rounds", "1000000", "--lr-decay", "1", *TINY, "--out", str(folder.path)]
    running = subprocess.Popen(
        [sys.executable, "-m", "fedlesam", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        wait_for(lambda: folder.metrics.exists() and len(folder.metrics.read_bytes().splitlines()) > 2, running)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert f"what was done is in {folder.path}" in err
    summary: dict[str, Any] = folder.read_summary()
    records = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert summary["state"] == "interrupted"
    assert summary["rounds"] == len(records) >= 2
    assert summary["accuracy"]["last"] == records[-1]["test_accuracy"]
    assert load_file(folder.model)["1.weight"].shape == (4, 64)
    assert not list(folder.path.glob("*.part"))
