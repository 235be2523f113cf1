"""Clients that fail in a run: its folder, its report and what the command line says."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Call
from failing import plainly

from fedlesam.core.record import MOST_LOGGED
from fedlesam.data import load
from fedlesam.data.dataset import DataSet, Images
from fedlesam.data.splits import make_split
from fedlesam.federation import DROPOUT, Record
from fedlesam.report import pictures
from fedlesam.report.ranking import ranking
from fedlesam.runs import config as configs
from fedlesam.runs.build import build
from fedlesam.runs.compare import compare, plan
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.runner import NoAnswers, execute

# Run folders


def tiny(**change: Any) -> RunConfig:
    small = {"clients": 6, "active": 3, "rounds": 4, "epochs": 1, "batch_size": 50, "model": "mlp:hidden=4"}
    return configs.resolve(RunConfig(**{"algorithm": "scaffold", "threads": 1, **small, **change}))


def digits_with_nan(config: RunConfig, broken: set[int]) -> DataSet:
    """The digits, but for some clients' samples."""
    data = load("digits")
    x = data.train.x.float()
    for client in broken:
        x[torch.from_numpy(make_split(config.split, data, config.clients, config.seed).clients[client])] = math.nan
    return dataclasses.replace(data, train=Images(x, data.train.y))


def records_of(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line, parse_constant=refuse), "seconds": None} for line in lines]


def test_metrics_say_who_and_why(tmp_path: Path) -> None:
    config = tiny(dropout=0.25)
    data = digits_with_nan(config, {1, 4})
    summary = execute(config, tmp_path / "x", data=data)
    records = records_of(tmp_path / "x")
    fed = build(config, data).federation
    for record, expected in zip(records, fed.run(4), strict=True):
        assert record == json.loads(json.dumps(plainly(expected)))
        silent = fed.draw_silent(record["round"], record["active"])
        nan = "the loss of step 0 is not finite"
        why = {i: DROPOUT if i in silent else nan for i in record["active"] if i in silent or i in (1, 4)}
        assert record.get("dropped", {}) == {str(client): reason for client, reason in why.items()}
    assert summary["state"] == "finished"
    assert summary["dropped"] == sum(len(record.get("dropped", ())) for record in records) > 2
    assert {why for record in records for why in record.get("dropped", {}).values()} == {DROPOUT, nan}


def test_a_resumed_run_has_the_same_failures(tmp_path: Path) -> None:
    config = tiny(dropout=0.25)
    data = digits_with_nan(config, {1, 4})
    execute(config, tmp_path / "whole", data=data)

    def stop(record: Record) -> None:
        if record.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(config, tmp_path / "parts", data=data, watch=stop)
    assert len(records_of(tmp_path / "parts")) == 2
    execute(config, tmp_path / "parts", data=data)
    assert records_of(tmp_path / "parts") == records_of(tmp_path / "whole")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other


def test_a_run_goes_on_where_numbers_stop_being_finite(tmp_path: Path) -> None:
    """From round 1 on everybody fails; the model stays that of round 0."""
    summary = execute(tiny(lr_decay=1e25, clip=0.0), tmp_path / "x")
    execute(tiny(lr_decay=1e25, clip=0.0, rounds=1), tmp_path / "first")
    assert (summary["state"], summary["rounds"], summary["dropped"]) == ("finished", 4, 9)
    assert (tmp_path / "x/model.safetensors").read_bytes() == (tmp_path / "first/model.safetensors").read_bytes()
    assert ["train_loss" in record for record in records_of(tmp_path / "x")] == [True, False, False, False]


def test_a_run_in_which_no_client_ever_answered(tmp_path: Path) -> None:
    config = tiny(dropout=0.3)
    data = digits_with_nan(config, set(range(6)))
    for _ in range(2):  # repeated it ends the same way
        with pytest.raises(NoAnswers, match="no client ever answered, so nothing was learnt; the first, ") as end:
            execute(config, tmp_path / "x", data=data)
        records = records_of(tmp_path / "x")
        client = next(i for r in records for i, why in r["dropped"].items() if why != DROPOUT)
        assert str(end.value).endswith(f"client {client}: the loss of step 0 is not finite")
        summary = RunFolder(tmp_path / "x").read_summary()
        assert (summary["state"], summary["rounds"], summary["why"]) == ("stopped", 4, str(end.value))
        assert len(records) == 4


def test_the_first_failure_is_named_even_if_its_reason_comes_again() -> None:
    from fedlesam.runs.runner import _check_answers

    records: list[dict[str, Any]] = [
        {"dropped": {"3": DROPOUT, "5": "first"}},
        {"dropped": {"0": "second"}},
        {"dropped": {"1": "first"}},
    ]
    with pytest.raises(NoAnswers, match="the first, client 5: first"):
        _check_answers(records)
    _check_answers([*records, {"train_loss": 1.0}])
    with pytest.raises(NoAnswers, match="all of them dropped out: lower dropout, or train more rounds"):
        _check_answers([{"dropped": {"3": DROPOUT}}])


def test_a_run_in_which_all_dropped_out_keeps_its_first_model(tmp_path: Path) -> None:
    with pytest.raises(NoAnswers, match="dropped out"):
        execute(tiny(dropout=1 - 1e-9, rounds=2), tmp_path / "x")
    summary = RunFolder(tmp_path / "x").read_summary()
    assert (summary["state"], summary["dropped"], summary["backward_passes"]) == ("stopped", 6, 0)
    fresh = build(tiny()).federation
    from safetensors.torch import load_file

    for name, tensor in load_file(tmp_path / "x" / "model.safetensors").items():
        assert torch.equal(tensor, fresh.model.state_dict()[name])


# Reports


def test_reports_of_rounds_without_answers(tmp_path: Path) -> None:
    base = dataclasses.replace(tiny(), dropout=0.8, rounds=4, hyper={})
    runs = compare(plan(base, ["fedavg", "fedsam"], 2), tmp_path)
    answered = [run.curve("train_loss")[0] for run in runs]
    assert any(0 < len(rounds) < 4 for rounds in answered), "rounds with answers, and without"
    assert runs[0].curve("test_accuracy")[0] == [1, 2, 3, 4]
    assert all(row.megabytes > 0 and row.rounds == 4 for row in ranking(runs))
    assert all(path.exists() for path in pictures.comparison(runs, tmp_path))


# The command line

TINY = ["--clients", "6", "--active", "3", "--epochs", "1", "--batch-size", "50", "--model", "mlp:hidden=4"]


@pytest.mark.parametrize("more", [[], ["--quiet"], ["--json"]], ids=str)
def test_failures_are_logged_but_not_all_of_them(call: Call, tmp_path: Path, more: list[str]) -> None:
    """Also where nothing else is said; and an end that is not a success."""
    code, out, err = call("run", "--rounds", "3", *TINY, "--lr", "1e30", "--clip", "0", "--out", "x", *more)
    assert code == 3
    assert out == ""
    assert "Traceback" not in err
    warnings = [line for line in err.splitlines() if line.startswith("warning: ")]
    failed = [(r["round"], i, why) for r in records_of(tmp_path / "x") for i, why in r["dropped"].items()]
    assert len(failed) == 9
    logged = [f"warning: round {t}: client {i} is dropped: {why}" for t, i, why in failed[:MOST_LOGGED]]
    assert warnings == [*logged, "warning: more clients are dropped; all of them are in the records"]
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    _, first, why = failed[0]
    assert errors == [f"error: no client ever answered, so nothing was learnt; the first, client {first}: {why}"]


def test_dropout_is_shown_but_not_warned_of(call: Call, tmp_path: Path) -> None:
    code, _, err = call("run", "--rounds", "4", *TINY, "--dropout", "0.5", "--out", "x")
    assert code == 0
    assert "warning" not in err
    records = records_of(tmp_path / "x")
    assert sum(len(record.get("dropped", ())) for record in records) > 0
    last = len(records[-1].get("dropped", ()))
    assert (f"{last} dropped" in err) == bool(last)
    assert RunFolder(tmp_path / "x").read_config().dropout == 0.5


def test_flags_reach_the_run(call: Call, tmp_path: Path) -> None:
    args = ["run", "--rounds", "2", *TINY, "--out", "x"]
    code, _, err = call(*args, "--max-update-norm", "1e-9")
    assert code == 3
    assert "the update has norm" in err
    assert "above 1e-09" in err
    other = ["--rounds", "2", *TINY, "--max-update-norm", "1e-9", "--on-client-error", "stop", "--out", "y"]
    code, _, err = call("run", *other)
    assert code == 3
    assert "\nerror: round 0, client " in err
    assert records_of(tmp_path / "y") == []
    code, _, err = call(*args, "--max-update-norm", "1e-9", "--dropout", "0.5")
    assert code == 2
    assert "holds another run (dropout: you gave 0.5, the folder has 0.0)" in err


def test_what_a_run_with_dropout_costs(call: Call) -> None:
    code, out, _ = call("cost", *TINY, "--dropout", "0.5", "--json")
    assert code == 0
    assert json.loads(out)["active"] == 3
    code, _, err = call("cost", *TINY, "--dropout", "2")
    assert code == 2
    assert "dropout must be below 1, got 2.0" in err
