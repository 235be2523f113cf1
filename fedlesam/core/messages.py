"""The messages between server and clients, and the state that a client keeps between its rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedlesam.core.buffers import Unsupported
from fedlesam.core.slots import LocalResult, State
from fedlesam.core.staging import to_device
from fedlesam.core.state import flatten, size_in_bytes, unflatten


@dataclass(frozen=True)
class Broadcast:
    """What the server sends to every active client of a round."""

    round: int
    """From 0."""
    weights: Tensor
    """The anchor w."""
    buffers: Mapping[str, Tensor]
    """Of the global model, by name."""
    perturbation: State
    """What the perturbation's rule broadcasts."""
    correction: State
    """What the correction broadcasts."""

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return self.weights.nbytes + size_in_bytes(self.buffers, self.perturbation, self.correction)

    def flatten(self) -> State:
        """Its tensors as one flat dict."""
        slots = {"buffers": self.buffers, "perturbation": self.perturbation, "correction": self.correction}
        return flatten(weights=self.weights, **slots)

    @classmethod
    def unflatten(cls, round: int, tensors: Mapping[str, Tensor]) -> "Broadcast":
        """The broadcast of a flat dict.

        Args:
            round: the round it is sent in.
            tensors: what `flatten` returned.
        """
        slots = dict(tensors)
        return cls(round, slots.pop("weights"), **unflatten(slots, "buffers", "perturbation", "correction"))


@dataclass(frozen=True)
class Memory:
    """What a client keeps between its active rounds. Never changed in place; clients may share vectors."""

    perturbation: State = field(default_factory=dict)
    """What the perturbation's rule keeps with the client."""
    correction: State = field(default_factory=dict)
    """What the correction keeps with the client."""

    def flatten(self) -> State:
        """Its tensors as one flat dict."""
        return flatten(perturbation=self.perturbation, correction=self.correction)

    @classmethod
    def unflatten(cls, tensors: Mapping[str, Tensor]) -> "Memory":
        """The memory of a flat dict.

        Args:
            tensors: what `flatten` returned.
        """
        return cls(**unflatten(tensors, "perturbation", "correction"))

    def to(self, device: torch.device) -> "Memory":
        """The memory on the device that uses it; what is read from a file is on the CPU.

        Args:
            device: of the model.
        """
        slots = ({n: to_device(t, device) for n, t in slot.items()} for slot in (self.perturbation, self.correction))
        return Memory(*slots)

    def __bool__(self) -> bool:
        return bool(self.perturbation or self.correction)

    def tensors(self) -> list[Tensor]:
        """Its tensors, without names."""
        return [*self.perturbation.values(), *self.correction.values()]

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of its tensors, by slot."""
        return tuple(self.perturbation), tuple(self.correction)

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return size_in_bytes(self.perturbation, self.correction)


@dataclass(frozen=True)
class ClientResult:
    """What a client sends back, and what it keeps."""

    client: int
    """Its number."""
    examples: int
    """Its samples."""
    result: LocalResult
    """Its update, steps and learning rate."""
    loss: float
    """Mean over its steps."""
    perturbation: State
    """What the perturbation's rule uploads."""
    correction: State
    """What the correction uploads."""
    buffers: Mapping[str, Tensor]
    """Of its model after its last step."""
    memory: Memory
    """What it keeps; not sent."""
    norms: Sequence[float] = ()
    """Of its update and of what its rules upload, by `norms_of`; what is not known yet is missing at the end."""
    peaks: Sequence[float] = ()
    """The largest entries of the same vectors, where the client has read them with its losses; not sent."""

    @property
    def nbytes(self) -> int:
        """The bytes that are uploaded; the memory stays with the client."""
        return self.result.update.nbytes + size_in_bytes(self.buffers, self.perturbation, self.correction)

    def flatten(self) -> State:
        """The tensors that are uploaded, as one flat dict."""
        slots = {"buffers": self.buffers, "perturbation": self.perturbation, "correction": self.correction}
        return flatten(update=self.result.update, **slots)


@dataclass(frozen=True)
class Results:
    """Results that are added up at once."""

    clients: Sequence[ClientResult]
    """Those of one client or of several."""
    sums: State = field(default_factory=dict)
    """The sums of what they upload, by name and in fixed point, where an engine has made them; else empty."""


def check_upload(upload: State, rule: object) -> State:
    """The upload of a rule, if it can be summed over clients; else the rule is wrong, not a client.

    Args:
        upload: what the rule returned.
        rule: for the message.
    """
    for name, value in upload.items():
        if not isinstance(value, Tensor) or value.is_complex() or value.dtype is torch.bool or not value.numel():
            form = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise Unsupported(
                f"{type(rule).__name__}.upload returned {name!r}: {form}, and uploads are summed over clients; return "
                "a tensor of at least one real number"
            )
    return upload
