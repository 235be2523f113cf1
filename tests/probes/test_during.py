"""Probes while a run trains: nothing of it changes."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from worlds import assert_same_bits, federation, samples, snapshot

from fedlesam.federation import Federation
from fedlesam.probes import GlobalLoss, drift_of, readings
from fedlesam.probes.base import Look, Probe, Values
from fedlesam.probes.catalogue import PROBES, attach, parse
from fedlesam.probes.during import Watch
from fedlesam.probes.readings import Reading
from fedlesam.probes.replay import trained
from fedlesam.runs import config as configs
from fedlesam.runs.compare import plan
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.runner import execute

ALL = "sharpness:every=1,steps=2 hessian:every=1,k=1,draws=2 estimate:every=1 drift:every=1,samples=12"


def wobbly() -> nn.Module:
    """BatchNorm has buffers, dropout draws."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))


def make(name: str) -> Federation:
    return federation(name, model=wobbly(), clients=samples(dtype=torch.float32), active=3)


def generators() -> Iterator[Any]:
    yield random.getstate()
    yield np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]  # noqa: NPY002
    yield torch.get_rng_state().tolist()


@pytest.mark.parametrize("name", ["fedsam", "mofedsam", "fedsmoo", "fedlesam", "fedlesam-s", "fedlesam-d", "freesam-d"])
def test_training_is_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    plain, probed = make(name), make(name)
    probed.threads = plain.threads = 1
    probes = attach(ALL, probed)
    before = list(generators())
    expected = [record.as_dict() for record in plain.run(4)]
    found = [r.as_dict() for r in Watch(probed, probes, tmp_path / "probes.jsonl").train(4)]
    assert list(generators()) == before
    assert_same_bits(snapshot(plain), snapshot(probed))
    assert any("running_mean" in key for key in snapshot(probed))
    for a, b in zip(expected, found, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}, "passes and bytes of probes are nobody's"
    lines = readings.read(tmp_path / "probes.jsonl")
    assert {(r.round, r.probe) for r in lines} == {
        *((t, probe) for t in range(4) for probe in PROBES),
        (4, "sharpness"),
        (4, "hessian"),
    }
    drifts = [r.values.get("drift") for r in lines if r.probe == "drift"]
    assert all(drift is not None and 0 <= drift <= 1 for drift in drifts[1:])


@pytest.mark.parametrize("name", ["fedsam", "fedlesam-d"])
def test_the_functions_alone_leave_random_numbers_alone(name: str) -> None:
    fed = make(name)
    for _ in range(3):
        fed.round()
    before = list(generators())
    drift_of(fed, GlobalLoss.of(fed))
    assert list(generators()) == before
    assert len(list(trained(fed, [0, 2]))) == 2
    assert list(generators()) == before


def test_the_model_before_is_the_one_before(tmp_path: Path) -> None:
    fed = make("fedavg")
    seen = [fed.weights]
    records = Watch(fed, attach("estimate:every=1,samples=0", fed), tmp_path / "p.jsonl").train(4)
    for _ in records:
        seen.append(fed.weights)
    lines = readings.read(tmp_path / "p.jsonl")
    assert "step_norm" not in lines[0].values
    for t in (1, 2, 3):
        assert lines[t].values["step_norm"] == pytest.approx(float((seen[t - 1] - seen[t]).norm()))


class Slow(Probe):
    """Spends an hour of a clock that is not the wall's."""

    name: ClassVar[str] = "slow"
    clock: ClassVar[list[float]] = [0.0]

    def measure(self, look: Look) -> tuple[Values, dict[str, Any]]:
        self.clock[0] += 3600
        return {"one": 1.0, "never": float("nan")}, {}


def test_their_seconds_are_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def now() -> float:
        Slow.clock[0] += 1
        return Slow.clock[0]

    monkeypatch.setattr(time, "perf_counter", now)
    fed = make("fedavg")
    records = list(Watch(fed, [Slow(every=1)], tmp_path / "p.jsonl").train(2))
    assert all(record.seconds < 100 for record in records)
    lines = readings.read(tmp_path / "p.jsonl")
    assert [r.round for r in lines] == [0, 1, 2]
    assert all(r.seconds >= 3600 for r in lines)
    assert lines[0].values == {"one": 1.0}, "JSON has no NaN"


def test_every_and_the_end(tmp_path: Path) -> None:
    fed = make("fedlesam")
    probes = attach("sharpness:every=3,steps=1,local=no,trained=no drift:every=2,samples=6", fed)
    list(Watch(fed, probes, tmp_path / "p.jsonl").train(7))
    rounds = {name: [r.round for r in readings.read(tmp_path / "p.jsonl") if r.probe == name] for name in PROBES}
    assert rounds["sharpness"] == [0, 3, 6, 7], "the last model is measured whatever `every` is"
    assert rounds["drift"] == [0, 2, 4, 6], "from the last model no round begins"


# runs


def tiny(**change: Any) -> RunConfig:
    small = {"clients": 6, "active": 3, "rounds": 3, "epochs": 1, "batch_size": 50, "model": "mlp:hidden=6"}
    return configs.resolve(RunConfig(**{"algorithm": "fedlesam-d", "threads": 1, **small, **change}))


PROBE = "sharpness:every=1,steps=2,samples=60 drift:every=1,samples=30 estimate:every=1,samples=30"


def test_a_run_with_probes_is_the_run_without(tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path / name) for name in ("plain", "probed", "workers")]
    settings: list[dict[str, Any]] = [{}, {"probe": PROBE}, {"probe": PROBE, "workers": 2}]
    for folder, setting in zip(folders, settings, strict=True):
        execute(tiny(**setting), folder.path)
    models = [load_file(folder.model) for folder in folders]
    metrics = [[{**r, "seconds": 0} for r in folder.read_metrics()] for folder in folders]
    for other in (1, 2):
        assert_same_bits(models[0], models[other])
        assert metrics[0] == metrics[other]
    assert not folders[0].probes.exists()
    alone, together = (
        [(r.round, r.probe, r.values, r.metadata) for r in readings.read(folder.probes)] for folder in folders[1:]
    )
    assert alone == together, "the leader of several workers measures the same"
    assert [r[:2] for r in alone if r[1] == "sharpness"] == [(t, "sharpness") for t in range(4)]
    assert execute(tiny(), folders[1].path) == folders[1].read_summary(), "probes do not make another run"
    assert configs.identity(tiny()) == configs.identity(tiny(probe=PROBE))
    assert folders[1].read_config().probe == PROBE


def test_a_new_run_does_not_inherit_measurements(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "x")
    execute(tiny(probe=PROBE, rounds=1), folder.path)
    (folder.path / "surface-2d.safetensors").write_bytes(b"old")
    execute(tiny(algorithm="fedavg", rounds=1), folder.path, overwrite=True)
    assert not folder.probes.exists()
    assert not (folder.path / "surface-2d.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"probe": "sharpnes"}, "unknown probe 'sharpnes': did you mean 'sharpness'"),
        ({"probe": "drift", "algorithm": "fedavg"}, "has no perturbation"),
        ({"probe": "drift", "workers": 2, "store": "pinned"}, "use --store shared or one worker"),
        ({"probe": "surface"}, "is measured on a finished run"),
        ({"probe": "drift drift:every=2"}, "probe drift is named twice"),
        ({"probe": "drift:evry=2"}, "unknown option 'evry': did you mean 'every'"),
        ({"probe": "drift:every=x"}, "every must be a whole number, got 'x'"),
        ({"probe": "sharpness:local=perhaps"}, "local must be yes or no, got 'perhaps'"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_training(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        execute(tiny(**change), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_comparison_gives_drift_to_those_that_perturb() -> None:
    base = RunConfig(probe="sharpness:every=5 drift")
    plans = {p.algorithm: p.probe for p in plan(base, ["fedavg", "fedsam"], 1).values()}
    assert plans == {"fedavg": "sharpness:every=5", "fedsam": "sharpness:every=5 drift"}
    assert [p.probe for p in plan(RunConfig(), ["fedavg"], 1).values()] == [None]
    with pytest.raises(ValueError, match="drift: none of fedavg, scaffold has a perturbation"):
        plan(base, ["fedavg", "scaffold"], 1)


# the file


def test_the_same_measurement_replaces_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    for round, radius, value in ((5, 0.1, 1.0), (0, 0.1, 2.0), (5, 0.2, 3.0), (5, 0.1, 4.0)):
        readings.put(path, Reading(round, "sharpness", {"ascent": value}, {"radius": radius}, 0.5))
    found = [(r.round, r.metadata["radius"], r.values["ascent"]) for r in readings.read(path)]
    assert found == [(0, 0.1, 2.0), (5, 0.2, 3.0), (5, 0.1, 4.0)]
    line = json.loads(path.read_text().splitlines()[0])
    assert line.pop("seconds") == 0.5
    assert line == {"round": 0, "probe": "sharpness", "values": {"ascent": 2.0}, "metadata": {"radius": 0.1}}
    assert [p.name for p in tmp_path.iterdir()] == ["probes.jsonl"]
    for damaged in ('{"round": 1}', '"about"', "[]", "1"):
        path.write_text(f"{damaged}\n{{}}\n")
        with pytest.raises(ValueError, match="line 1: is not a measurement"):
            readings.read(path)


def test_older_files_are_read(tmp_path: Path) -> None:
    """They call the metadata `about`."""
    path = tmp_path / "probes.jsonl"
    old = {"round": 5, "probe": "drift", "values": {"drift": 0.5}, "about": {"samples": 9}, "seconds": 0.5}
    path.write_text(json.dumps(old) + "\n")
    new = Reading(5, "drift", {"drift": 0.5}, {"samples": 9}, 0.5)
    assert readings.read(path) == [new]
    readings.put(path, new)
    assert readings.read(path) == [new]
    assert "about" not in path.read_text()


def test_a_line_stays_as_it_was_when_another_is_added(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    readings.put(path, Reading(0, "drift", {"drift": 0.5, "counted": 12}, {"samples": 9, "full": True}, 0.25))
    before = path.read_text()
    readings.put(path, Reading(1, "drift", {"counted": 3}, {"samples": 9}, 0.5, "something"))
    assert path.read_text().startswith(before)


def test_parsing() -> None:
    one, other = parse("sharpness:radius=0.05,steps=3,trained=no drift")
    assert (one.radius, one.steps, one.trained, one.every) == (0.05, 3, False, 10)  # type: ignore[attr-defined]
    assert other.name == "drift"
    assert parse("") == []
