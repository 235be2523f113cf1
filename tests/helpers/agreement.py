"""What the package and the oracle are given, and how close they must be."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedlesam import algorithms

SETTINGS: dict[str, Any] = {"lr": 0.2, "lr_decay": 0.9, "batch_size": 4, "weight_decay": 0.05, "clip": 0.6}
HYPER = {"rho": 0.15, "alpha": 0.3, "lam": 0.2, "prox": 0.12}


def hyper_of(method: str) -> dict[str, float]:
    """Values that differ from the defaults, for what the method takes."""
    takes = algorithms.hyperparameters(method)
    chosen = {key: value for key, value in HYPER.items() if key in takes}
    return chosen | {"lr_g": 0.05 if method == "fedadam" else 1.0}


def assert_agree(ours: Mapping[str, Tensor], oracle: Mapping[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == oracle.keys()
    for name in oracle:
        torch.testing.assert_close(
            ours[name].double(), oracle[name].double(), atol=tolerance, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
        )
