"""The outside anchor: its network, its settings, and all of it at the smallest scale."""

from collections.abc import Callable
from pathlib import Path

import torch

from reproduction import anchor
from reproduction.scales import SCALES

Call = Callable[..., int | str | None]


def test_the_network_is_lenet_5() -> None:
    model = anchor.lenet5((3, 32, 32), 10)
    assert [tuple(p.shape) for p in model.parameters() if p.ndim > 1] == [
        (6, 3, 5, 5),
        (16, 6, 5, 5),
        (120, 400),
        (84, 120),
        (10, 84),
    ]
    assert anchor.lenet5((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_the_settings_are_the_baselines() -> None:
    config = anchor.config(SCALES["cpu"], "cifar10", "Dirichlet .5", 1, None)
    assert (config.algorithm, config.clients, config.active, config.epochs, config.rounds) == ("fedavg", 10, 10, 10, 50)
    assert (config.lr, config.lr_decay, config.momentum, config.weight_decay) == (0.01, 1.0, 0.9, 1e-5)
    assert (config.batch_size, config.weighting, config.split) == (64, "examples", "dirichlet-by-class:0.5")
    assert not config.clip and config.augment is False


def test_all_of_it_at_the_smallest_scale(call: Call, tmp_path: Path) -> None:
    asked = ("anchor-niid", "--scale", "smoke", "--seeds", "1", "--out", str(tmp_path), "-q")
    assert not call(*asked)
    text = (tmp_path / "results" / "anchor-niid.md").read_text()
    assert "cifar10, iid" in text and "71.32" in text and "not all runs" not in text
    assert not call(*asked), "a second call trains nothing"
