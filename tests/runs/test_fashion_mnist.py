"""Real pictures from a distribution's package, end to end: they are found, split, trained on and learnt."""

from pathlib import Path

import pytest

from fedlesam.runs.config import RunConfig, resolve
from fedlesam.runs.runner import execute

PACKAGE = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.skipif(not PACKAGE.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_fashion_mnist_trains(tmp_path: Path) -> None:
    config = RunConfig(
        algorithm="fedlesam-s", data="fashion-mnist", split="iid", clients=300, active=4, rounds=4, threads=1, lr=0.05,
        epochs=2, batch_size=20, evaluate_every=4,
    )  # fmt: skip
    summary = execute(resolve(config), tmp_path / "run")
    assert summary["state"] == "finished"
    assert summary["accuracy"]["last"] > 0.6
