"""`fedlesam compare`, `demo` and `split`, and input that cannot be meant."""

import json
import re
import sys
from pathlib import Path

import pytest
from command_line import TINY, Call, contents
from PIL import Image

from fedlesam.cli import main
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.read import read_run

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
        "order.json",
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
    said = " ".join(done.out.split())
    for words in ("Means over 3 seeds", "sharpness", "fedavg's by 0.", "an explanation, which this demo does not test"):
        assert words in said, words
    run = read_run(tmp_path / "d" / "fedsam-seed1")
    assert run.config.hyper["rho"] == 0.1
    assert run.series("sharpness")[-1].round == 2
    for name, size in (("accuracy.png", (1530, 660)), ("split.png", (1080, 540))):
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
        (["--set", "lr=fast"], ["--set lr: expected a number, or a schedule"]),
        (["--set", "kapa=1"], ["fedlesam has no kapa", "rho, lr_g"]),
        (["--algorithm", "nowhere:method"], ["'nowhere:method'", "cannot import 'nowhere'"]),
        (["--algorithm", "math:pi"], ["'math:pi'"]),
        (["--config", "bad.toml"], ["bad.toml, line 2: unknown setting 'roundz': did you mean 'rounds'"]),
        (["--out", "full"], ["full: is not empty and not a run folder", "--out"]),
        (["--out", "bad.toml"], ["bad.toml: is a file; choose a folder with --out"]),
        (["--dropout", "1"], ["dropout must be below 1, got 1.0"]),
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
