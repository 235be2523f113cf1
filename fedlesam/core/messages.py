"""What passes between server and clients, and what a client keeps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedlesam.core.slots import LocalResult, State


@dataclass(frozen=True)
class Broadcast:
    """What the server sends to every active client of a round."""

    round: int
    weights: Tensor
    """The anchor w."""
    buffers: Mapping[str, Tensor]
    perturbation: State
    correction: State

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + size_in_bytes(self.buffers, self.perturbation, self.correction)


@dataclass(frozen=True)
class Memory:
    """What a client keeps between its active rounds. Never changed in place; vectors may be shared between clients."""

    perturbation: State = field(default_factory=dict)
    correction: State = field(default_factory=dict)

    def to(self, device: torch.device) -> "Memory":
        """Where it is used; what is read from files is not on a GPU yet."""
        on = (
            {name: tensor.to(device) for name, tensor in slot.items()} for slot in (self.perturbation, self.correction)
        )
        return Memory(*on)

    def __bool__(self) -> bool:
        return bool(self.perturbation or self.correction)

    @property
    def nbytes(self) -> int:
        return size_in_bytes(self.perturbation, self.correction)


@dataclass(frozen=True)
class ClientResult:
    """What a client sends back, and what it keeps."""

    client: int
    examples: int
    result: LocalResult
    loss: float
    """Mean over its steps."""
    perturbation: State
    correction: State
    buffers: Mapping[str, Tensor]
    memory: Memory

    @property
    def nbytes(self) -> int:
        """What is sent; the memory stays."""
        return self.result.update.nbytes + size_in_bytes(self.buffers, self.perturbation, self.correction)


def unshare(tensors: Mapping[str, Tensor]) -> State:
    """For a safetensors file, in which no two tensors may share memory."""
    seen: set[int] = set()
    own: State = {}
    for name, tensor in tensors.items():
        dense = tensor.contiguous()
        storage = dense.untyped_storage().data_ptr()
        own[name] = dense.clone() if storage in seen else dense
        seen.add(storage)
    return own


def size_in_bytes(*states: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for state in states for tensor in state.values())
