"""Loss and accuracy of a global model on data it was not trained on."""

from dataclasses import dataclass

import torch

from fedlesam.data.batches import Batches
from fedlesam.models.flat import FlatModel, Loss

BATCH = 500
"""Fixed, so that an evaluation gives the same bits whoever makes it."""


@dataclass(frozen=True)
class Evaluation:
    loss: float
    accuracy: float | None
    """A share of the samples; None where the targets are not class numbers."""


@torch.no_grad()
def evaluate(model: FlatModel, data: Batches, loss: Loss) -> Evaluation:
    model.module.eval()
    total, right, classes = 0.0, 0, True
    for start in range(0, len(data), BATCH):
        x, y = data.fetch(torch.arange(start, min(start + BATCH, len(data))), seed=0)
        output = model.module(x)
        total += loss(output, y).item() * len(x)
        classes = classes and output.ndim == 2 and y.ndim == 1 and not y.is_floating_point()
        if classes:
            right += int((output.argmax(1) == y).sum())
    return Evaluation(total / len(data), right / len(data) if classes else None)
