"""`fedlesam probe` on real run folders."""

import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from command_line import Call
from safetensors.torch import load_file

from fedlesam.cli import cli
from fedlesam.federation import Record
from fedlesam.probes import GlobalLoss, readings
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.reopen import open_run
from fedlesam.runs.runner import execute


def tiny(**change: Any) -> RunConfig:
    small = {"clients": 5, "active": 2, "rounds": 2, "epochs": 1, "batch_size": 50, "model": "mlp:hidden=4"}
    return configs.resolve(RunConfig(**{"algorithm": "fedsam", "threads": 1, **small, **change}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, one with probes at its end."""
    out = tmp_path_factory.mktemp("runs")
    execute(tiny(probe="sharpness:every=2,steps=3"), out / "sam")
    execute(tiny(algorithm="fedlesam"), out / "lesam")
    return out


@pytest.fixture
def in_runs(runs: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """`fedlesam ...` in a copy of the runs."""
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    return call


def test_a_run_opened_again_is_the_model_it_ended_with(runs: Path) -> None:
    fed = open_run(runs / "sam")
    assert fed.state.round == 2
    for name, tensor in load_file(runs / "sam" / "model.safetensors").items():
        assert torch.equal(fed.model.state_dict()[name], tensor)
    assert len(fed.clients) == 5


def test_afterwards_the_same_numbers_as_while_training(in_runs: Call) -> None:
    before = Path("sam/probes.jsonl").read_text()
    code, out, _ = in_runs("probe", "sam", "--probe", "sharpness:steps=3")
    assert code == 0
    now = readings.read(Path("sam/probes.jsonl"))
    earlier = [json.loads(line) for line in before.splitlines()]
    assert len(now) == len(earlier) == 2, "the line of round 2 is replaced, not doubled"
    assert now[1].values == earlier[1]["values"]
    assert "relative_ascent" in out
    assert f"{now[1].values['ascent']:.5g}" in out


def test_json_tables_surfaces_and_pictures(in_runs: Call) -> None:
    args = ["--probe", "hessian:k=2,samples=50", "--probe", "surface:points=3,samples=20", "--figures", "f"]
    code, out, err = in_runs("probe", "sam", "lesam", *args, "--probe", "surface:points=5,dims=1,samples=20", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [(line["run"], line["probe"]) for line in found["readings"]] == [
        (run, probe) for run in ("sam", "lesam") for probe in ("hessian", "surface", "surface")
    ]
    assert {p.name for p in Path("f").iterdir()} == {Path(p).name for p in found["pictures"]}
    assert len(found["pictures"]) == 6
    for run in ("sam", "lesam"):
        assert Path(run, "surface-1d.safetensors").exists()
        assert Path(run, "surface-2d.safetensors").exists()
        assert "hessian" in {r.probe for r in readings.read(Path(run, "probes.jsonl"))}
    code, out, _ = in_runs("probe", "sam", "lesam", *args[:2])
    assert code == 0
    assert "fedsam  fedlesam" in " ".join(out.split()).replace("fedsam fedlesam", "fedsam  fedlesam")
    assert "trace_error" in out


def test_drift_of_a_finished_run_is_that_of_a_longer_one_there(in_runs: Call) -> None:
    """Its last checkpoint has what clients remember."""
    execute(tiny(algorithm="fedlesam", rounds=3, probe="drift:every=2"), Path("longer"))
    assert in_runs("probe", "lesam", "--probe", "drift", "-q").code == 0
    (now,) = readings.read(Path("lesam/probes.jsonl"))
    while_training = [line for line in readings.read(Path("longer/probes.jsonl")) if line.round == 2]
    assert [now.values] == [line.values for line in while_training] and now.values["counted"]


def test_drift_without_a_checkpoint_is_refused(in_runs: Call) -> None:
    execute(tiny(keep_last=False), Path("gone"))
    code, _, err = in_runs("probe", "gone", "--probe", "drift")
    assert code == 2 and "gone: drift needs the clients' memories, but this run has no checkpoint" in err


def test_quiet_says_nothing(in_runs: Call) -> None:
    assert in_runs("probe", "sam", "-q", "--probe", "sharpness:steps=1,samples=10,local=no") == (0, "", "")


def test_it_changes_nothing_else(in_runs: Call) -> None:
    names = ("config.toml", "metrics.jsonl", "model.safetensors", "summary.json")
    before = {name: Path("lesam", name).read_bytes() for name in names}
    in_runs("probe", "lesam", "--probe", "sharpness:steps=1", "--probe", "surface:points=3,samples=5")
    assert {name: Path("lesam", name).read_bytes() for name in names} == before


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "nowhere: is not a run folder, it has no config.toml"),
        (["sam", "--probe", "sharpnes"], "unknown probe 'sharpnes': did you mean 'sharpness'?"),
        (["sam", "--probe", "surface:points=0"], "points must be a whole number from 3, got 0"),
        (["sam", "--probe", "surface:pints=3"], "unknown option 'pints': did you mean 'points'?"),
        (["sam", "--probe", "hessian:k=999"], "k must be below the model's 310 parameters"),
        (["sam", "--device", "tpu"], "device 'tpu'"),
    ],
)
def test_bad_input_is_one_clear_line(in_runs: Call, args: list[str], said: str) -> None:
    code, out, err = in_runs("probe", *args)
    assert code == 2
    assert said in err
    assert out == ""
    assert len(err.strip().splitlines()) == 1


def test_runs_that_cannot_be_measured(in_runs: Call) -> None:
    Path("sam/model.safetensors").unlink()
    assert "sam: has no checkpoint and no model.safetensors yet" in in_runs("probe", "sam")[2]
    Path("sam/model.safetensors").write_bytes(b"no weights")
    assert "is not the model of" in in_runs("probe", "sam")[2]
    summary = RunFolder(Path("lesam")).read_summary()
    summary["split"]["hash"] = "another"
    Path("lesam/summary.json").write_text(json.dumps(summary))
    assert "the data or the split are not those of the run" in in_runs("probe", "lesam")[2]


def test_directions_cannot_be_shared_by_different_models(in_runs: Call) -> None:
    execute(tiny(model="mlp:hidden=5", rounds=1), Path("wide"))
    code, _, err = in_runs("probe", "sam", "wide", "--probe", "surface:points=3,samples=5")
    assert code == 2
    assert "sam has 310 parameters and wide has 385" in err


def test_two_runs_of_one_method_are_told_apart(in_runs: Call) -> None:
    shutil.copytree("sam", "again")
    out = in_runs("probe", "sam", "again", "--probe", "sharpness:steps=1,samples=5,local=no")[1]
    assert "fedsam sam" in out
    assert "fedsam again" in out


class Stop(KeyboardInterrupt):
    """As Ctrl-C is."""


@pytest.mark.parametrize("algorithm", ["fedlesam", "fedsmoo"])
def test_at_a_checkpoint_the_same_numbers_as_while_training(tmp_path: Path, in_runs: Call, algorithm: str) -> None:
    """What clients remember comes from the checkpoint, and the run is not changed."""
    wanted = ["drift:every=1,samples=20", "estimate:every=1,samples=20", "sharpness:every=1,samples=20,steps=2"]
    execute(tiny(algorithm=algorithm, rounds=4, probe=" ".join(wanted)), tmp_path / "whole")

    def stop(record: Record) -> None:
        if record.round == 2:
            raise Stop

    with pytest.raises(Stop):
        execute(tiny(algorithm=algorithm, rounds=4), tmp_path / "part", watch=stop)
    before = {path: path.read_bytes() for path in (tmp_path / "part").rglob("*") if path.is_file()}
    code, out, _ = in_runs("probe", str(tmp_path / "part"), *(word for text in wanted for word in ("--probe", text)))
    assert code == 0
    assert "full_drift" not in out
    expected = {r.probe: r for r in readings.read(tmp_path / "whole" / "probes.jsonl") if r.round == 3}
    found = {r.probe: r for r in readings.read(tmp_path / "part" / "probes.jsonl")}
    assert found.keys() == expected.keys() == {"drift", "estimate", "sharpness"}
    assert "trained_mean" in found["sharpness"].values
    without = {"cosine_previous", "step_norm"} if algorithm == "fedsmoo" else set()  # no client has the model before
    for probe, reading in found.items():
        assert reading.metadata == expected[probe].metadata
        assert reading.values == {k: v for k, v in expected[probe].values.items() if k not in without}
    assert {path: path.read_bytes() for path in before} == before
    execute(tiny(algorithm=algorithm, rounds=4), tmp_path / "part")
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert models[0] == models[1]


def test_centralised_training_is_measured_on_the_clients_of_the_others(in_runs: Call) -> None:
    """Unequal clients: the mean over them is not the mean over all samples."""
    split = "dirichlet-by-class:0.5"
    execute(tiny(algorithm="fedavg", split=split), Path("fed"))
    execute(tiny(algorithm="fedavg", split="pooled", clients=None, active=1.0), Path("pool"))
    probe = ["--probe", "sharpness:samples=0,steps=1,local=no,trained=no"]
    code, out, _ = in_runs("probe", "pool", "fed", *probe, "--tables", "t", "--json")
    assert code == 0
    lines = json.loads(out)["readings"]
    assert [line["method"] for line in lines] == ["centralised SGD", "fedavg"]
    theirs, own = GlobalLoss.of(open_run(Path("fed"))), open_run(Path("pool"))
    assert lines[0]["values"]["loss"] == pytest.approx(theirs.value(own.weights), rel=1e-6)
    assert lines[0]["metadata"]["clients"] == "those of fed"
    assert lines[0]["metadata"]["samples"] == lines[1]["metadata"]["samples"]
    alone = json.loads(in_runs("probe", "pool", *probe, "--json")[1])["readings"][0]
    assert alone["values"]["loss"] == pytest.approx(GlobalLoss.of(own).value(own.weights), rel=1e-6)
    assert alone["values"]["loss"] != pytest.approx(lines[0]["values"]["loss"], rel=1e-4)
    assert Path("t/sharpness.csv").read_text().startswith("method,run,round,loss,")


def test_the_examples_of_the_help_parse(in_runs: Call) -> None:
    command = cli.get_command(click.Context(cli), "probe")
    assert command is not None
    for example in command.examples:  # type: ignore[attr-defined]
        words = example.split()
        assert words[:2] == ["fedlesam", "probe"]
        command.make_context("probe", words[2:])
    text = in_runs("probe", "--help")[1]
    assert all(word in text for word in ("sharpness", "hessian", "surface", "drift", "Examples:"))


def test_a_surface_is_of_the_loss_it_says(in_runs: Call) -> None:
    in_runs("probe", "sam", "--probe", "surface:points=3,samples=0", "-q")
    found = readings.read_surface(Path("sam/surface-2d.safetensors"))
    fed = open_run(Path("sam"))
    assert found.loss[1, 1] == pytest.approx(GlobalLoss.of(fed).value(fed.weights), rel=1e-6)
    assert found.metadata["algorithm"] == "fedsam"
    assert found.metadata["rounds"] == 2
