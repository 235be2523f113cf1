"""How samples reach a device: whole data sets once in a process, batches through memory that a GPU can read itself."""

import functools
from collections import deque
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fedlesam.core.tree import Tree, leaves, move, tree_map

_copies: dict[torch.device, MutableMapping[Tensor, Tensor]] = {}
"""Of each device, by the tensor on the host; a copy goes when its tensor does."""


def resident(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, sent there once and kept as long as the tensor itself. Nobody may change either.

    Args:
        tensor: On the host.
        device: Where it should be.
    """
    if tensor.device == device:
        return tensor
    there = _copies.setdefault(device, WeakTensorKeyDictionary())
    if tensor not in there:
        there[tensor] = tensor.to(device)
    return there[tensor]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; Python does not wait for a GPU to have it.

    Args:
        tensor: Anywhere; on the device it is returned as it is.
        device: Where it should be.
    """
    pins = tensor.device.type == "cpu" and device.type != "cpu" and torch.cuda.is_available()
    return (tensor.pin_memory() if pins else tensor).to(device, non_blocking=device.type != "cpu")


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all copies to a GPU: memory that one stream has freed, another cannot use at once."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Staging:
    """Sends batches to a device so that gathering and copying one go on while the step before it runs.

    A GPU computes what it was told to after Python went on. From pageable memory PyTorch would wait for it before each
    copy; and in the stream of the steps a copy would wait itself.

    Args:
        device: Where the batches go.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pins = torch.cuda.is_available()
        self.sent: deque[torch.cuda.Event] = deque()

    def __call__(self, batch: Tree) -> Tree:
        """A batch on the device.

        Args:
            batch: Dicts, tuples and lists of tensors, nested.
        """
        if not self.pins or not all(map(_can_be_pinned, leaves(batch))):
            return move(batch, self.device)
        pinned = tree_map(lambda tensor: tensor.pin_memory(), batch)
        return move(pinned, self.device) if self.device.type != "cuda" else self._beside(pinned)

    def _beside(self, pinned: Tree) -> Tree:
        steps, copies = torch.cuda.current_stream(self.device), _stream(self.device)
        with torch.cuda.stream(copies):
            batch = move(pinned, self.device)
        steps.wait_stream(copies)
        for leaf in leaves(batch):
            if isinstance(leaf, Tensor):
                leaf.record_stream(steps)  # the memory is the other stream's, which may not use it again before
        self.sent.append(steps.record_event())
        if len(self.sent) > 1:
            self.sent.popleft().synchronize()  # else batches would pile up as far as Python is ahead
        return batch


def _can_be_pinned(leaf: Any) -> bool:
    """Whether it is known what memory it has; of an object that moves by its own method `to` it is not."""
    if isinstance(leaf, Tensor):
        return leaf.device.type == "cpu" and leaf.layout is torch.strided
    return not hasattr(leaf, "to")
