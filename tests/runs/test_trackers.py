"""Live trackers: the observer without them, then each with its real library."""

import builtins
import importlib.util
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedlesam.cli import main
from fedlesam.core.evaluation import PerClient
from fedlesam.federation import Record
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.trackers import Tracked, numbers, wanted, watching

TINY = ["--clients", "6", "--active", "2", "--epochs", "1", "--batch-size", "50", "--model", "mlp:hidden=4"]
extras = pytest.mark.extras


def record(round: int = 0, **values: Any) -> Record:
    known: dict[str, Any] = {
        "round": round,
        "active": [0, 3],
        "train_loss": 1.5,
        "test_loss": None,
        "test_accuracy": 0.25,
        "lr": 0.1,
        "seconds": 0.5,
        "backward_passes": 7,
        "bytes_down": 10,
        "bytes_up": 20,
        "divergence": float("nan"),
    }
    return Record(**{**known, **values})


class Notebook:
    """A tracker that remembers, and fails where it is told to."""

    def __init__(self, run: Tracked, first: int, fails: str = "") -> None:
        self.run, self.first, self.fails = run, first, fails
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        if fails == "open":
            raise RuntimeError("no server")

    def see(self, step: int, values: dict[str, float]) -> None:
        if self.fails == "see" and step > 1:
            raise OSError("lost it")
        self.seen.append((step, values))

    def close(self) -> None:
        self.closed += 1
        if self.fails == "close":
            raise RuntimeError("stuck")


def test_a_tracker_gets_the_numbers_of_a_record() -> None:
    found = numbers(record(per_client=PerClient(mean=0.5, worst_tenth=0.25, spread=0.1)))
    assert found == {
        "train_loss": 1.5,
        "test_accuracy": 0.25,
        "lr": 0.1,
        "seconds": 0.5,
        "backward_passes": 7.0,
        "bytes_down": 10.0,
        "bytes_up": 20.0,
        "per_client/mean": 0.5,
        "per_client/worst_tenth": 0.25,
        "per_client/spread": 0.1,
    }, "what was not measured is left out"


def test_one_run_after_another(tmp_path: Path) -> None:
    """Each tracker opens with the first record, when the folder is there, and closes before the next run."""
    opened: list[Notebook] = []

    def start(run: Tracked, first: int) -> Notebook:
        opened.append(Notebook(run, first))
        return opened[-1]

    shown: list[int] = []
    with watching({"--x": start}) as watchers:
        see = watchers.watch(RunConfig(hyper={"rho": 0.5}), tmp_path / "a", lambda r: shown.append(r.round))
        assert opened == [], "nothing is written before the run has a folder"
        see(record(4))
        see(record(5))
        assert (opened[0].first, [step for step, _ in opened[0].seen]) == (5, [5, 6]), "rounds done"
        assert (opened[0].run.name, opened[0].run.settings["rho"]) == ("a", 0.5)
        watchers.watch(RunConfig(), tmp_path / "b", None)(record(0))
        assert (opened[0].closed, opened[1].closed) == (1, 0)
    assert [notebook.closed for notebook in opened] == [1, 1]
    assert shown == [4, 5]


@pytest.mark.parametrize(("fails", "seen"), [("open", []), ("see", [1]), ("close", [1, 2, 3])])
def test_a_tracker_that_fails_ends_alone(tmp_path: Path, fails: str, seen: list[int]) -> None:
    said: list[str] = []
    good = Notebook(Tracked("x", tmp_path, {}), 1)
    kept: list[Notebook] = []

    def bad(run: Tracked, first: int) -> Notebook:
        kept.append(Notebook(run, first, fails))
        return kept[-1]

    with watching({"--bad": bad, "--good": lambda run, first: good}, said.append) as watchers:
        see = watchers.watch(RunConfig(), tmp_path, None)
        for t in range(3):
            see(record(t))
    assert [step for step, _ in good.seen] == [1, 2, 3]
    assert [step for notebook in kept for step, _ in notebook.seen] == seen
    assert len(said) == 1, "it is said once"
    assert said[0].startswith("--bad stopped, the run continues without it: ")


def test_interrupts_are_not_swallowed(tmp_path: Path) -> None:
    class Interrupted(Notebook):
        def see(self, step: int, values: dict[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), watching({"--x": Interrupted}) as watchers:
        watchers.watch(RunConfig(), tmp_path, None)(record())


@pytest.mark.parametrize(
    ("flags", "extra"),
    [(["--tensorboard"], "tensorboard"), (["--mlflow", "http://x"], "mlflow"), (["--wandb"], "wandb")],
)
@pytest.mark.parametrize("command", [["run"], ["compare", "fedavg"]])
def test_a_missing_extra_names_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    flags: list[str],
    extra: str,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == extra else real(name, *a))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedlesam", *command, *TINY, "--rounds", "1", *flags])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert f"pip install 'fedlesam[{extra}]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "before anything is trained"


def test_no_tracker_is_imported_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def guarded(name: str, *args: Any, **keywords: Any) -> Any:
        assert name.split(".")[0] not in ("tensorboard", "mlflow", "wandb"), name
        return real(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", guarded)
    assert wanted(None, None, False) == {}
    fedlesam(monkeypatch, tmp_path, "run", *TINY, "--rounds", "1", "--out", "x", "-q")


def fedlesam(monkeypatch: pytest.MonkeyPatch, folder: Path, *args: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", ["fedlesam", *args])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code


def expected(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(r["round"] + 1, r[name]) for r in RunFolder(folder).read_metrics()]


NAMES = ("train_loss", "test_loss", "test_accuracy", "seconds", "backward_passes", "bytes_up", "divergence")


@extras
def test_tensorboard_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'fedlesam[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fedlesam(monkeypatch, tmp_path, "run", *TINY, "--rounds", "3", "--out", "x", "--tensorboard", "--quiet")
    both = ["compare", "fedavg", "fedsam", *TINY, "--rounds", "2", "--out", "c", "-q", "--tensorboard", "tb"]
    fedlesam(monkeypatch, tmp_path, *both)
    for run, where in (
        ("x", "x/tensorboard"),
        ("c/fedavg-seed0", "tb/fedavg-seed0"),
        ("c/fedsam-seed0", "tb/fedsam-seed0"),
    ):
        events = EventAccumulator(str(tmp_path / where))
        events.Reload()
        for name in NAMES:
            found = [(event.step, event.value) for event in events.Scalars(name)]
            assert [step for step, _ in found] == [step for step, _ in expected(tmp_path / run, name)]
            assert [v for _, v in found] == pytest.approx([v for _, v in expected(tmp_path / run, name)], rel=1e-6)


@extras
def test_mlflow_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow-skinny: pip install 'fedlesam[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    uri = (tmp_path / "mlruns").as_uri()
    args = [
        "compare",
        "fedavg",
        "fedlesam",
        *TINY,
        "--rounds",
        "2",
        "--rho",
        "0.05",
        "--out",
        "c",
        "-q",
        "--mlflow",
        uri,
    ]
    fedlesam(monkeypatch, tmp_path, *args)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("fedlesam")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"fedavg-seed0", "fedlesam-seed0"}
    for name, run in runs.items():
        assert run.info.status == "FINISHED"
        for metric in NAMES:
            found = sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, metric))
            assert found == expected(tmp_path / "c" / name, metric)
    assert runs["fedlesam-seed0"].data.params["rho"] == "0.05"
    assert runs["fedavg-seed0"].data.params["algorithm"] == "fedavg"


@extras
def test_mlflow_without_a_server_leaves_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow-skinny: pip install 'fedlesam[mlflow]'")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    fedlesam(monkeypatch, tmp_path, "run", *TINY, "--rounds", "2", "--out", "x", "--mlflow", "http://127.0.0.1:9")
    assert capsys.readouterr().err.count("--mlflow stopped, the run continues without it") == 1
    assert RunFolder(tmp_path / "x").read_summary()["state"] == "finished"


def log_entries(content: bytes) -> Iterator[bytes]:
    """Of a file of Weights & Biases: seven bytes, then LevelDB's log format, in blocks of 32 KiB."""
    at, entry = 7, b""
    while at + 7 <= len(content):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        entry += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""


@extras
def test_wandb_offline_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install 'fedlesam[wandb]'")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    fedlesam(monkeypatch, tmp_path, "run", *TINY, "--rounds", "3", "--out", "x", "--quiet", "--wandb")
    [path] = (tmp_path / "x" / "wandb").glob("offline-run-*/*.wandb")
    end, entries = time.monotonic() + 120, []
    while not any(entry.HasField("exit") for entry in entries):  # its own process writes, also after `finish`
        assert time.monotonic() < end, "never written"
        time.sleep(0.1)
        entries = [wandb_internal_pb2.Record.FromString(data) for data in log_entries(path.read_bytes())]
    name = next(entry.run.display_name for entry in entries if entry.HasField("run"))
    history = [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in entry.history.item}
        for entry in entries
        if entry.HasField("history")
    ]
    assert name == "x"
    for metric in NAMES:
        assert [(row["_step"], row[metric]) for row in history] == expected(tmp_path / "x", metric)


@extras
@pytest.mark.parametrize("flags", [["--tensorboard"], ["--wandb"]])
def test_weights_are_the_same_bits_when_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    pytest.importorskip(flags[0][2:], reason=f"needs {flags[0][2:]}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for out, more in (("a", []), ("b", flags)):
        fedlesam(
            monkeypatch, tmp_path, "run", "--algorithm", "fedlesam-s", *TINY, "--rounds", "3", "--out", out, "-q", *more
        )
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
