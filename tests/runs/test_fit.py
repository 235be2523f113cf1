"""Runs made in Python: the folder of the command line's, resumed, extended, stopped early."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlesam as fl
from fedlesam.runs.checkpoint import Checkpoints
from fedlesam.runs.folder import RunFolder

SCRIPT = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from test_fit import federation
def die(record):
    if record.round == 3:
        os.kill(os.getpid(), signal.SIGKILL)
federation().fit(6, sys.argv[2], callbacks=[die], checkpoint_every=2)
"""


def clients(seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(12, 4, generator=draw), torch.randint(3, (12,), generator=draw)) for _ in range(4)]


def federation(name: str = "fedlesam-s", seed: int = 1, **settings: Any) -> fl.Federation:
    torch.manual_seed(0)
    local = fl.LocalTraining(**{"epochs": 1, "batch_size": 5, "lr": 0.2, **settings.pop("local", {})})
    given = {"active": 2, "test": clients(9)[0], **settings}
    return fl.Federation(nn.Linear(4, 3), clients(seed), name, local, **given)


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = federation(), federation()
    history = one.fit(4)
    list(other.run(4))
    assert torch.equal(one.weights, other.weights) and len(history) == 4 and one.fit(4) == history
    assert not list(tmp_path.iterdir())


def test_the_folder_is_a_run_folder(tmp_path: Path) -> None:
    fed = federation()
    history = fed.fit(3, tmp_path / "run", progress=False)
    folder = RunFolder(tmp_path / "run")
    assert folder.is_finished() and len(history) == len(folder.read_metrics()) == 3
    config = folder.read_config()
    assert (config.algorithm, config.rounds, config.active, config.lr, config.split) == (
        "fedlesam-s",
        3,
        2,
        0.2,
        "python",
    )
    assert config.hyper["rho"] == 0.1
    again = federation()
    seen: list[int] = []
    assert len(again.fit(3, tmp_path / "run", callbacks=[lambda r: seen.append(r.round)])) == 3 and not seen
    assert torch.equal(again.weights, fed.weights) and again.history[-1].test_accuracy == history[-1].test_accuracy


def test_it_resumes_after_a_kill(tmp_path: Path) -> None:
    whole = federation()
    whole.fit(6, tmp_path / "whole", progress=False)
    run = tmp_path / "run"
    killed = subprocess.run([sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(run)], env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL and not RunFolder(run).is_finished()
    seen: list[int] = []
    again = federation()
    history = again.fit(6, run, callbacks=[lambda r: seen.append(r.round)], progress=False)
    assert seen[0] == 2 and [record.round for record in history] == [0, 1, 2, 3, 4, 5]
    assert torch.equal(again.weights, whole.weights) and lines(run) == lines(tmp_path / "whole")


def test_an_interrupt_says_what_resumes_it(tmp_path: Path) -> None:
    whole, fed = federation(), federation()
    whole.fit(4, tmp_path / "whole", progress=False)
    run = tmp_path / "run"
    said = rf"^interrupted by SIGINT; the checkpoint after round 2 is in {run}: the same call resumes it$"
    with pytest.raises(KeyboardInterrupt, match=said):
        fed.fit(4, run, callbacks=[lambda record: fed.request_stop() if record.round == 1 else None], progress=False)
    fed.fit(4, run, progress=False)
    assert torch.equal(fed.weights, whole.weights) and lines(run) == lines(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt, match=rf"^interrupted by SIGINT; all 5 rounds of {run} are finished$"):
        fed.fit(5, run, callbacks=[lambda record: fed.request_stop()], progress=False)
    other = federation()
    with pytest.raises(
        KeyboardInterrupt, match=rf"after round 1 is in {run}: the same call without overwriting resumes it"
    ):
        other.fit(4, run, callbacks=[lambda record: other.request_stop()], progress=False, overwrite=True)


def test_more_rounds_extend_a_finished_run_with_the_bits_of_a_long_one(tmp_path: Path) -> None:
    long = federation()
    long.fit(7, tmp_path / "long", progress=False)
    federation().fit(3, tmp_path / "run", progress=False)
    again = federation()
    again.fit(7, tmp_path / "run", progress=False)
    assert torch.equal(again.weights, long.weights) and lines(tmp_path / "run") == lines(tmp_path / "long")
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "long")]
    assert models[0] == models[1]
    assert len(Checkpoints(tmp_path / "run" / "checkpoints").found()) == 1
    same = federation()  # in one process, and for an object that has trained
    same.fit(2, tmp_path / "same", progress=False)
    same.fit(7, tmp_path / "same", progress=False)
    assert torch.equal(same.weights, long.weights) and len(same.history) == 7


def test_without_its_last_checkpoint_a_run_is_not_extended(tmp_path: Path) -> None:
    federation().fit(2, tmp_path, keep_last=False, progress=False)
    with pytest.raises(ValueError, match=r"finished run of 2 rounds without a checkpoint to resume from \(.*--no-keep"):
        federation().fit(3, tmp_path, progress=False)
    assert RunFolder(tmp_path).is_finished()


def test_a_schedule_that_ends_is_not_extended(tmp_path: Path) -> None:
    federation(local={"lr": "cosine:3"}).fit(3, tmp_path, progress=False)
    with pytest.raises(ValueError, match="the schedule was made for fewer, so a run of more rounds is another run"):
        federation(local={"lr": "cosine:3"}).fit(4, tmp_path, progress=False)
    assert RunFolder(tmp_path).is_finished()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 2}, "data: you gave python-"),
        ({"local": {"lr": 0.3}}, "lr: you gave 0.3, the folder has 0.2"),
        ({"local": {"lr": lambda t: 0.2}}, "lr_function: "),
        ({"active": 3}, "active: you gave 3, the folder has 2"),
        ({"name": "fedavg"}, "algorithm: you gave fedavg, the folder has "),
        ({"task": fl.Task.classification(metrics={"mine": lambda o, t: 0.0})}, "task_given: "),
        ({"sampling": lambda t, rng, n, k: [0, 1]}, "sampling_function: "),
    ],
)
def test_another_run_is_refused_with_the_difference(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    federation().fit(1, tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"holds another run \(.*") as error:
        federation(**change).fit(1, tmp_path, progress=False)
    assert said in str(error.value)


def test_functions_differ_by_their_code_and_what_they_enclose(tmp_path: Path) -> None:
    def rate(start: float) -> Any:
        return lambda t: start * 0.9**t

    federation(local={"lr": rate(0.1)}).fit(1, tmp_path, progress=False)
    federation(local={"lr": rate(0.1)}).fit(1, tmp_path, progress=False)
    with pytest.raises(ValueError, match="lr_function"):
        federation(local={"lr": rate(0.2)}).fit(1, tmp_path, progress=False)


def test_rounds_that_are_not_in_the_folder_are_refused(tmp_path: Path) -> None:
    fed = federation()
    fed.round()
    with pytest.raises(ValueError, match="has already trained 1 rounds that are not in this folder"):
        fed.fit(3, tmp_path / "run", progress=False)


@pytest.mark.parametrize("out", [None, "run"])
def test_it_ends_when_the_metric_is_good_enough(tmp_path: Path, out: str | None) -> None:
    plain = federation().fit(8)
    target = sorted(record.train_loss for record in plain)[3]
    first = next(record.round for record in plain if record.train_loss <= target)
    fed = federation()
    history = fed.fit(8, out and tmp_path / out, stop_when=f"train_loss<={target!r}", progress=False)
    assert len(history) == first + 1
    if out is not None:
        assert RunFolder(tmp_path / out).read_summary()["why"].startswith("train_loss")
        assert (
            len(federation().fit(8, tmp_path / out, stop_when=f"train_loss<={target!r}", progress=False)) == first + 1
        )


def test_patience_counts_evaluations_without_a_better_metric() -> None:
    history = federation("fedavg", local={"lr": 1e-7}).fit(30, patience=3, progress=False)
    assert len(history) == 4


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"stop_when": "accuracy"}, r"expected a metric, a sign and a number"),
        ({"stop_when": "f1>=0.5"}, "there is no 'f1' in this run; it measures train_loss, loss, accuracy"),
        ({"patience": 0}, "patience must be a whole number from 1"),
        ({"probe": "sharpness"}, "need a run folder"),
    ],
)
def test_mistakes_are_said_before_anything_is_trained(settings: dict[str, Any], why: str) -> None:
    fed = federation()
    with pytest.raises(ValueError, match=why):
        fed.fit(2, **settings)
    assert fed.state.round == 0


def test_sampling_by_a_function_of_ones_own(tmp_path: Path) -> None:
    def draw(round: int, rng: np.random.Generator, clients: int, active: int) -> list[int]:
        return [round % clients, (round + 1 + int(rng.integers(clients - 1))) % clients]

    one, other = federation(sampling=draw), federation(sampling=draw)
    assert [r.active for r in one.fit(5, progress=False)] == [r.active for r in other.fit(5, tmp_path, progress=False)]
    with pytest.raises(ValueError, match=r"sampling\(round=0\): active names clients outside 0 to 3: \[9\]"):
        federation(sampling=lambda t, rng, n, k: [9]).round()


def test_a_log_says_at_once_what_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    federation().fit(3)
    first, second, *_, last = capsys.readouterr().err.splitlines()
    assert first == "fedlesam-s: 3 rounds to train; the next line comes after the first"
    assert second.startswith("fedlesam-s  round 1/3  test accuracy ") and second.endswith(" left")
    assert last.startswith("fedlesam-s  round 3/3")


def test_the_page_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every snippet of docs/python-runs.md, in its order, in an empty folder."""
    page = (Path(__file__).parents[2] / "docs" / "python-runs.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert len(snippets) == 5
    monkeypatch.chdir(tmp_path)
    exec("\n".join(snippets), {})
    assert RunFolder(Path("runs/mine")).read_summary()["rounds"] == 8


def test_a_callback_that_trains_is_refused(tmp_path: Path) -> None:
    """The folder stays one that can be resumed."""
    fed = federation()
    with pytest.raises(ValueError, match="a callback has trained the federation to round 2; fit does that"):
        fed.fit(4, tmp_path / "run", callbacks=[lambda record: fed.round()], progress=False)
    again, whole = federation(), federation()
    again.fit(4, tmp_path / "run", progress=False)
    whole.fit(4, progress=False)
    assert torch.equal(again.weights, whole.weights) and len(lines(tmp_path / "run")) == 4


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/run: cannot be made: Not a directory; choose another folder with --out"):
        federation().fit(1, tmp_path / "file" / "run", progress=False)
