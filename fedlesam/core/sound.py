"""Whether samples can be trained on: finite numbers, and targets that the loss takes."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.batches import Batches, ClientData, check_client, known_labels, pair_of
from fedlesam.core.buffers import Unsupported
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.local import LocalTraining
from fedlesam.core.module_check import changed_buffers

OWN_LOSS = "for other targets give a loss of their kind, e.g. LocalTraining(loss=torch.nn.functional.mse_loss)"


def named(clients: Sequence[ClientData], test: ClientData | None) -> Iterator[tuple[str, ClientData]]:
    """What the data are called in a message."""
    yield from ((f"client {i}", data) for i, data in enumerate(clients))
    if test is not None:
        yield "the test set", test


def check_finite(x: Tensor, y: Tensor, where: str, numbers: Tensor | slice | None = None) -> None:
    """A ValueError for a NaN or an infinity. `numbers` are the samples' own, where they are a batch."""
    for what, values in (("x", x), ("y", y)):
        if values.is_floating_point() and values.numel() and not all(end.isfinite() for end in values.aminmax()):
            sample = int((~values.isfinite()).reshape(len(values), -1).any(1).nonzero()[0])
            number = int(numbers[sample]) if isinstance(numbers, Tensor) else sample
            raise ValueError(f"{where}: {what} of sample {number} is not finite; mend the sample or leave it out")


def check_samples(clients: Sequence[ClientData], test: ClientData | None, *, drop: bool) -> None:
    """A ValueError for data that cannot be used. With `drop` a client with numbers that are not finite may stay."""
    first: tuple[str, torch.dtype] | None = None
    for where, data in named(clients, test):
        check_client(data, where)
        if (pair := pair_of(data)) is None:
            continue
        if data is test or not drop:
            check_finite(*pair, where)
        first = first or (where, pair[0].dtype)
        if pair[0].dtype != first[1]:
            raise ValueError(f"{where}: x is {pair[0].dtype}, of {first[0]} it is {first[1]}; give x.to({first[1]})")


def describe(x: Tensor, weights: torch.dtype) -> str:
    """Inputs that a model refused, by their shape, and by their dtype where it is not the model's."""
    if x.dtype == weights:
        return f"inputs of shape {tuple(x.shape)}, as client 0 has"
    told = f"inputs of shape {tuple(x.shape)} and dtype {x.dtype}, as client 0 has"
    numbers = x.is_floating_point() or x.dtype == torch.uint8  # others may be meant, as for an embedding
    return f"{told}: its weights are {weights}, give x.to({weights})" if numbers else told


def check_labels(clients: Sequence[ClientData], test: ClientData | None, seen: Tensor, output: Sequence[int]) -> None:
    """All targets that are known in advance, for cross-entropy; `seen` is that of the first client's first sample."""
    check_targets(seen, output, "client 0")
    for where, data in named(clients, test):
        if (labels := known_labels(data)) is None:
            continue
        check_targets(labels, output, where)
        if len(output) != 2 or labels.is_floating_point():
            continue
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= output[1]:
            wrong = low if low < 0 else high
            raise ValueError(f"{where}: label {wrong} is outside 0 to {output[1] - 1}, the model's {output[1]} outputs")


def check_targets(y: Tensor, output: Sequence[int], where: str) -> None:
    """A ValueError for targets that cross-entropy would refuse, or take for something else.

    `output` is the shape of the model's output. Class numbers have no axis of classes; probabilities of classes have
    the output's own shape.
    """
    if len(output) < 2 or output[1] == 1:
        raise ValueError(
            "the model has one output: the default loss, cross-entropy, would be 0 whatever it says; "
            f"{OWN_LOSS}, or give the model an output for each class"
        )
    rest, expected = tuple(y.shape[1:]), tuple(output[2:])
    if y.is_floating_point() and rest == tuple(output[1:]):
        return
    if y.is_floating_point():
        raise ValueError(
            f"{where}: y is {y.dtype}, and the default loss, cross-entropy, takes class numbers; "
            f"give y.long() if it holds them; {OWN_LOSS}"
        )
    if rest != expected:
        remedy = "give y.squeeze(1)" if rest == (1, *expected) else OWN_LOSS
        shapes = f"{where}: y has the shape {tuple(y.shape)}, and cross-entropy takes {(len(y), *expected)}"
        raise ValueError(f"{shapes}; {remedy}")
    if y.dtype != torch.int64:
        raise ValueError(f"{where}: y is {y.dtype}, and cross-entropy takes int64; give y.long()")


def check_outputs(
    model: FlatModel, clients: Sequence[ClientData], test: ClientData | None, local: LocalTraining, *, stacked: bool
) -> tuple[int, list[str]]:
    """Show the model one sample, and check all labels against its outputs, before any work is done.

    Args:
        model: the model.
        clients: their data; the sample is the first of the first.
        test: the test data.
        local: how clients train.
        stacked: look for buffers that change even where only norm layers have any.

    Returns:
        The number of outputs, and the names of the buffers that a training step changes.
    """
    with seeds.preserve_rng(model.device):
        x, y = Batches(clients[0], model.device).fetch(torch.tensor([0]), seed=0)
        twice = torch.cat([x, x])  # batch statistics need more than one
        changed = changed_buffers(model.module, twice) if stacked or model.state.own or model.state.frozen else []
    model.module.eval()
    try:
        with torch.no_grad(), seeds.preserve_rng(model.device):
            output = model.forward(twice if model.needs_batch else x)
    except Unsupported:
        raise
    except Exception as error:
        raise ValueError(f"the model does not take {describe(x, model.weights.dtype)}: {error}") from error
    if local.loss is F.cross_entropy:
        check_labels(clients, test, y, output.shape)
    return output.shape[-1] if output.ndim else 1, changed
