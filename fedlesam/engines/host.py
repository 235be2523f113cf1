"""What clients keep is kept in host memory, whatever device they train on."""

import torch
from torch import Tensor

from fedlesam.core.messages import Memory


class HostMemory:
    """Moves the states of a round's clients off the device; the received model, which they may share, once.

    Args:
        received: the global model that the clients received.
    """

    def __init__(self, received: Tensor) -> None:
        self.received = self.anchor = received
        """`anchor` is the received model as states have it."""

    def keep(self, memory: Memory) -> Memory:
        """A client's state in host memory.

        Args:
            memory: the state as the rules made it.
        """
        if self.received.device.type == "cpu":
            return memory
        return Memory.unflatten({name: self._moved(tensor) for name, tensor in memory.flatten().items()})

    def _moved(self, tensor: Tensor) -> Tensor:
        if tensor is not self.received:
            return to_host(tensor)
        if self.anchor is self.received:
            self.anchor = to_host(tensor)
        return self.anchor


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned where there is a GPU: it comes back faster from there.

    Args:
        tensor: on any device; one on the CPU is returned as it is.
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available()).copy_(tensor)
