"""Loss and accuracy of a global model on data it was not trained on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlesam.data.batches import Batches
from fedlesam.models.flat import FlatModel, Loss

BATCH = 500
"""Fixed, so that an evaluation gives the same bits whoever makes it."""


@dataclass(frozen=True)
class Evaluation:
    loss: float
    accuracy: float | None = None
    """A share of the samples; None where the targets are not class numbers."""
    by_class: Tensor | None = None
    """The accuracy on each class, NaN for a class the data do not have."""


@torch.no_grad()
def evaluate(model: FlatModel, data: Batches, loss: Loss) -> Evaluation:
    model.module.eval()
    total = 0.0
    right = seen = torch.zeros(0, dtype=torch.float64)
    for start in range(0, len(data), BATCH):
        x, y = data.fetch(torch.arange(start, min(start + BATCH, len(data))), seed=0)
        output = model.forward(x)
        total += loss(output, y).item() * len(x)
        if output.ndim == 2 and y.ndim == 1 and not y.is_floating_point():
            classes = output.shape[1]
            hits = y[output.argmax(1) == y]
            right = right.new_zeros(classes) if not len(right) else right
            seen = seen.new_zeros(classes) if not len(seen) else seen
            right += hits.bincount(minlength=classes).cpu()
            seen += y.bincount(minlength=classes).cpu()
    if not len(seen):
        return Evaluation(total / len(data))
    return Evaluation(total / len(data), float(right.sum() / seen.sum()), right / seen)


@dataclass(frozen=True)
class PerClient:
    """Accuracy on each client's own mixture of classes: the test accuracy by class, weighted as the client's labels."""

    mean: float
    worst_tenth: float
    """Mean over the tenth of the clients with the lowest accuracy, at least one client."""
    spread: float
    """Standard deviation over clients."""


def per_client(by_class: Tensor, mixtures: Tensor) -> PerClient:
    """`mixtures` is clients x classes, rows sum to one; classes that the test set does not have are left out."""
    known = ~by_class.isnan()
    weights = mixtures[:, known]
    accuracy = (weights @ by_class[known].to(weights.dtype)) / weights.sum(1).clamp_min(1e-12)
    worst = accuracy.sort().values[: max(1, len(accuracy) // 10)]
    return PerClient(float(accuracy.mean()), float(worst.mean()), float(accuracy.std(correction=0)))


def mixture(labels: Tensor, classes: int) -> Tensor:
    """The share of each class among a client's labels."""
    counts = labels.bincount(minlength=classes).double()
    return counts / counts.sum()
