"""How a batch becomes a loss, and what is measured: the one place that knows what a batch is made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, get_args

import torch.nn.functional as F
from torch import Tensor

from fedlesam.core import metrics as measures
from fedlesam.core import targets as fitting
from fedlesam.core.batches import Batch, ClientData, Collate, Loadable, given_tensors
from fedlesam.core.buffers import Unsupported
from fedlesam.core.checks import check_choice
from fedlesam.core.metrics import Metric
from fedlesam.core.partial import Partial
from fedlesam.core.targets import Fits

Loss = Callable[[Any, Any], Tensor]
"""A function of (outputs, targets)."""

Metrics = Mapping[str, Metric | Callable[[Any, Any], Any]] | Sequence[str] | str
"""Metrics by name, functions of (outputs, targets) or Metric; or names of built-in ones."""

TaskName = Literal[
    "classification", "binary", "multilabel", "regression", "language_model", "segmentation", "huggingface"
]

ELEMENTWISE = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits)
"""Losses that broadcast outputs and targets of different shapes without a word."""


class Options(TypedDict, total=False):
    """What every ready task takes."""

    metrics: Metrics
    """More metrics, before the task's own: the first one ranks."""
    inputs: Callable[[Batch], Any]
    """What the model is called with: a tensor, a tuple of arguments or a dict of named ones."""
    outputs: Callable[..., Any]
    """What of the model's result goes into the loss and the metrics; by default its logits."""
    targets: Callable[[Batch], Any]
    """The targets in a batch; by default the second of a pair, or `labels` of a dict."""
    collate: Collate
    """Joins samples of a torch Dataset into a batch; by default PyTorch's own."""


@dataclass(frozen=True)
class Task:
    """How a batch becomes a loss, and what is measured on test data.

    Ready ones are class methods, e.g. `Task.regression()`; each takes `metrics`, `inputs`, `outputs`, `targets` and
    `collate`.

    Args:
        loss: called as loss(model, batch); it returns a tensor of one number, the mean over the batch. It may also
            return (loss, outputs).
        metrics: by name, each a function of (outputs, targets) or a Metric; the first one ranks. Without any, the
            loss does. Names of built-in metrics will do, e.g. "accuracy".
        outputs: called with what the model returned inside `loss`, once per call; makes the outputs that metrics see.
            By default they are what the model returned, or its `.logits`.
        targets: makes the targets of a batch. By default they are the second of a pair, or `labels` of a dict.
        collate: makes a batch of a list of samples, for clients that are Datasets. By default PyTorch's.
        name: in messages and files.
    """

    loss: Callable[[Any, Batch], Any]
    metrics: Metrics = ()
    outputs: Callable[..., Any] | None = None
    targets: Callable[[Batch], Any] | None = None
    collate: Collate | None = None
    name: str = "own"
    fits: Fits | None = None
    """Refuses targets that the loss would misread."""

    def __post_init__(self) -> None:
        for what in ("loss", "outputs", "targets", "collate"):
            value = getattr(self, what)
            if not callable(value) and (what == "loss" or value is not None):
                raise ValueError(f"Task: {what} must be a function, got {value!r}")
        object.__setattr__(self, "metrics", named_metrics(self.metrics))

    @property
    def measured(self) -> dict[str, Metric]:
        """The metrics, by name."""
        return self.metrics  # type: ignore[return-value]

    @property
    def by_class(self) -> bool:
        """Whether accuracy is known by class."""
        accuracy = self.measured.get("accuracy")
        return accuracy is not None and accuracy.f is measures.hits

    def is_smaller(self, name: str) -> bool:
        """Whether a smaller value of a metric is better.

        Args:
            name: Of a metric.
        """
        return self.measured[name].better == "smaller"

    @property
    def joins(self) -> bool:
        """Whether the loss is a mean over samples of one shape, so that batches of several clients make one."""
        whole = isinstance(self.loss, Supervised) and self.name not in ("language_model", "segmentation")
        return whole and self.collate is None

    def __repr__(self) -> str:
        return f"Task({self.name}: {', '.join(self.measured) or 'loss'})"

    def outputs_of(self, returned: Sequence[Any]) -> Any:
        """The outputs that metrics see.

        Args:
            returned: what the model returned, each time `loss` called it.
        """
        if self.outputs is not None:
            return self.outputs(*returned)
        if len(returned) != 1:
            raise Unsupported(
                f"the loss of the task calls the model {len(returned)} times, so what its outputs are is not known; "
                "give Task(outputs=...), a function of what it returned each time, or return (loss, outputs)"
            )
        return logits_of(returned[0])

    def targets_of(self, batch: Batch) -> Any:
        """The targets of a batch.

        Args:
            batch: the batch, or all samples of a client as one.
        """
        return targets_in(batch) if self.targets is None else self.targets(batch)

    def known_targets(self, data: ClientData) -> Tensor | None:
        """All targets of a client, or None where each sample would have to be read for that.

        Args:
            data: the client's samples.
        """
        given = given_tensors(data)
        if given is None:
            return data.labels() if self.targets is None and isinstance(data, Loadable) else None
        found = self.targets_of(given)
        return found if isinstance(found, Tensor) else None

    @classmethod
    def supervised(cls, loss: Loss, name: str = "own", fits: Fits | None = None, **options: Unpack[Options]) -> "Task":
        """Outputs against targets.

        Args:
            loss: a function of (outputs, targets), such as torch.nn.functional.huber_loss.
            name: in messages and files.
            fits: refuses targets that the loss would misread.
            **options: as for every ready task.
        """
        inputs, outputs, targets = options.get("inputs"), options.get("outputs"), options.get("targets")
        compare = Supervised(loss, inputs, outputs, targets)
        return cls(compare, options.get("metrics", ()), outputs, targets, options.get("collate"), name, fits)

    @classmethod
    def of_loss(cls, loss: Loss) -> "Task":
        """The task of LocalTraining(loss=...): accuracy where the targets are class numbers.

        Args:
            loss: A function of outputs and targets that returns one number.
        """
        if loss is F.cross_entropy:
            return cls.classification()
        fits = fitting.numbers if loss in ELEMENTWISE else None
        return cls.supervised(loss, "own", fits, metrics={"accuracy": measures.accuracy})

    @classmethod
    def classification(cls, **options: Unpack[Options]) -> "Task":
        """One class for each sample: cross-entropy of outputs (n, classes); accuracy. The default.

        Args:
            options: Of `Options`: metrics, inputs, outputs, targets, collate.
        """
        own = {"accuracy": measures.accuracy}
        return cls.supervised(F.cross_entropy, "classification", fitting.class_numbers, **_more(options, own))

    @classmethod
    def binary(cls, **options: Unpack[Options]) -> "Task":
        """Yes or no: targets 0 or 1 of the outputs' shape, outputs before the sigmoid; accuracy.

        Args:
            options: Of `Options`: metrics, inputs, outputs, targets, collate.
        """
        own = {"accuracy": measures.binary_accuracy}
        return cls.supervised(_signs, "binary", fitting.zero_or_one, **_more(options, own))

    @classmethod
    def multilabel(cls, **options: Unpack[Options]) -> "Task":
        """Any number of labels for each sample: targets (n, labels) of 0 and 1; F1 over all labels, and accuracy.

        Args:
            options: Of `Options`: metrics, inputs, outputs, targets, collate.
        """
        own = {"f1": measures.f1, "accuracy": measures.binary_accuracy}
        return cls.supervised(_signs, "multilabel", fitting.zero_or_one, **_more(options, own))

    @classmethod
    def regression(cls, **options: Unpack[Options]) -> "Task":
        """Numbers: mean squared error of outputs and targets of one shape; the mean absolute error.

        Args:
            options: Of `Options`: metrics, inputs, outputs, targets, collate.
        """
        return cls.supervised(_square, "regression", fitting.numbers, **_more(options, {"mae": measures.mae}))

    @classmethod
    def language_model(cls, ignore_index: int = -100, **options: Unpack[Options]) -> "Task":
        """Tokens: cross-entropy of outputs (..., vocabulary) and the tokens to be said; perplexity, token accuracy.

        Args:
            ignore_index: a target that counts for nothing, such as padding.
            **options: as for every ready task.
        """

        loss = Partial(_of_tokens, ignore_index)
        own = {"perplexity": measures.perplexity(ignore_index), "token_accuracy": measures.token_accuracy(ignore_index)}
        return cls.supervised(loss, "language_model", fitting.tokens(ignore_index), **_more(options, own))

    @classmethod
    def segmentation(cls, ignore_index: int = 255, **options: Unpack[Options]) -> "Task":
        """A class for each pixel: outputs (n, classes, ...), targets (n, ...); mean IoU and pixel accuracy.

        Args:
            ignore_index: a target that counts for nothing, such as a border.
            **options: as for every ready task.
        """

        loss = Partial(_of_pixels, ignore_index)
        own = {"mean_iou": measures.mean_iou(ignore_index), "accuracy": measures.pixel_accuracy(ignore_index)}
        return cls.supervised(loss, "segmentation", fitting.pixels(ignore_index), **_more(options, own))

    @classmethod
    def huggingface(cls, **options: Unpack[Options]) -> "Task":
        """A model of `transformers`: model(**batch), whose `.loss` is trained; accuracy where labels are classes.

        Args:
            options: Of `Options`: metrics, inputs, outputs, targets, collate.
        """
        loss = Partial(_own_loss, options.get("inputs"))
        known = _more(options, {"accuracy": measures.accuracy})
        metrics, targets = known.get("metrics", ()), known.get("targets")
        return cls(loss, metrics, known.get("outputs"), targets, known.get("collate"), "huggingface")

    @classmethod
    def get(cls, name: str) -> "Task":
        """A ready task by its name.

        Args:
            name: such as "language_model".
        """
        check_choice("Task", "name", name, get_args(TaskName))
        task: Task = getattr(cls, name)()
        return task


@dataclass(frozen=True)
class Supervised:
    """The loss of outputs and targets, as a function of a model and a batch."""

    compare: Loss
    """The loss, a function of outputs and targets."""
    inputs: Callable[[Batch], Any] | None = None
    """What of a batch the model is called with; None takes `inputs_in`."""
    outputs: Callable[..., Any] | None = None
    """What of the model's result is compared; None takes its logits."""
    targets: Callable[[Batch], Any] | None = None
    """What it is compared with; None takes `targets_in`."""

    def __call__(self, model: Any, batch: Batch) -> Tensor:
        x = inputs_in(batch) if self.inputs is None else self.inputs(batch)
        if isinstance(x, Tensor):
            returned = model(x)
        elif isinstance(x, Mapping):
            returned = model(**x)
        elif isinstance(x, tuple | list):
            returned = model(*x)
        else:
            returned = model(x)
        y = targets_in(batch) if self.targets is None else self.targets(batch)
        return self.compare(logits_of(returned) if self.outputs is None else self.outputs(returned), y)


def is_pair(batch: Batch) -> bool:
    """Whether a batch is (inputs, targets).

    Args:
        batch: Of any form.
    """
    return (type(batch) is tuple or isinstance(batch, tuple | list)) and len(batch) == 2


def inputs_in(batch: Batch) -> Any:
    """The first of a pair; a dict without its labels.

    Args:
        batch: Of any form.
    """
    if is_pair(batch):
        return batch[0]
    if isinstance(batch, Mapping) and "labels" in batch:
        return {key: value for key, value in batch.items() if key != "labels"}
    raise ValueError(_unknown("inputs", batch))


def targets_in(batch: Batch) -> Any:
    """The second of a pair, or `labels` of a dict.

    Args:
        batch: A pair or a dict.
    """
    if is_pair(batch):
        return batch[1]
    if isinstance(batch, Mapping) and "labels" in batch:
        return batch["labels"]
    raise ValueError(_unknown("targets", batch))


def _unknown(what: str, batch: Batch) -> str:
    rule = f"the {what} of a batch are known of two tensors (x, y) or of a dict with labels"
    if isinstance(batch, Mapping):
        return (
            f"{rule}, and this dict has {', '.join(map(str, batch))}; give Task(..., {what}=lambda batch: batch[...])"
        )
    told = f"a tuple of {len(batch)}" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
    return f"{rule}, and this one is {told}; give Task(..., {what}=lambda batch: ...)"


def logits_of(returned: Any) -> Tensor:
    """A model's outputs: what it returned, or its logits.

    Args:
        returned: What the model's call returned.
    """
    if isinstance(returned, Tensor):
        return returned
    found = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", None)
    if isinstance(found, Tensor):
        return found
    raise Unsupported(
        f"the model returns a {type(returned).__name__}, and one tensor of outputs is needed; say which with "
        "Task(..., outputs=lambda returned: ...), or wrap it in a module whose forward returns the logits alone"
    )


def named_metrics(given: Metrics) -> dict[str, Metric]:
    """Metrics by name, from what a user gave.

    Args:
        given: By name, functions of (outputs, targets) or Metric; or names of built-in ones.
    """
    if isinstance(given, Mapping):
        for name, metric in given.items():
            if not callable(metric) and not isinstance(metric, Metric):
                raise ValueError(f"Task: the metric {name} must be a function of (outputs, targets), got {metric!r}")
            if not isinstance(name, str) or not name:
                raise ValueError(f"Task: a metric's name must be a text, got {name!r}")
        return {name: m if isinstance(m, Metric) else Metric(m) for name, m in given.items()}
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else [given]
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"Task: metrics must be a dict of names and functions, e.g. {{'f1': f}}, got {given!r}")
        check_choice("Task", "metrics", name, tuple(measures.NAMED))
    return {name: measures.NAMED[name]() for name in names}


def _more(options: Options, own: Mapping[str, Metric]) -> Options:
    """The options of a ready task with its own metrics after the user's."""
    given = named_metrics(options.get("metrics", ()))
    return {**options, "metrics": {**given, **{name: m for name, m in own.items() if name not in given}}}


def _of_tokens(outputs: Tensor, targets: Tensor, ignore: int) -> Tensor:
    return _of_pixels(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1), ignore)


def _of_pixels(outputs: Tensor, targets: Tensor, ignore: int) -> Tensor:
    total = F.cross_entropy(outputs, targets, ignore_index=ignore, reduction="sum")
    return total / (targets != ignore).sum().clamp(min=1)  # a batch of padding alone has the loss 0


def _own_loss(model: Any, batch: Batch, inputs: Callable[[Batch], Any] | None) -> Any:
    named = batch if inputs is None else inputs(batch)
    if not isinstance(named, Mapping):
        raise ValueError(
            f"Task.huggingface() calls model(**batch), and a batch is a {type(named).__name__}; give "
            'clients as dicts, e.g. {"input_ids": x, "labels": y}, or Task.huggingface(inputs=...)'
        )
    found = getattr(model(**named), "loss", None)
    if found is None:
        raise Unsupported("the model returned no .loss; give it labels, as batch['labels'] of a dict")
    return found


def _signs(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))


def _square(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets.to(outputs.dtype))
