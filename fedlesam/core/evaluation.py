"""Loss and accuracy of a global model on data it was not trained on."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlesam.core.batches import Batches, steps_per_epoch
from fedlesam.core.flat_model import FlatModel, Loss
from fedlesam.core.sound import check_finite

BATCH = 500
"""Samples per batch. Fixed, so that an evaluation gives the same bits in any process."""


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy of a model on test data."""

    loss: float
    accuracy: float | None = None
    """The fraction of samples classified correctly; None if the targets are not class numbers."""
    by_class: Tensor | None = None
    """The accuracy on each class; NaN for a class without samples."""


@dataclass(frozen=True)
class BatchScore:
    """The result on one batch of the test set. Several processes can score batches; they are added in their order."""

    number: int
    size: int
    loss: float
    right: list[int]
    """Correct samples by class; empty if the targets are not class numbers."""
    seen: list[int]


@torch.no_grad()
def score_batches(
    model: FlatModel, data: Batches, loss: Loss, part: int = 0, parts: int = 1, check: Callable[[], None] = lambda: None
) -> list[BatchScore]:
    """Score every `parts`-th batch of a data set.

    Args:
        model: the model.
        data: the test data.
        loss: the loss.
        part: the number of the first batch.
        parts: the number of processes that share the batches.
        check: called before each batch; it may raise.
    """
    model.module.eval()
    found: list[tuple[int, int, Tensor, Tensor | None]] = []
    before = model.buffers() if model.state.own else {}
    batches = steps_per_epoch(len(data), BATCH, join_last=model.needs_batch)
    for number in range(part, batches, parts):
        check()
        model.load_buffers(before)  # a layer may change them in eval mode, too, and no batch may depend on another
        start, end = number * BATCH, (number + 1) * BATCH if number < batches - 1 else len(data)
        x, y = data.fetch(torch.arange(start, end), seed=0)
        output = model.forward(x)
        found.append((number, len(x), loss(output, y), _hits(output, y)))
    if not found:
        return []
    losses = torch.stack([one for _, _, one, _ in found]).tolist()
    hits = [one for *_, one in found if one is not None]
    counts = torch.stack(hits).tolist() if len(hits) == len(found) else [([], [])] * len(found)
    for (number, size, *_), value in zip(found, losses, strict=True):
        if not math.isfinite(value):
            places = torch.arange(number * BATCH, number * BATCH + size)
            check_finite(*data.fetch(places, seed=0), "the samples evaluated on", places)
    rows = zip(found, losses, counts, strict=True)
    return [BatchScore(number, size, value, *by_class) for (number, size, *_), value, by_class in rows]


def _hits(output: Tensor, y: Tensor) -> Tensor | None:
    """Samples by class: those that are right, and all of them; None where the targets are not class numbers."""
    if output.ndim != 2 or y.ndim != 1 or y.is_floating_point():
        return None
    counts = torch.zeros(2, output.shape[1], dtype=torch.int64, device=y.device)
    classes = y.long()
    counts[0].scatter_add_(0, classes, (output.argmax(1) == classes).long())
    counts[1].scatter_add_(0, classes, torch.ones_like(classes))
    return counts


def combine(scores: list[BatchScore]) -> Evaluation:
    """The evaluation of a whole data set.

    Args:
        scores: of all batches, in any order.
    """
    ordered = sorted(scores, key=lambda score: score.number)
    samples = sum(score.size for score in ordered)
    mean = sum(score.loss * score.size for score in ordered) / samples
    if not all(score.seen for score in ordered):
        return Evaluation(mean)
    right = torch.tensor([score.right for score in ordered]).sum(0).double()
    seen = torch.tensor([score.seen for score in ordered]).sum(0).double()
    return Evaluation(mean, float(right.sum() / seen.sum()), right / seen)


@dataclass(frozen=True)
class PerClient:
    """Accuracy on each client's own mixture of classes: the test accuracy by class, weighted as the client's labels."""

    mean: float
    worst_tenth: float
    """Mean over the tenth of the clients with the lowest accuracy, at least one client."""
    spread: float
    """Standard deviation over clients."""
    untested: int = 0
    """Clients with none of their classes in the test set; they are not part of the other numbers."""


def per_client(by_class: Tensor, mixtures: Tensor) -> PerClient | None:
    """Accuracy on each client's own mixture of classes; None if no client has a class of the test set.

    Args:
        by_class: the test accuracy on each class; classes without test samples (NaN) are ignored.
        mixtures: clients x classes; rows sum to one.
    """
    known = ~by_class.isnan()
    weights = mixtures[:, known]
    seen = weights.sum(1)
    tested = seen > 0
    if not tested.any():
        return None
    accuracy = (weights[tested] @ by_class[known].to(weights.dtype)) / seen[tested]
    worst = accuracy.sort().values[: max(1, len(accuracy) // 10)]
    mean, spread = float(accuracy.mean()), float(accuracy.std(correction=0))
    return PerClient(mean, float(worst.mean()), spread, untested=int((~tested).sum()))


def mixture(labels: Tensor, classes: int) -> Tensor:
    """The fraction of each class among a client's labels.

    Args:
        labels: class numbers.
        classes: the number of classes.
    """
    counts = labels.bincount(minlength=classes).double()
    return counts / counts.sum()
