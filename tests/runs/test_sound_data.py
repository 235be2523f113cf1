"""Data and settings that cannot be meant are refused with a sentence: what, where, and the remedy."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from worlds import federation, mlp, samples

from fedlesam import Federation, LocalTraining, NotFinite
from fedlesam.cli import main
from fedlesam.data._load import load_digits
from fedlesam.data.splits import make_split
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.costs import predict

X, Y = samples((6,))[0]


class Made(Dataset[Any]):
    """Samples that are made when they are asked for."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i], self.y[i]


def spoilt(values: torch.Tensor, sample: int, value: float = math.nan) -> torch.Tensor:
    values = values.clone()
    values[sample] = value
    return values


def with_client(*client: torch.Tensor, **settings: Any) -> Federation:
    return federation("fedavg", clients=[(X, Y), client], **settings)


def regression(y: torch.Tensor, outputs: int = 1, **settings: Any) -> Federation:
    return federation("fedavg", model=mlp((5, outputs)), clients=[(X, y)], **settings)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "regression": (lambda: regression(torch.randn(6, 1)), r"one output.*cross-entropy, would always be 0.*mse_loss"),
    "regression, flat": (lambda: regression(torch.randn(6)), r"one output.*mse_loss"),
    "two classes, one output": (lambda: regression(torch.tensor([0, 1] * 3)), r"an output for each class"),
    "regression without an axis": (
        lambda: federation("fedavg", model=nn.Sequential(mlp((5, 1)), nn.Flatten(0)), clients=[(X, torch.randn(6))]),
        r"one output.*mse_loss",
    ),
    "regression of three": (
        lambda: regression(torch.randn(6), 3),
        r"client 0: y is torch.float32.*y.long\(\).*mse_loss",
    ),
    "float labels": (lambda: with_client(X, Y.float()), r"client 1: y is torch.float32, .*give y.long\(\)"),
    "int32 labels": (lambda: with_client(X, Y.int()), r"client 1: y is torch.int32, .* takes int64; give y.long\(\)"),
    "uint8 labels": (lambda: with_client(X, Y.byte()), r"client 1: y is torch.uint8, .* takes int64; give y.long\(\)"),
    "bool labels": (lambda: with_client(X, Y > 0), r"client 1: y is torch.bool"),
    "labels in a column": (
        lambda: with_client(X, Y[:, None]),
        r"client 1: y has the shape \(6, 1\), and cross-entropy takes \(6,\); give y.squeeze\(1\)",
    ),
    "one-hot labels": (
        lambda: with_client(X, nn.functional.one_hot(Y, 3)),
        r"client 1: y has the shape \(6, 3\), and cross-entropy takes \(6,\)",
    ),
    "labels of the test set": (lambda: federation("fedavg", test=(X, Y.int())), r"the test set: y is torch.int32"),
    "made labels": (
        lambda: federation("fedavg", clients=[Made(X, Y.int())]),
        r"client 0: y is torch.int32, .*give y.long\(\)",
    ),
    "inputs of another precision": (
        lambda: federation("fedavg", model=mlp(dtype=torch.float32)),
        r"shape \(1, 5\) and dtype torch.float64, as client 0 has: its weights are torch.float32, give x.to\(torch.f",
    ),
    "one client of another precision": (
        lambda: with_client(X.float(), Y),
        r"client 1: x is torch.float32, but torch.float64 for client 0; use x.to\(torch.float64\)",
    ),
    "NaN in a client": (
        lambda: with_client(spoilt(X, 4), Y),
        r"client 1: x of sample 4 is not finite; repair the sample or remove it",
    ),
    "infinity in a client": (lambda: with_client(spoilt(X, 2, -math.inf), Y), r"client 1: x of sample 2 is not finite"),
    "NaN in a data set": (
        lambda: federation("fedavg", clients=[TensorDataset(spoilt(X, 3), Y)]),
        r"client 0: x of sample 3 is not finite",
    ),
    "NaN in a target": (
        lambda: regression(spoilt(torch.randn(6, 1), 5), local=LocalTraining(loss=nn.functional.mse_loss)),
        r"client 0: y of sample 5 is not finite",
    ),
    "NaN in the test set": (
        lambda: federation("fedavg", test=(spoilt(X, 1), Y), on_client_error="drop"),
        r"the test set: x of sample 1 is not finite",
    ),
    "NaN in a made test set": (
        lambda: federation("fedavg", test=Made(spoilt(X, 1), Y)).round(),
        r"the samples evaluated on: x of sample 1 is not finite",
    ),
    "too many threads": (lambda: federation("fedavg", threads=10**9), r"threads must be at most 1024, got 1000000000"),
    "a decay that explodes": (
        lambda: list(federation("fedavg", local=LocalTraining(lr_decay=1e30)).run(15)),
        r"lr_decay 1e\+30 makes the learning rate inf after 15 rounds, from 0.1; give one nearer to 1",
    ),
    "a decay to nothing": (
        lambda: list(federation("scaffold", local=LocalTraining(lr_decay=1e-30)).run(15)),
        r"lr_decay 1e-30 makes the learning rate 0 after 15 rounds",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str) -> None:
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_targets_that_the_default_loss_takes() -> None:
    probabilities = nn.functional.one_hot(Y, 3).double()
    assert federation("fedavg", clients=[(X, Y)]).round().train_loss == pytest.approx(
        federation("fedavg", clients=[(X, probabilities)]).round().train_loss
    )
    pixels = nn.Sequential(nn.Conv2d(1, 3, 1))
    clients = [(torch.randn(4, 1, 2, 2), torch.randint(3, (4, 2, 2)))]
    assert math.isfinite(Federation(pixels, clients).round().train_loss)


@pytest.mark.parametrize("workers", [1, 2])
def test_samples_that_are_made_blame_no_learning_rate(workers: int) -> None:
    clients = [Made(X, Y), Made(spoilt(X, 4), Y)]
    with federation("fedavg", clients=clients, workers=workers) as fed:
        with pytest.raises(
            NotFinite, match=r"client 1: the loss .* not finite; its data: x of sample 4 is not finite"
        ) as e:
            fed.round()
        assert "learning rate" not in str(e.value)


def test_a_client_to_be_dropped_may_have_them() -> None:
    fed = federation("fedavg", clients=[(X, Y), (spoilt(X, 4), Y)], on_client_error="drop")
    assert fed.round().dropped is not None


# Settings


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400"])
@pytest.mark.parametrize(
    "flag",
    ["lr", "lr-decay", "weight-decay", "clip", "momentum", "dropout", "max-update-norm", "rho", "held-out", "active"],
)
def test_numbers_that_are_none_are_usage_errors(
    flag: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (value, f"{value}%") if flag in ("held-out", "active") else (value,):
        for arguments in ([f"--{flag}={text}"], ["--set", f"{flag}={text}"]):
            monkeypatch.setattr(sys, "argv", ["fedlesam", "run", *arguments])
            with pytest.raises(SystemExit) as end:
                main()
            said = capsys.readouterr().err
            assert end.value.code == 2 and flag in said and "expected" in said and repr(text) in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr_decay": 1e30, "rounds": 15}, "makes the learning rate inf"),
        ({"held_out": math.inf}, "--held-out inf: expected a count"),
        ({"held_out": math.nan}, "--held-out nan: expected a count"),
        ({"held_out": 1e300}, "--held-out 1e.300: expected a count"),
        ({"split": "pathological:1e300"}, "pathological takes a whole number of classes"),
    ],
)
def test_settings_of_a_file(settings: dict[str, Any], said: str) -> None:
    from fedlesam.runs.build import build

    with pytest.raises(ValueError, match=said):
        build(configs.resolve(RunConfig(**settings)))


@pytest.mark.parametrize("name", ["ids.npy", "ids.txt", "ids.csv"])
def test_a_sample_without_a_client(name: str, tmp_path: Path) -> None:
    digits = load_digits()
    ids = np.arange(len(digits.train)) % 5 + 0.0
    ids[7] = math.nan
    if name.endswith("npy"):
        np.save(tmp_path / name, ids)
    elif name.endswith("txt"):
        np.savetxt(tmp_path / name, ids)
    else:
        (tmp_path / name).write_text("".join(f"{i},{'' if np.isnan(v) else int(v)}\n" for i, v in enumerate(ids)))
    with pytest.raises(ValueError, match=rf"{name}: sample 7 \(row 8 .* has no client id"):
        make_split(f"by:{tmp_path / name}", digits, None, 0)


def test_dropout_is_part_of_the_cost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fed = federation("scaffold", dropout=0.25)
    without, half = (predict(RunConfig(rounds=4), federation("scaffold", dropout=p)) for p in (0.0, 0.5))
    assert half.backward_passes_per_round == without.backward_passes_per_round / 2
    assert half.bytes_up_per_round == without.bytes_up_per_round / 2
    assert half.bytes_down_per_round == without.bytes_down_per_round, "they are sent the model, and do not answer"
    records = list(fed.run(400))
    predicted = predict(RunConfig(rounds=400), fed)
    assert predicted.bytes_up_per_round == pytest.approx(sum(r.bytes_up for r in records) / 400, rel=0.05)
    monkeypatch.setattr(sys, "argv", ["fedlesam", "cost", "--dropout", "0.5"])
    with pytest.raises(SystemExit):
        main()
    assert "4 active a round, 2 answer (--dropout 0.5)" in capsys.readouterr().out
