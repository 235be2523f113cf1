"""One run from its settings to its folder."""

import json
import math
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedlesam.core.checks import NotFinite
from fedlesam.data import load
from fedlesam.data.splits import make_split
from fedlesam.federation import Record
from fedlesam.models.catalogue import make_model
from fedlesam.runs import config as configs
from fedlesam.runs.build import build
from fedlesam.runs.config import RunConfig
from fedlesam.runs.evaluated import scores
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.runner import execute

FILES = {"config.toml", "versions.json", "split.safetensors", "metrics.jsonl", "model.safetensors", "summary.json"}
KEYS = {
    "round",
    "active",
    "train_loss",
    "test_loss",
    "test_accuracy",
    "lr",
    "seconds",
    "backward_passes",
    "bytes_down",
    "bytes_up",
    "divergence",
}


def tiny(**change: Any) -> RunConfig:
    small = {"clients": 6, "active": 2, "rounds": 3, "epochs": 1, "batch_size": 50, "model": "mlp:hidden=8"}
    return configs.resolve(RunConfig(**{"algorithm": "scaffold", **small, **change}))


def strictly(text: str) -> Any:
    """JSON as the standard has it: without NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [strictly(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("runs") / "deep" / "x"
    config = tiny()
    return config, path, execute(config, path)


def test_all_files_are_there_and_nothing_half_written(finished: tuple[RunConfig, Path, dict[str, Any]]) -> None:
    names = {p.name for p in finished[1].iterdir()}
    assert names == FILES | {"run.lock", "checkpoints"}


def test_no_pickle_in_the_folder(finished: tuple[RunConfig, Path, dict[str, Any]]) -> None:
    for file in finished[1].rglob("*"):
        if file.is_file():
            start = file.read_bytes()[:2]
            assert start[:1] != b"\x80", f"{file} starts as a pickle"
            assert start != b"PK", f"{file} starts as a zip, as torch.save writes it"
            assert file.suffix in (".toml", ".json", ".jsonl", ".safetensors") or file.name == "run.lock", file
    assert strictly((finished[1] / "run.lock").read_text())["pid"] == os.getpid()


def test_metrics_have_exactly_the_documented_keys(finished: tuple[RunConfig, Path, dict[str, Any]]) -> None:
    _, path, _ = finished
    records = records_of(path)
    assert [record["round"] for record in records] == [0, 1, 2]
    parameters = 64 * 8 + 8 + 8 * 10 + 10
    for t, record in enumerate(records):
        assert set(record) == KEYS
        assert len(set(record["active"])) == 2
        assert set(record["active"]) <= set(range(6))
        assert record["lr"] == pytest.approx(0.1 * 0.998**t)
        steps = math.ceil((1437 // 6) / 50)
        assert record["backward_passes"] == 2 * steps
        assert record["bytes_down"] == record["bytes_up"] == 2 * 2 * 4 * parameters, "scaffold: two vectors each way"
        assert 0 < record["test_accuracy"] < 1
        assert record["train_loss"] > 0
        assert record["test_loss"] > 0
        assert record["divergence"] > 0
        assert record["seconds"] > 0
    assert len({tuple(record["active"]) for record in records}) > 1


def test_the_summary_follows_from_the_metrics(finished: tuple[RunConfig, Path, dict[str, Any]]) -> None:
    config, path, returned = finished
    summary, records = strictly((path / "summary.json").read_text()), records_of(path)
    assert summary == strictly(json.dumps(returned))
    tested = [record["test_accuracy"] for record in records]
    assert summary["state"] == "finished"
    assert "why" not in summary
    assert summary["algorithm"] == "scaffold"
    assert summary["rounds"] == 3
    assert summary["accuracy"] == {
        "last": tested[-1],
        "mean_of_last": pytest.approx(sum(tested) / 3),
        "evaluations_in_mean": 3,
        "best": max(tested),
        "best_round": tested.index(max(tested)),
    }
    for name in ("backward_passes", "bytes_down", "bytes_up", "seconds"):
        assert summary[name] == pytest.approx(sum(record[name] for record in records), rel=1e-12)
    assert summary["parameters"] == 610
    assert summary["client_memory_bytes"] == 4 * 610, "scaffold keeps one vector"
    split = make_split(config.split, load("digits"), 6, 0)
    known = {"scheme": "dirichlet:0.1", "hash": split.hash, "dropped": 3, "repeats": 0}
    assert summary["split"] == {**known, "data": sha256(b"digits-1797").hexdigest()[:12]}


def test_accuracies_by_hand() -> None:
    records = [{"round": t, "test_accuracy": value} for t, value in enumerate([0.5, 0.9, 0.9] + [0.1] * 9)]
    records.insert(6, {"round": 99})
    found = scores(records)["accuracy"]
    assert found["last"] == 0.1
    assert found["evaluations_in_mean"] == 10
    assert found["mean_of_last"] == pytest.approx((0.9 + 0.1 * 9) / 10)
    assert (found["best"], found["best_round"]) == (0.9, 1), "the first of the best"
    assert scores([]) == {}
    assert scores([{"round": 0}]) == {}


def test_the_model_gives_the_last_accuracy(finished: tuple[RunConfig, Path, dict[str, Any]]) -> None:
    config, path, summary = finished
    fresh = make_model(config.model, (1, 8, 8), 10, seed=99)
    fresh.load_state_dict(load_file(path / "model.safetensors"))
    data = load("digits")
    x, y = data.test_shard().tensors()
    with torch.no_grad():
        accuracy = (fresh.eval()(x).argmax(1) == y).double().mean().item()
    assert accuracy == summary["accuracy"]["last"]


def test_buffers_are_in_the_model(tmp_path: Path) -> None:
    config = tiny(model="resnet18:width=2,norm=batch", rounds=1, clients=2, active=1)
    summary = execute(config, tmp_path / "x")
    saved = load_file(tmp_path / "x" / "model.safetensors")
    assert saved["bn1.running_mean"].abs().sum() > 0
    assert saved["bn1.num_batches_tracked"] == math.ceil(718 / 50)
    fresh = make_model(config.model, (1, 8, 8), 10, seed=99)
    fresh.load_state_dict(saved)
    x, y = load("digits").test_shard().tensors()
    with torch.no_grad():
        assert (fresh.eval()(x).argmax(1) == y).double().mean().item() == summary["accuracy"]["last"]


def test_the_config_reproduces_the_run_bit_for_bit(
    finished: tuple[RunConfig, Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, path, _ = finished
    again = RunFolder(path).read_config()
    assert configs.resolve(again) == again
    execute(again, tmp_path / "y")
    assert (tmp_path / "y" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    assert (tmp_path / "y" / "config.toml").read_bytes() == (path / "config.toml").read_bytes()
    assert (tmp_path / "y" / "split.safetensors").read_bytes() == (path / "split.safetensors").read_bytes()
    ours, theirs = records_of(path), records_of(tmp_path / "y")
    for record in [*ours, *theirs]:
        record.pop("seconds")
    assert ours == theirs


def test_another_seed_is_another_run(finished: tuple[RunConfig, Path, dict[str, Any]], tmp_path: Path) -> None:
    execute(tiny(seed=1), tmp_path / "y")
    assert load_file(tmp_path / "y" / "model.safetensors")["1.weight"].shape == (8, 64)
    assert (tmp_path / "y" / "model.safetensors").read_bytes() != (finished[1] / "model.safetensors").read_bytes()


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def results(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All but who held the lock last."""
    return {path: content for path, content in contents(folder).items() if not path.endswith("run.lock")}


def test_a_finished_folder_is_only_read(finished: tuple[RunConfig, Path, dict[str, Any]]) -> None:
    config, path, summary = finished
    before = contents(path)
    seen: list[Record] = []
    assert execute(config, path, watch=seen.append) == strictly(json.dumps(summary))
    assert seen == []
    assert contents(path) == before


def test_a_watcher_sees_every_round(tmp_path: Path) -> None:
    seen: list[Record] = []
    execute(tiny(rounds=2), tmp_path / "x", watch=seen.append)
    assert [record.round for record in seen] == [0, 1]
    assert [json.loads(json.dumps(record.as_dict())) for record in seen] == records_of(tmp_path / "x")


def test_evaluation_interval_and_per_client(tmp_path: Path) -> None:
    summary = execute(tiny(rounds=4, evaluate_every=2, per_client=True), tmp_path / "x")
    records = records_of(tmp_path / "x")
    assert [set(record) for record in records] == [
        KEYS - {"test_loss", "test_accuracy"},
        KEYS | {"per_client"},
        KEYS - {"test_loss", "test_accuracy"},
        KEYS | {"per_client"},
    ]
    per_client = records[-1]["per_client"]
    assert set(per_client) == {"mean", "worst_tenth", "spread"}
    assert summary["per_client"] == per_client
    assert summary["accuracy"]["evaluations_in_mean"] == 2
    config = tiny(rounds=4)
    fresh = make_model(config.model, (1, 8, 8), 10, seed=99)
    fresh.load_state_dict(load_file(tmp_path / "x" / "model.safetensors"))
    data = load("digits")
    x, y = data.test_shard().tensors()
    with torch.no_grad():
        right = (fresh.eval()(x).argmax(1) == y).double()
    by_class = torch.stack([right[y == c].mean() for c in range(10)])
    labels = data.train.y
    shares = [
        float(by_class[labels[torch.from_numpy(part)]].mean())
        for part in make_split("dirichlet:0.1", data, 6, 0).clients
    ]
    assert per_client["mean"] == pytest.approx(sum(shares) / 6)
    assert per_client["worst_tenth"] == pytest.approx(min(shares))
    assert per_client["spread"] == pytest.approx(torch.tensor(shares).double().std(correction=0).item(), rel=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "fedsam", "hyper": {"rho": -1.0}},
        {"algorithm": "feddyn", "hyper": {"lr_g": 2.0}},
        {"lr": 0.0},
        {"lr": -1.0},
        {"rounds": 0},
        {"rounds": -3},
        {"seed": -1},
        {"batch_size": 0},
        {"epochs": 0},
        {"epochs": "5-1"},
        {"active": 0},
        {"active": 7},
        {"active": 1.5},
        {"active": 0.0},
        {"clients": 0},
        {"clients": 2000},
        {"evaluate_every": 0},
        {"threads": 0},
        {"clip_scope": "all"},
        {"weighting": "examples"},
        {"weighting": "size"},
        {"split": "dirichlet:0"},
        {"split": "pathological:11"},
        {"split": "pathological:9", "clients": 300},
        {"split": "file:nothing"},
        {"model": "nothing"},
        {"data": "nothing"},
        {"momentum": 1.0},
        {"clip": -1.0},
    ],
    ids=str,
)
def test_bad_settings_make_no_folder(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        execute(tiny(**change), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_stop_being_finite_keep_the_good_rounds(tmp_path: Path) -> None:
    config = tiny(algorithm="fedavg", lr_decay=1e25, clip=0.0, on_client_error="stop")
    with pytest.raises(NotFinite) as stop:
        execute(config, tmp_path / "x")
    folder = RunFolder(tmp_path / "x")
    assert stop.value.round == 1
    summary, records = strictly(folder.summary.read_text()), records_of(folder.path)
    assert [record["round"] for record in records] == [0]
    assert summary["state"] == "stopped"
    assert f"round 1, client {stop.value.client}" in summary["why"]
    assert summary["rounds"] == 1
    assert summary["accuracy"]["last"] == records[0]["test_accuracy"]
    good = build(config).federation
    good.round()
    for name, tensor in load_file(folder.model).items():
        assert torch.equal(tensor, good.model.state_dict()[name]), "the model of the last good round"


def test_a_run_that_fails_at_once_is_readable(tmp_path: Path) -> None:
    with pytest.raises(NotFinite):
        execute(tiny(lr=1e30, clip=0.0, on_client_error="stop"), tmp_path / "x")
    assert records_of(tmp_path / "x") == []
    summary = strictly((tmp_path / "x" / "summary.json").read_text())
    assert (summary["state"], summary["rounds"]) == ("stopped", 0)
    assert "accuracy" not in summary
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "x" / "model.safetensors").values())


def test_an_interrupt_keeps_the_good_rounds(tmp_path: Path) -> None:
    def stop(record: Record) -> None:
        if record.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(tiny(rounds=50), tmp_path / "x", watch=stop)
    summary = strictly((tmp_path / "x" / "summary.json").read_text())
    assert (summary["state"], summary["rounds"]) == ("interrupted", 2)
    assert len(records_of(tmp_path / "x")) == 2
    assert {p.name for p in (tmp_path / "x").iterdir()} >= FILES


def test_overwrite_replaces_another_run(tmp_path: Path) -> None:
    execute(tiny(rounds=2), tmp_path / "x")
    execute(tiny(rounds=1, algorithm="fedavg"), tmp_path / "x", overwrite=True)
    assert len(records_of(tmp_path / "x")) == 1
    assert RunFolder(tmp_path / "x").read_config().algorithm == "fedavg"


def test_a_bad_config_does_not_harm_the_run_it_would_replace(tmp_path: Path) -> None:
    execute(tiny(rounds=1), tmp_path / "x")
    before = results(tmp_path / "x")
    with pytest.raises(ValueError):
        execute(tiny(lr=-1.0), tmp_path / "x", overwrite=True)
    assert results(tmp_path / "x") == before


def test_a_test_loss_that_is_not_finite_is_not_written_as_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blows_up.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(64, 10)\n"
        "    def forward(self, x):\n"
        "        y = self.fc(x.flatten(1))\n"
        "        return y if self.training else y * float('inf')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    execute(tiny(model="blows_up:Net", rounds=1), tmp_path / "x")
    assert len(records_of(tmp_path / "x")) == 1
