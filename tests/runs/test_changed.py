"""What was given is not what the run began with: refused with the difference, and nothing is lost."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedlesam as fl
from fedlesam.runs import given
from fedlesam.runs.config import RunConfig, resolve
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.reopen import open_run
from fedlesam.runs.runner import execute

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(12) % 3


class Drawn(Dataset[Any]):
    """Samples that are made when they are asked for, with noise by the global generators."""

    def __init__(self, shift: float = 0.0, own: bool = False) -> None:
        self.shift, self.own = shift, np.random.default_rng() if own else None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        noise = random.random() + float(torch.rand(())) if self.own is None else float(self.own.random())
        return X[place] + self.shift + noise, int(Y[place])


class Named(nn.Linear):
    def forward(self, **named: Tensor) -> Tensor:
        return super().forward(next(iter(named.values())))


def sampled(change: float = 0.0) -> list[Any]:
    x = X.clone()
    x[5, 2] += change
    return [(one, int(label)) for one, label in zip(x, Y, strict=True)]


CHANGED: dict[str, tuple[Any, Any]] = {
    "key of a dict": ({"left": X, "labels": Y}, {"right": X, "labels": Y}),
    "sample of a list": (sampled(), sampled(1.0)),
    "text of a list": ([{"left": X[i], "labels": 1, "note": "a"} for i in range(4)],) * 2,
    "dataset": (Drawn(), Drawn(0.5)),
    "array": ([(X[0].numpy(), 1)] * 9, [(X[1].numpy(), 1)] * 9),
}
CHANGED["text of a list"] = (CHANGED["text of a list"][0], [*CHANGED["text of a list"][1][:3], {"note": "b"}])


def federation(data: Any, metric: Callable[..., Any] | None = None, **more: Any) -> fl.Federation:
    torch.manual_seed(0)
    local = fl.LocalTraining(epochs=1, batch_size=6)
    metrics = {"mine": metric} if metric else {}
    task = fl.Task.classification(metrics=metrics)
    model = Named(4, 3) if isinstance(data, dict) else nn.Linear(4, 3)
    return fl.Federation(model, [data, data], "fedavg", local, task=task, **more)


@pytest.mark.parametrize("where", ["clients", "test"])
@pytest.mark.parametrize("case", [name for name in CHANGED if name != "text of a list"])
def test_other_contents_are_another_run(case: str, where: str, tmp_path: Path) -> None:
    before, after = CHANGED[case]
    first, second = (before, before), (after, before) if where == "clients" else (before, after)
    for data, test in (first, first):
        federation(data, test=test).fit(1, tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"holds another run \(data: you gave python-\w+, the folder has python-\w+"):
        federation(second[0], test=second[1]).fit(1, tmp_path, progress=False)


def test_texts_and_keys_of_samples_count() -> None:
    one, other = CHANGED["text of a list"]
    assert given._digest(given._samples(one)) == given._digest(given._samples(list(one)))
    assert given._digest(given._samples(one)) != given._digest(given._samples(other))


def test_the_fingerprint_of_pairs_is_that_of_earlier_versions() -> None:
    found = given.data_fingerprint(federation((X, Y), test=(X, Y)))
    assert found == given._digest([2, X, Y, X, Y, X, Y])


def test_samples_that_are_never_the_same_count_by_their_number(tmp_path: Path) -> None:
    for _ in range(2):
        federation(Drawn(own=True)).fit(1, tmp_path, progress=False)


def test_reading_leaves_random_numbers_as_they_were(tmp_path: Path) -> None:
    fed = federation(Drawn())
    random.seed(4)
    before = random.getstate(), torch.random.get_rng_state()
    given.data_fingerprint(fed)
    assert random.getstate() == before[0] and torch.equal(torch.random.get_rng_state(), before[1])


def test_of_many_samples_some_are_read() -> None:
    class Counted(Drawn):
        read = 0

        def __len__(self) -> int:
            return 5000

        def __getitem__(self, place: int) -> tuple[Tensor, int]:
            type(self).read += 1
            return super().__getitem__(place % 12)

    torch.manual_seed(0)
    fed = fl.Federation(nn.Linear(4, 3), [Counted()] * 300, "fedavg", active=1)
    Counted.read = 0
    given.data_fingerprint(fed)
    assert 100 <= Counted.read <= 4 * given.MADE
    given._samples([(X[0], 1)] * given.LISTED * 3)


def broken(outputs: Tensor, targets: Tensor) -> float:
    raise KeyError("typo")


def test_who_mends_a_metric_goes_on(tmp_path: Path) -> None:
    """Also where nothing was trained yet; weights do not depend on metrics."""
    calls: list[int] = []

    def late(outputs: Tensor, targets: Tensor) -> float:
        calls.append(len(targets))
        return 0.5 if len(calls) < 4 else broken(outputs, targets)

    good: Callable[..., Any] = lambda outputs, targets: 0.5  # noqa: E731
    whole = federation((X, Y), good, test=(X, Y))
    whole.fit(5, tmp_path / "whole", progress=False)
    for metric, done in ((broken, 0), (late, 2)):
        out = tmp_path / metric.__name__
        with pytest.raises(ValueError, match="the metric mine raises KeyError"):
            federation((X, Y), metric, test=(X, Y)).fit(5, out, progress=False, checkpoint_every=10)
        assert len(RunFolder(out).read_metrics()) == done
        seen: list[int] = []
        fed = federation((X, Y), good, test=(X, Y))
        fed.fit(5, out, progress=False, callbacks=[lambda record, seen=seen: seen.append(record.round)])
        assert seen == list(range(done, 5)) and torch.equal(fed.weights, whole.weights)
        assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
        federation((X, Y), good, test=(X, Y)).fit(5, out, progress=False)
        with pytest.raises(ValueError, match=r"holds another run \(metrics_given: "):
            federation((X, Y), late, test=(X, Y)).fit(5, out, progress=False)


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_changed_data_of_the_command_line_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shift = [0.0]

    def table() -> Any:
        x = X.clone()
        x[3, 1] += shift[0]
        return (x[:8], Y[:8]), (x[8:], Y[8:])

    monkeypatch.setattr(given, "table", table, raising=False)
    base: dict[str, Any] = {"data": "fedlesam.runs.given:table", "split": "iid", "clients": 2, "active": 2, "epochs": 1}
    out = tmp_path / "run"
    execute(resolve(RunConfig(rounds=2, **base)), out)
    before = contents(out)
    shift[0] = 1.0
    with pytest.raises(
        ValueError, match=r"another run \(data: you gave \w{12}, the folder has \w{12}\); use the settings, data and"
    ):
        execute(resolve(RunConfig(rounds=4, **base)), out)
    assert contents(out) == before, "a run that is refused stays as it is"
    with pytest.raises(ValueError, match="the data or the split are not those of the run: its split has the data"):
        open_run(out)
    shift[0] = 0.0
    execute(resolve(RunConfig(rounds=4, **base)), out)
    execute(resolve(RunConfig(rounds=4, **base)), tmp_path / "whole")
    assert contents(out)["model.safetensors"] == contents(tmp_path / "whole")["model.safetensors"]


def test_a_record_that_cannot_be_written_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedlesam.runs import journal

    fed = federation((X, Y))
    full = OSError(28, "No space left on device")

    def cannot(*_: object) -> int:
        raise full

    monkeypatch.setattr(journal.os, "pwrite", cannot)
    with pytest.raises(OSError, match=r"run: the record of a round cannot be written: .*free some space and repeat"):
        fed.fit(1, tmp_path / "run", progress=False)
