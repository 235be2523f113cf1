"""Clients that are not part of a round, and what cannot be read: probes leave out the one and tell of the other."""

import copy
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from worlds import federation, mlp, samples, snapshot, training

from fedlesam.cli import cli
from fedlesam.engines.world import WorkerLost
from fedlesam.federation import Federation
from fedlesam.probes import GlobalLoss, constant_perturbations, drift_of, eigenvalues, readings, rise, trace
from fedlesam.probes.base import Look, Probe, Values
from fedlesam.probes.catalogue import attach
from fedlesam.probes.drift import DriftProbe
from fedlesam.probes.during import Watch, take
from fedlesam.probes.estimate import Estimate
from fedlesam.probes.hessian import Hessian
from fedlesam.probes.loss import Unreadable
from fedlesam.probes.replay import heard
from fedlesam.probes.sharpness import Sharpness
from fedlesam.report.groups import compare_runs
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.read import read_run
from fedlesam.runs.runner import execute

ALL = "sharpness:every=1,steps=2 hessian:every=1,k=1,draws=2 drift:every=1,samples=12 estimate:every=1"


# dropout


@pytest.mark.parametrize("dropout", [0.5, 1 - 1e-9])
@pytest.mark.parametrize("name", ["fedsam", "fedlesam"])
def test_who_is_silent_is_not_measured(name: str, dropout: float) -> None:
    fed = federation(name, dropout=dropout, active=5)
    seen = 0
    for _ in range(4):
        look = Look(fed)
        drift = drift_of(fed, GlobalLoss.of(fed))
        sharpness = Sharpness(steps=1, local=False, each=True).reading(look)[0]
        estimate = Estimate().reading(look)[0]
        able = constant_perturbations(fed, range(6))
        record = fed.round()
        answered = sorted(set(record.active) - set(record.dropped or {}))
        assert len(answered) < 5 or dropout == 0.5
        seen += len(record.active) - len(answered)
        assert {key for key in sharpness if key.startswith("trained_")} == (
            {f"trained_{what}" for what in ("mean", "min", "max", *answered)} if answered else set()
        )
        if name == "fedsam":
            local = fed.local
            steps = [
                local.steps_of(fed.seed, record.round, i, -(-len(fed.clients[i]) // local.batch_size))  # type: ignore[arg-type]
                for i in answered
            ]
            assert drift.counted + drift.without >= len(steps)
            assert drift.clients_without == 0
        else:
            assert drift.clients_without + len(able.keys() & set(answered)) == len(answered)
            assert estimate["clients"] == len(able.keys() & set(answered))
    assert seen > 0


# clients that fail


def unplugged(x: Tensor, _: torch.Generator) -> Tensor:
    if bool((x == 12345.0).any()):
        raise OSError(5, "unplugged")
    return x


def failing(on_client_error: str = "drop") -> Federation:
    """Client 1 raises where pictures are augmented, which the global loss does not do; client 4's update is large."""
    clients = copy.deepcopy(samples())
    clients[1][0].fill_(12345.0)
    clients[4][0].mul_(20)
    return federation(
        "fedsam",
        model=mlp((5, 3)),
        clients=clients,
        local=training(clip=None, augment=unplugged),
        max_update_norm=5.0,
        on_client_error=on_client_error,
    )


def test_who_will_be_left_out_is_left_out(tmp_path: Path) -> None:
    fed = failing()
    loss, told = GlobalLoss.of(fed), dict[int, str]()
    found = drift_of(fed, loss, dropped=told)
    by_name = drift_of(fed, loss, [0, 2, 3, 5])
    reading = take(Sharpness(steps=1, local=False, each=True), Look(fed), tmp_path / "p.jsonl")
    line = take(DriftProbe(samples=0), Look(fed), tmp_path / "p.jsonl")
    before = snapshot(fed)
    record = fed.round()
    assert record.dropped is not None
    assert set(record.dropped) == {1, 4}
    assert told == record.dropped, "the same reasons"
    assert found == by_name
    assert line.values["counted"] == found.counted
    said = "; ".join(f"client {client} is dropped: {why}" for client, why in record.dropped.items())
    assert line.missing == reading.missing == said
    assert {key for key in reading.values if key[-1].isdigit()} == {f"trained_{i}" for i in (0, 2, 3, 5)}
    assert before.keys() <= snapshot(fed).keys()


def test_a_client_that_stops_the_run_does_so_in_training(tmp_path: Path) -> None:
    """Not in a probe, which says what it met."""
    fed = failing("stop")
    watch = Watch(fed, attach(ALL, fed), tmp_path / "p.jsonl")
    with pytest.raises(OSError, match="unplugged"):
        next(watch.train(2))
    lines = {line.probe: line for line in readings.read(tmp_path / "p.jsonl")}
    assert "unplugged" in lines["drift"].missing
    assert not lines["drift"].values
    assert lines["hessian"].values
    assert not lines["hessian"].missing


# what is no number


def spoilt() -> Federation:
    clients = copy.deepcopy(samples())
    clients[2][0].fill_(math.nan)
    return federation("fedlesam", clients=clients, on_client_error="drop")


def test_a_client_of_no_numbers(tmp_path: Path) -> None:
    fed, plain = spoilt(), spoilt()
    records = list(Watch(fed, attach(ALL, fed), tmp_path / "p.jsonl").train(3))
    assert [r.dropped for r in records] == [r.dropped for r in plain.run(3)]
    assert all(r.dropped for r in records)
    lines = readings.read(tmp_path / "p.jsonl")
    assert len(lines) == 4 + 4 + 4 + 2
    for line in lines:
        assert line.missing.endswith("the loss is not finite: that of 1 of 6 clients, client 2 the first"), line
        assert line.values == {}
    assert json.loads((tmp_path / "p.jsonl").read_text().splitlines()[0])["missing"]


def test_a_loss_that_is_no_number_is_not_flat() -> None:
    fed = spoilt()
    found = rise(GlobalLoss.of(fed), fed.weights, 0.1, 3)
    assert math.isnan(found.ascent)
    assert math.isnan(found.first_order)


def test_a_loss_that_explodes_within_the_ball_is_not_flat() -> None:
    class Cliff(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.0]))

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(self.w > 0.5, torch.full_like(self.w, math.nan), self.w) * x

    loss = GlobalLoss(Cliff(), [(torch.ones(1, 1), torch.zeros(1))], lambda output, _: output.mean())
    assert rise(loss, torch.tensor([0.0]), 0.1, 2).ascent == pytest.approx(0.1)
    assert rise(loss, torch.tensor([0.0]), 1.0, 2).ascent == math.inf


def test_a_hessian_of_nothing() -> None:
    """A linear loss has none: ARPACK calls the starting vector zero."""
    loss = GlobalLoss(nn.Linear(4, 1), [(torch.ones(3, 4), torch.zeros(3))], lambda output, _: output.mean())
    assert eigenvalues(loss, loss.model.weights.clone(), 2) == [0.0, 0.0]
    assert trace(loss, loss.model.weights.clone(), 2) == (0.0, 0.0)
    with pytest.raises(Unreadable, match="not finite"):
        eigenvalues(GlobalLoss.of(spoilt()), spoilt().weights, 2)


# the machine


class Broken(Probe):
    name: ClassVar[str] = "broken"
    error: ClassVar[BaseException] = RuntimeError("a probe's own")

    def measure(self, look: Look) -> tuple[Values, dict[str, Any]]:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no more"),
        torch.OutOfMemoryError("no more"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        WorkerLost("gone"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_machine_does_wrong_stops(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "error", error)
    with pytest.raises(type(error)):
        list(Watch(federation("fedavg"), [Broken(every=1)], tmp_path / "p.jsonl").train(1))
    assert not (tmp_path / "p.jsonl").exists()


def test_what_a_probe_does_wrong_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    list(Watch(federation("fedavg"), [Broken(every=1)], tmp_path / "p.jsonl").train(3))
    lines = readings.read(tmp_path / "p.jsonl")
    assert [line.missing for line in lines] == ["RuntimeError: a probe's own"] * 4
    assert caplog.text.count("the probe broken measured nothing") == 1


def test_a_later_reading_replaces_one_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    readings.put(path, readings.Reading(1, "hessian", {}, {"samples": 1000}, 0.1, "the loss is not finite"))
    readings.put(path, readings.Reading(1, "hessian", {"trace": 1.0}, {"samples": 996}, 0.1))
    assert [line.values for line in readings.read(path)] == [{"trace": 1.0}]


# runs


def exploding(**change: Any) -> RunConfig:
    small = {
        "clients": 6,
        "active": 3,
        "rounds": 3,
        "epochs": 1,
        "batch_size": 50,
        "model": "cnn",
        "algorithm": "fedsam",
    }
    given = {"lr": 20.0, "clip": 0.0, "on_client_error": "drop", "threads": 1}
    return configs.resolve(configs.update(RunConfig(), {**small, **given, **change}))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "x"
    settings = {"sharpness": "steps=2,", "hessian": "k=1,draws=2,", "drift": "", "estimate": ""}
    probe = " ".join(f"{name}:{more}every=1,samples=30" for name, more in settings.items())
    execute(exploding(probe=probe), path)
    return path


def test_a_run_that_explodes_goes_on_under_all_probes(run: Path, tmp_path: Path) -> None:
    execute(exploding(), tmp_path / "plain")
    plain, probed = ([{**r, "seconds": 0} for r in RunFolder(p).read_metrics()] for p in (tmp_path / "plain", run))
    assert plain == probed
    assert any("dropped" in r for r in probed), "it explodes"
    lines = readings.read(RunFolder(run).probes)
    assert len(lines) == 4 + 4 + 3 + 3
    assert any(line.missing for line in lines)
    assert all(line.values or line.missing for line in lines)


def test_the_page_and_the_command_tell_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = RunFolder(run).probes
    kept = file.read_text(encoding="utf-8")
    readings.put(file, readings.Reading(3, "hessian", {}, {"k": 9}, 0.1, "the <loss> is not finite"))
    try:
        notes = compare_runs([read_run(run)]).notes
        assert any("readings of the probe hessian lack something" in note for note in notes), notes
        cli.main(["report", str(run), "--out", str(tmp_path / "page")], standalone_mode=False)
    finally:
        file.write_text(kept, encoding="utf-8")
    monkeypatch.setattr(Hessian, "measure", Broken.measure)
    monkeypatch.setattr(Hessian, "error", Broken.error, raising=False)
    asked = ["probe", str(run), "--probe", "hessian:k=2,samples=30", "--tables", str(tmp_path / "tables")]
    cli.main(asked, standalone_mode=False)
    assert "hessian measured nothing: RuntimeError: a probe's own" in capsys.readouterr().out
    assert "RuntimeError" in (tmp_path / "tables" / "hessian.csv").read_text(encoding="utf-8")
    cli.main([*asked, "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["readings"][0]["missing"] == "RuntimeError: a probe's own"
    assert heard(federation("fedavg")) == list(range(6))
