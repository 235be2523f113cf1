"""What a run is evaluated on and when: the last round always is, and a number's name says of which samples it is."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import federation, samples

from fedlesam.cli import main
from fedlesam.core.evaluation import PerClient, per_client
from fedlesam.engines.signals import Interrupted
from fedlesam.federation import Record
from fedlesam.report.groups import compare_runs
from fedlesam.report.ranking import ranking
from fedlesam.report.write import write_report
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.evaluated import scores
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.overview import read_overview
from fedlesam.runs.read import find_runs, read_run
from fedlesam.runs.runner import execute
from fedlesam.runs.trackers import numbers

QUICK = ["--model", "mlp:hidden=8", "--clients", "6", "--active", "3", "--epochs", "1", "--threads", "1"]


def tiny(**change: Any) -> RunConfig:
    small = {"clients": 6, "active": 2, "rounds": 5, "epochs": 1, "batch_size": 50, "model": "mlp:hidden=8"}
    return configs.resolve(RunConfig(**{"algorithm": "fedavg", "threads": 1, **small, **change}))


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fedlesam", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


# The last round


@pytest.mark.parametrize("every", [2, 3, 7])
def test_the_last_accuracy_is_the_last_rounds(every: int, tmp_path: Path) -> None:
    often, seldom = (execute(tiny(evaluate_every=n), tmp_path / str(n)) for n in (1, every))
    assert seldom["accuracy"]["last"] == often["accuracy"]["last"] == lines(tmp_path / "1")[-1]["test_accuracy"]
    tested = [line["round"] for line in lines(tmp_path / str(every)) if "test_accuracy" in line]
    assert tested == sorted({*range(every - 1, 5, every), 4})
    [row] = ranking([read_run(tmp_path / str(every))])
    assert row.last == often["accuracy"]["last"]
    model = (tmp_path / str(every) / "model.safetensors").read_bytes()
    assert model == (tmp_path / "1" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kill", [1, 3, 4])
def test_a_run_that_went_on_is_evaluated_at_the_same_rounds(kill: int, tmp_path: Path) -> None:
    config = tiny(evaluate_every=2)
    execute(config, tmp_path / "whole")

    def stop(record: Record) -> None:
        if record.round + 1 == kill:
            raise Interrupted(15)

    with pytest.raises(KeyboardInterrupt):
        execute(config, tmp_path / "killed", watch=stop)
    unfinished = RunFolder(tmp_path / "killed").read_summary().get("accuracy", {})
    assert ("last" in unfinished) == (kill % 2 == 0), "another round's accuracy is not the last one's"
    execute(config, tmp_path / "killed")
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")


def test_in_python_too() -> None:
    fed = federation("fedavg", test=samples((20,))[0], evaluate_every=3)
    assert [record.test_loss is not None for record in fed.run(4)] == [False, False, True, True]
    assert [fed.round(evaluate=wish).test_loss is not None for wish in (None, True, False)] == [False, True, False]


def test_an_older_folder_does_not_call_another_rounds_accuracy_the_last(tmp_path: Path) -> None:
    config = tiny(evaluate_every=2)
    execute(config, tmp_path / "x")
    folder = RunFolder(tmp_path / "x")
    *before, last = folder.metrics.read_text().splitlines(True)
    record = {k: v for k, v in json.loads(last).items() if not k.startswith("test_")}
    folder.metrics.write_text("".join([*before, json.dumps(record) + "\n"]))
    summary = folder.read_summary()
    summary["accuracy"]["last"] = json.loads(before[-1])["test_accuracy"]
    folder.summary.write_text(json.dumps(summary))
    assert "last" not in execute(config, folder.path)["accuracy"]
    [row] = ranking([read_run(folder.path)])
    assert row.last is None and row.mean_of_last is not None
    seen = read_overview(folder)
    assert (seen.accuracy_round, seen.round) == (4, 5)


def test_a_run_under_way() -> None:
    found = scores([{"round": 0, "test_accuracy": 0.5, "per_client": {"mean": 0.4}}, {"round": 1}])
    assert found["accuracy"]["best"] == 0.5
    assert "last" not in found["accuracy"] and "per_client" not in found


# Per client


def test_clients_whose_classes_are_not_tested_are_left_out() -> None:
    by_class = torch.tensor([0.5, math.nan, 1.0], dtype=torch.float64)
    mixtures = torch.tensor([[1, 0, 0], [0.25, 0.5, 0.25], [0, 1, 0]], dtype=torch.float64)
    found = per_client(by_class, mixtures)
    assert found is not None
    assert found.mean == pytest.approx((0.5 + 0.75) / 2)
    assert found.worst_tenth == 0.5 and found.untested == 1
    assert per_client(by_class, mixtures[2:]) is None
    assert per_client(by_class, mixtures[:2]) == PerClient(found.mean, 0.5, found.spread)


def test_a_record_counts_them() -> None:
    x, y = samples((20,))[0]
    clients = [(x, torch.full_like(y, label)) for label in (0, 1, 2)]
    fed = federation("fedavg", clients=clients, test=(x, torch.zeros_like(y)), per_client=True)
    record = fed.round([0])
    assert record.per_client is not None and record.per_client.mean == record.test_accuracy
    assert record.as_dict()["per_client"]["untested"] == 2
    whole = federation("fedavg", clients=clients, test=(x, y), per_client=True).round([0])
    assert set(whole.as_dict()["per_client"]) == {"mean", "worst_tenth", "spread"}


# Held-out samples are not test data


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    for rho in (0.1, 0.5):
        config = tiny(algorithm="fedsam", hyper={"rho": rho}, held_out=0.2, per_client=True, rounds=2)
        execute(config, folder / "runs" / str(rho))
    return folder


def test_files_name_what_was_held_out(tuned: Path) -> None:
    for run in (tuned / "runs").iterdir():
        assert "test" not in (run / "metrics.jsonl").read_text()
        line, summary = lines(run)[-1], json.loads((run / "summary.json").read_text())
        assert {"held_out_accuracy", "held_out_loss", "held_out_per_client"} < set(line)
        assert "accuracy" not in summary and "per_client" not in summary
        assert summary["held_out_accuracy"]["last"] == line["held_out_accuracy"]
        assert read_run(run).accuracy["last"] == line["held_out_accuracy"]
        assert read_overview(RunFolder(run)).evaluated_on == "held-out"


def test_a_page_of_a_search(tuned: Path, tmp_path: Path) -> None:
    found = write_report(find_runs([tuned]), tmp_path / "x.html", tables=tmp_path / "t", figures=tmp_path / "f")
    assert [group.label for group in found.groups] == ["fedsam rho=0.1", "fedsam rho=0.5"], "neither is the default"
    page = (tmp_path / "x.html").read_text()
    assert "test accuracy" not in page.lower() and "test loss" not in page.lower()
    assert page.count("Held-out accuracy") > 2 and "evaluated on held-out" in page
    assert (tmp_path / "t" / "results.csv").read_text().splitlines()[0].count("held-out, ") == 3
    assert (tmp_path / "f" / "held_out_accuracy.png").exists()
    assert not (tmp_path / "f" / "test_accuracy.png").exists()


def test_the_plain_name_is_the_defaults(tuned: Path, tmp_path: Path) -> None:
    config = tiny(algorithm="fedsam", hyper={"rho": 0.01}, held_out=0.2, rounds=2)
    execute(config, tmp_path / "default")
    found = compare_runs(find_runs([tuned, tmp_path / "default"]))
    assert [group.label for group in found.groups] == ["fedsam rho=0.1", "fedsam rho=0.5", "fedsam"]


def test_held_out_and_test_accuracy_are_not_compared(tuned: Path, tmp_path: Path) -> None:
    execute(tiny(rounds=2), tmp_path / "x")
    with pytest.raises(ValueError, match=r"evaluated on held-out samples in .*, on test samples in .*: make a report"):
        compare_runs(find_runs([tuned, tmp_path / "x"]))


def test_progress_and_results_say_what_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, on, other in ((["--held-out", "20%"], "held-out", "test accuracy"), ([], "test", "held-out")):
        arguments = [*QUICK, "--rounds", "2", "--out", str(tmp_path / on), *more]
        code, out, err = call(monkeypatch, capsys, "run", *arguments, "--per-client")
        assert code == 0
        assert f"{on} accuracy, last round" in out and f"{on} accuracy per client" in out and other not in out
        assert f"{on} accuracy" in err and other not in err
        arguments[-1 - len(more)] += "-compared"
        code, out, _ = call(monkeypatch, capsys, "compare", "fedavg", *arguments)
        assert code == 0 and f"{on.capitalize()} accuracy in %" in out
        code, out, _ = call(monkeypatch, capsys, "compare", "fedavg", *arguments, "--json")
        assert json.loads(out)["evaluated_on"] == on


def test_trackers_say_what_they_are_of() -> None:
    x, y = samples((20,))[0]
    record = federation("fedavg", test=(x, y), per_client=True).round([0])
    assert {"test_accuracy", "test_loss", "per_client/mean"} <= set(numbers(record))
    assert {"held_out_accuracy", "held_out_loss", "held_out_per_client/mean"} <= set(numbers(record, "held-out"))
    assert not any(name.startswith(("test", "per_client")) for name in numbers(record, "held-out"))
