"""Whether targets fit a task: said by the client that has them, before any work is done.

Arguments of the functions:
    y: the targets.
    output: the shape of the model's outputs for them.
    where: whose targets they are, for the message.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedlesam.core.partial import Partial

Fits = Callable[[Tensor, Sequence[int], str], None]
"""Called with targets, the shape of the outputs, and whose targets they are; a ValueError if they do not fit."""

OWN_LOSS = (
    "for other targets give a task of their kind, e.g. task=fl.Task.regression(), or a loss, "
    "e.g. LocalTraining(loss=torch.nn.functional.mse_loss)"
)


def class_numbers(y: Tensor, output: Sequence[int], where: str) -> None:
    """For cross-entropy: refuse what it would refuse, or take for something else.

    Class numbers have no axis of classes; probabilities of classes have the output's own shape.
    """
    if len(output) < 2 or output[1] == 1:
        raise ValueError(
            "the model has one output: the default loss, cross-entropy, would always be 0; "
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
    if len(output) == 2:
        _in_range(y, output[1], where, None)


def numbers(y: Tensor, output: Sequence[int], where: str) -> None:
    """For a loss of entries: outputs and targets that differ in shape would be broadcast, and mean something else."""
    rest, expected = tuple(y.shape[1:]), tuple(output[1:])
    if rest == expected:
        return
    remedy = "return a value for each target from the model, or take another task"
    if expected == (*rest, 1):
        remedy = "give y.unsqueeze(-1), or let the model return output.squeeze(-1)"
    elif rest == (*expected, 1):
        remedy = "give y.squeeze(-1)"
    raise ValueError(f"{where}: y has the shape {tuple(y.shape)}, and the outputs {(len(y), *expected)}; {remedy}")


def zero_or_one(y: Tensor, output: Sequence[int], where: str) -> None:
    """For binary targets, of any dtype."""
    numbers(y, output, where)
    if y.numel() and not 0 <= float(y.min()) <= float(y.max()) <= 1:
        wrong = float(y.min()) if y.min() < 0 else float(y.max())
        raise ValueError(f"{where}: target {wrong:g} is outside 0 to 1; for more classes take Task.classification()")


def tokens(ignore: int) -> Fits:
    """For token numbers, one for each position of the outputs, whose last axis is the vocabulary.

    Args:
        ignore: The target that does not count.
    """

    return Partial(_tokens, ignore)


def _tokens(y: Tensor, output: Sequence[int], where: str, ignore: int) -> None:
    _positions(y, tuple(output[1:-1]), where, "a token for each position")
    _in_range(y, output[-1], where, ignore)


def pixels(ignore: int) -> Fits:
    """For class numbers, one for each pixel of the outputs, whose second axis is the classes.

    Args:
        ignore: The target that does not count.
    """

    return Partial(_pixels, ignore)


def _pixels(y: Tensor, output: Sequence[int], where: str, ignore: int) -> None:
    if len(output) < 3:
        raise ValueError(
            f"{where}: the outputs have the shape {tuple(output)}, and a class for each pixel needs (n, classes, "
            "height, width); for one class for each sample take Task.classification()"
        )
    _positions(y, tuple(output[2:]), where, "a class for each pixel")
    _in_range(y, output[1], where, ignore)


def _positions(y: Tensor, expected: tuple[int, ...], where: str, what: str) -> None:
    if y.dtype != torch.int64:
        raise ValueError(f"{where}: y is {y.dtype}, and {what} is an int64; give y.long()")
    if tuple(y.shape[1:]) != expected:
        raise ValueError(f"{where}: y has the shape {tuple(y.shape)}, and {what} is {(len(y), *expected)}")


def _in_range(y: Tensor, count: int, where: str, ignore: int | None) -> None:
    if y.is_floating_point():
        return
    known = y if ignore is None else y[y != ignore]
    if not known.numel():
        return
    low, high = int(known.min()), int(known.max())
    if low < 0 or high >= count:
        wrong = low if low < 0 else high
        remedy = "mend the labels, or give the model an output for each class"
        raise ValueError(f"{where}: label {wrong} is outside 0 to {count - 1}, the model's {count} outputs; {remedy}")
