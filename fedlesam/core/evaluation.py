"""Loss and metrics of a global model on data it was not trained on."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedlesam.core.batches import Batch, Batches, ClientData, steps_per_epoch
from fedlesam.core.buffers import Unsupported
from fedlesam.core.flat_model import CalledModel, FlatModel, ForwardPass
from fedlesam.core.sound import blame_targets, check_finite
from fedlesam.core.task import Loss, Task
from fedlesam.core.vectors import read_at_once

BATCH = 500
"""Samples per batch. Fixed, so that an evaluation gives the same bits in any process."""
FEW = 8
"""Samples that metrics are tried on before the first round."""


@dataclass(frozen=True)
class Evaluation:
    """Loss and metrics of a model on test data."""

    loss: float
    """Mean over all test samples."""
    metrics: dict[str, float] = field(default_factory=dict)
    """In the task's order; without accuracy where the targets are not class numbers."""
    by_class: Tensor | None = None
    """The accuracy on each class; NaN for a class without samples."""
    clients: dict[str, "PerClient"] = field(default_factory=dict)
    """The metrics on clients' own test samples, over clients."""

    @property
    def accuracy(self) -> float | None:
        """The fraction of samples classified correctly; None if the task does not measure it."""
        return self.metrics.get("accuracy")


@dataclass(frozen=True)
class BatchScore:
    """The result on one batch of the test set. Several processes can score batches; they are added in their order."""

    number: int
    """The place of the batch in the test data, from 0."""
    size: int
    """Its samples."""
    loss: float
    """Mean over them."""
    sums: dict[str, Any] = field(default_factory=dict)
    """Of metrics that add up over batches: numbers in lists."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Outputs and targets, on the CPU, where a metric needs those of all samples."""


@torch.no_grad()
def score_batches(
    model: FlatModel,
    data: Batches,
    task: Task | Loss,
    part: int = 0,
    parts: int = 1,
    check: Callable[[], None] = lambda: None,
) -> list[BatchScore]:
    """Score every `parts`-th batch of a data set.

    Args:
        model: the model.
        data: the test data.
        task: how a batch becomes a loss, and what is measured; or a loss of outputs and targets.
        part: the number of the first batch.
        parts: the number of processes that share the batches.
        check: called before each batch; it may raise.
    """
    task = task if isinstance(task, Task) else Task.of_loss(task)
    model.module.eval()
    found: list[tuple[int, int, Tensor, dict[str, Tensor], dict[str, Tensor]]] = []
    before = model.buffers() if model.state.own else {}
    batches = steps_per_epoch(len(data), BATCH, join_last=model.needs_batch)
    for number in range(part, batches, parts):
        check()
        model.load_buffers(before)  # a layer may change them in eval mode, too, and no batch may depend on another
        start, end = number * BATCH, (number + 1) * BATCH if number < batches - 1 else len(data)
        batch = data.fetch(torch.arange(start, end, device=data.home), seed=0)
        try:
            done = model.step(task, batch)
        except Exception:
            blame_targets(model, task, batch, "the samples evaluated on")
            raise
        found.append((number, end - start, done.loss.clone(), *_measured(task, done, batch)))  # it may be used again
    if not found:
        return []
    names = [name for name in task.measured if all(name in sums for *_, sums, _ in found)]
    stacks = [torch.stack([sums[name] for *_, sums, _ in found]) for name in names]
    losses, *terms = (part.tolist() for part in read_at_once([torch.stack([one for _, _, one, *_ in found]), *stacks]))
    columns = dict(zip(names, terms, strict=True))
    for (number, size, *_), value in zip(found, losses, strict=True):
        if not math.isfinite(value):
            places = torch.arange(number * BATCH, number * BATCH + size)
            check_finite(data.fetch(places, seed=0), "the samples evaluated on", places)
    return [
        BatchScore(number, size, losses[i], {name: column[i] for name, column in columns.items()}, kept)
        for i, (number, size, *_, kept) in enumerate(found)
    ]


def _measured(task: Task, done: ForwardPass, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the metrics take from a batch: terms of sums, and the outputs and targets that are kept."""
    if not task.measured:
        return {}, {}
    outputs, targets = done.outputs, task.targets_of(batch)
    sums, kept = dict[str, Tensor](), dict[str, Tensor]()
    for name, metric in task.measured.items():
        if metric.finish is not None:
            if (term := metric.term(name, outputs, targets)) is not None:
                sums[name] = term
        elif not kept:
            kept = {"outputs": kept_tensor(outputs, "outputs"), "targets": kept_tensor(targets, "targets")}
    return sums, kept


@torch.no_grad()
def take_few(model: FlatModel, data: Batches, task: Task) -> bool:
    """Whether the metrics make numbers of a few samples. One that does not may be right: some need all classes.

    Buffers may change: who trains or evaluates loads them anew.

    Args:
        model: the model.
        data: the test data.
        task: how a batch becomes a loss, and what is measured.
    """
    model.module.eval()
    size = min(FEW, len(data))
    called = CalledModel(model.module, None, model.called.cast)  # compiled, it would be so for this size, too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = data.fetch(torch.arange(size), seed=0)
            sums, kept = _measured(task, done := called.run(task, batch), batch)
            terms = {name: term.tolist() for name, term in sums.items()}
            combine([BatchScore(0, size, float(done.loss), terms, kept)], task)
    except Exception:
        return False
    return True


def kept_tensor(tensor: object, what: str) -> Tensor:
    """Outputs or targets of a batch, for a metric that needs those of all samples.

    Args:
        tensor: The outputs or targets.
        what: Which of them.
    """
    if isinstance(tensor, Tensor):
        return tensor.detach().cpu()
    raise Unsupported(
        f"the {what} of a batch are a {type(tensor).__name__}, and metrics need one tensor; give Task(..., {what}=...)"
    )


def combine(scores: list[BatchScore], task: Task | None = None) -> Evaluation:
    """The evaluation of a whole data set.

    Args:
        scores: of all batches, in any order.
        task: that they were scored by; by default classification.
    """
    task = Task.classification() if task is None else task
    ordered = sorted(scores, key=lambda score: score.number)
    samples = sum(score.size for score in ordered)
    mean = sum(score.loss * score.size for score in ordered) / samples
    whole = {what: _joined([score.kept[what] for score in ordered], what) for what in ordered[0].kept}
    found, by_class = dict[str, float](), None
    for name, metric in task.measured.items():
        if metric.finish is None:
            found[name] = metric.of(name, whole["outputs"], whole["targets"])
        elif all(name in score.sums for score in ordered):
            total = torch.tensor([score.sums[name] for score in ordered], dtype=torch.float64).sum(0)
            found[name] = metric.of_sum(name, total)
            if task.by_class and name == "accuracy":
                by_class = total[0] / total[1]
    return Evaluation(mean, found, by_class)


def _joined(parts: list[Tensor], what: str) -> Tensor:
    try:
        return torch.cat(parts)
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(shape)) for shape in dict.fromkeys(part.shape for part in parts))
        raise ValueError(
            f"the {what} of batches have different shapes ({shapes}), so a metric cannot be called with all of them; "
            f"make them alike in Task(..., {what}=...), e.g. flatten the tokens"
        ) from error


@dataclass(frozen=True)
class PerClient:
    """A metric over clients: on their own test samples, or the test accuracy on each client's mixture of classes."""

    mean: float
    """Over the clients of which it is known, each with the same weight."""
    worst_tenth: float
    """Mean over the tenth of the clients where it is worst, at least one client."""
    spread: float
    """Standard deviation over clients."""
    untested: int = 0
    """Clients of which it is not known, as they have no test samples; they are not part of the other numbers."""

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which has no NaN and no infinity."""
        found = {name: value if math.isfinite(value) else None for name, value in vars(self).items()}
        return found if self.untested else {name: value for name, value in found.items() if name != "untested"}

    @classmethod
    def of_dict(cls, known: Mapping[str, Any]) -> "PerClient":
        """The inverse of `as_dict`; NaN for a number that JSON had not.

        Args:
            known: What `as_dict` returned.
        """
        parts = {
            name: math.nan if known.get(name) is None else known[name] for name in ("mean", "worst_tenth", "spread")
        }
        return cls(**parts, untested=known.get("untested", 0))


def spread_over(values: npt.NDArray[np.float64], clients: int, *, smaller: bool) -> PerClient:
    """A metric over clients; NaN where it is known of none.

    Args:
        values: Of clients that were tested; NaN where the metric is not known.
        clients: How many there are.
        smaller: Whether a smaller value is better.
    """
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return PerClient(math.nan, math.nan, math.nan, clients)
    worst = (known[::-1] if smaller else known)[: max(1, len(known) // 10)]
    with np.errstate(invalid="ignore"):
        mean, tenth, spread = float(known.mean()), float(worst.mean()), float(known.std())
    return PerClient(mean, tenth, spread, clients - len(known))


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
    return spread_over(accuracy.double().numpy(), len(mixtures), smaller=False)


def mixture(labels: Tensor, classes: int) -> Tensor:
    """The fraction of each class among a client's labels.

    Args:
        labels: class numbers.
        classes: the number of classes.
    """
    counts = labels.bincount(minlength=classes).double()
    return counts / counts.sum()


def mixtures(clients: Sequence[ClientData], task: Task, classes: int) -> Tensor:
    """The mixture of classes of every client, for `per_client`; a ValueError where it is not known.

    Args:
        clients: Their data.
        task: Says what the targets of a batch are.
        classes: The number of the model's outputs.
    """
    if not isinstance(clients, list | tuple):
        raise ValueError(
            f"per_client needs the classes of all {len(clients):,} clients, and a {type(clients).__name__} makes "
            "clients when they are drawn; give a list, or per_client=False"
        )
    rows = []
    for i, data in enumerate(clients):
        labels = task.known_targets(data) if task.by_class else None
        if labels is None or labels.is_floating_point() or labels.ndim != 1:
            raise ValueError(f"client {i}: per_client needs class numbers known in advance, as in a pair (x, y)")
        rows.append(mixture(labels, classes))
    return torch.stack(rows)
