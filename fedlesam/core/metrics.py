"""What is measured on test data: functions of (outputs, targets), and those that need no outputs of the past.

Arguments of the functions:
    outputs: of the model, a row for each sample.
    targets: what they should be, a row for each sample.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlesam.core.checks import check_choice
from fedlesam.core.partial import Partial

Better = Literal["larger", "smaller"]


@dataclass(frozen=True)
class Metric:
    """A number that says how good a model is on test data.

    Args:
        f: called as f(outputs, targets) with those of the whole test set, on the CPU; it returns a number. An object
            of torchmetrics will do.
        better: which of two values is better. By default "larger", or what an object of torchmetrics says.
        finish: makes the number of a sum. `f` is then called for each batch and returns a tensor, these are added up,
            and no outputs are kept: a mean is `f` that returns [sum, count] and `finish` that divides them.
    """

    f: Callable[[Any, Any], Any]
    better: Better | None = None
    finish: Callable[[Tensor], Any] | None = None

    def __post_init__(self) -> None:
        if not callable(self.f):
            raise ValueError(f"Metric: f must be a function of (outputs, targets), got {self.f!r}")
        if self.better is None:
            smaller = getattr(self.f, "higher_is_better", True) is False
            object.__setattr__(self, "better", "smaller" if smaller else "larger")
        check_choice("Metric", "better", self.better, get_args(Better))

    def of(self, name: str, outputs: Any, targets: Any) -> float:
        """The number for a whole test set.

        Args:
            name: The metric's, for messages.
            outputs: Of the whole test set.
            targets: Of the whole test set.
        """
        try:
            if hasattr(self.f, "update") and hasattr(self.f, "compute"):  # torchmetrics: it keeps what it has seen
                self.f.reset()  # type: ignore[attr-defined]
                self.f.update(outputs, targets)
                value = self.f.compute()
            else:
                value = self.f(outputs, targets)
        except Exception as error:
            raise ValueError(_raised(name, error, outputs, targets)) from error
        return one_float(name, value)

    def term(self, name: str, outputs: Any, targets: Any) -> Tensor | None:
        """What a batch adds to the sum; None where it cannot be measured.

        Args:
            name: The metric's, for messages.
            outputs: Of one batch.
            targets: Of the same batch.
        """
        try:
            found = self.f(outputs, targets)
        except Exception as error:
            raise ValueError(_raised(name, error, outputs, targets)) from error
        if found is None or isinstance(found, Tensor):
            return None if found is None else found.clone()  # its tensor may be used again
        raise ValueError(f"the metric {name} has `finish`, so f must return a tensor, got {found!r}")

    def of_sum(self, name: str, total: Tensor) -> float:
        """The number of the sum over all batches.

        Args:
            name: The metric's, for messages.
            total: The sum of what the batches added.
        """
        assert self.finish is not None
        try:
            value = self.finish(total)
        except Exception as error:
            raise ValueError(
                f"the metric {name}: finish raises {type(error).__name__}: {error}; it is called with the sum over all "
                f"batches, a tensor of shape {tuple(total.shape)}: give one that takes it"
            ) from error
        return one_float(name, value)


def _raised(name: str, error: Exception, outputs: Any, targets: Any) -> str:
    shapes = ", ".join(
        f"{what} {tuple(part.shape)} {part.dtype}" if isinstance(part, Tensor) else f"{what} {type(part).__name__}"
        for what, part in (("outputs", outputs), ("targets", targets))
    )
    return (
        f"the metric {name} raises {type(error).__name__}: {error}; it is called as f(outputs, targets) with {shapes}: "
        "give one that takes them, or others with Task(outputs=..., targets=...)"
    )


def one_float(name: str, value: Any) -> float:
    """What a metric returned, refused if it is not one number.

    Args:
        name: The metric's, for the message.
        value: What it returned.
    """
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        told = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
        raise ValueError(f"the metric {name} returns {told}, but one number is needed; return e.g. a mean") from None


def hits(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Samples by class: those that are right, and all of them; None where the targets are not class numbers."""
    if outputs.ndim != 2 or targets.ndim != 1 or targets.is_floating_point():
        return None
    counts = torch.zeros(2, outputs.shape[1], dtype=torch.int64, device=targets.device)
    classes = targets.long()
    counts[0].scatter_add_(0, classes, (outputs.argmax(1) == classes).long())
    counts[1].scatter_add_(0, classes, torch.ones_like(classes))
    return counts


def _share(total: Tensor) -> Tensor:
    """Of two rows or two numbers: the first by the second."""
    return total[0].sum() / total[1].sum()


def _right_signs(outputs: Tensor, targets: Tensor) -> Tensor:
    right = (outputs > 0) == (targets > 0.5)
    return torch.stack([right.sum(), right.new_ones(right.shape, dtype=torch.int64).sum()])


def _label_counts(outputs: Tensor, targets: Tensor) -> Tensor:
    said, true = outputs > 0, targets > 0.5
    return torch.stack([(said & true).sum(), said.sum() + true.sum()])


def _distances(outputs: Tensor, targets: Tensor) -> Tensor:
    far = (outputs - targets.to(outputs.dtype)).abs()
    return torch.stack([far.sum(), far.new_full((), far.numel())])


def _f1(total: Tensor) -> Tensor:
    return 2 * total[0] / total[1].clamp(min=1)


def _token_scores(outputs: Tensor, targets: Tensor, ignore: int) -> Tensor:
    flat, y = outputs.reshape(-1, outputs.shape[-1]).float(), targets.reshape(-1)
    loss = F.cross_entropy(flat, y, ignore_index=ignore, reduction="sum")
    return torch.stack([loss, (y != ignore).sum().to(loss.dtype)])


def _token_hits(outputs: Tensor, targets: Tensor, ignore: int) -> Tensor:
    known = targets != ignore
    return torch.stack([((outputs.argmax(-1) == targets) & known).sum(), known.sum()])


def _pixel_hits(outputs: Tensor, targets: Tensor, ignore: int) -> Tensor:
    return _token_hits(outputs.movedim(1, -1), targets, ignore)


def _overlaps(outputs: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """By class, the pixels of both and of either; those that do not count are nought in the first class."""
    known = targets != ignore
    said, true = (torch.where(known, part.long(), 0).reshape(-1) for part in (outputs.argmax(1), targets))
    counts, one = torch.zeros(3, outputs.shape[1], dtype=torch.int64, device=targets.device), known.reshape(-1).long()
    for row, part, count in zip(counts, (said, said, true), (one * (said == true), one, one), strict=True):
        row.scatter_add_(0, part, count)
    return torch.stack([counts[0], counts[1] + counts[2] - counts[0]])


def _mean_overlap(total: Tensor) -> Tensor:
    seen = total[1] > 0
    return (total[0][seen] / total[1][seen]).mean()


def _exp(total: Tensor) -> float:
    mean = float(_share(total))
    return math.inf if mean >= 700 else math.exp(mean)  # of no token it is not known: NaN


accuracy = Metric(hits, finish=_share)
"""The share of samples whose largest output is that of their class; also known by class."""
binary_accuracy = Metric(_right_signs, finish=_share)
f1 = Metric(_label_counts, finish=_f1)
"""Of all labels of all samples together (micro)."""
mae = Metric(_distances, "smaller", finish=_share)


def perplexity(ignore: int = -100) -> Metric:
    """exp of the mean cross-entropy of a token.

    Args:
        ignore: Targets that do not count.
    """
    return Metric(Partial(_token_scores, ignore), "smaller", finish=_exp)


def token_accuracy(ignore: int = -100) -> Metric:
    """The share of tokens, or of pixels, that are right; the last axis of the outputs is the vocabulary.

    Args:
        ignore: Targets that do not count.
    """
    return Metric(Partial(_token_hits, ignore), finish=_share)


def pixel_accuracy(ignore: int = 255) -> Metric:
    """The share of pixels that are right; the second axis of the outputs is the classes.

    Args:
        ignore: Targets that do not count.
    """
    return Metric(Partial(_pixel_hits, ignore), finish=_share)


def mean_iou(ignore: int = 255) -> Metric:
    """Intersection over union, the mean over the classes that occur.

    Args:
        ignore: Targets that do not count.
    """
    return Metric(Partial(_overlaps, ignore), finish=_mean_overlap)


NAMED: dict[str, Callable[[], Metric]] = {
    "accuracy": lambda: accuracy,
    "binary_accuracy": lambda: binary_accuracy,
    "f1": lambda: f1,
    "mae": lambda: mae,
    "perplexity": perplexity,
    "token_accuracy": token_accuracy,
    "mean_iou": mean_iou,
    "pixel_accuracy": pixel_accuracy,
}
"""Those that can be given by name."""
