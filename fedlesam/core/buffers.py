"""The buffers of a module: most travel with the weights, the rest must stay as they are."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

AVERAGED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Floats by their mean, the others by their maximum (reduction.py). For any other dtype neither is defined."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Unsupported(ValueError):
    """The model, or a rule, is one that cannot be trained with: no fault of a client."""


class Buffers:
    """All buffers of a module, persistent or not; one that several modules share counts once.

    `names` are those that are sent, averaged and kept. The others, of a dtype or layout that cannot be averaged, are
    the same in every process as long as nothing changes them, which `check` looks after, as after frozen parameters.

    Args:
        module: The model; its buffers are read and written in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        found = self._found()
        self.places = {name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in found}
        self.forms = {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()}
        self.names = [n for n, t in found.items() if t.layout is torch.strided and t.dtype in AVERAGED]
        self.fixed = {name: _mark(tensor) for name, tensor in found.items() if name not in self.names}
        self.frozen = {name: _touched(p) for name, p in module.named_parameters() if not p.requires_grad}
        self.own = any(owner._buffers and not isinstance(owner, _NormBase) for owner in module.modules())
        """Some belong to other layers than norms, whose ways are known."""

    def copy(self) -> dict[str, Tensor]:
        """Copies of the buffers that are sent, by name."""
        return {name: self._now(name).detach().clone(memory_format=torch.contiguous_format) for name in self.names}

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Write values into the module's buffers, in place.

        Args:
            values: By the buffers' names; the others stay as they are.
        """
        for name, value in values.items():
            into = self._now(name)
            if into.requires_grad:  # the model has put a result of autograd in its place
                owner, key = self.places[name]
                into = owner._buffers[key] = into.detach()
            for dim, (size, stride) in enumerate(zip(into.shape, into.stride(), strict=True)):
                if size > 1 and stride == 0:  # expanded: its entries are one place in memory
                    into, value = into.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
            into.copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        """Those of the module themselves."""
        return {name: self._now(name) for name in self.places}

    def replaced(self, held: Mapping[str, Tensor]) -> list[str]:
        """The buffers for which the module has other tensors by now; it gets those held back.

        Args:
            held: The tensors that the module should have, by name.
        """
        found = [name for name, (owner, key) in self.places.items() if owner._buffers[key] is not held[name]]
        for name in found:
            owner, key = self.places[name]
            owner._buffers[key] = held[name]
        return found

    def check(self) -> None:
        """Refuse a model that has changed what is not sent: the next client here would train another one."""
        now = self._found()
        for name in sorted(now.keys() ^ self.forms.keys()):
            what = "appears" if name in now else "disappears"
            raise Unsupported(
                f"the buffer {name} {what} while the model trains, so it would pass from client to client; register "
                "it with its shape when the model is made, and change it in place"
            )
        for name, tensor in now.items():
            shape, dtype = self.forms[name]
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                raise Unsupported(
                    f"the buffer {name} becomes {tuple(tensor.shape)} of {tensor.dtype} while the model trains, it was "
                    f"{tuple(shape)} of {dtype}; a buffer must keep its shape and dtype"
                )
        for name, mark in self.fixed.items():
            if not _same(mark, now[name]):
                kind = now[name].dtype if now[name].layout is torch.strided else now[name].layout
                raise Unsupported(
                    f"the buffer {name} changes while the model trains, and {kind} cannot be averaged over "
                    "clients; use a real dtype such as float32, for complex numbers torch.view_as_real"
                )
        for name, parameter in self.module.named_parameters():
            if name in self.frozen and self.frozen[name] != _touched(parameter):
                raise Unsupported(frozen_changes(name))

    def _found(self) -> dict[str, Tensor]:
        """A parameter that is registered as a buffer, too, is none: it goes with the weights."""
        parameters = {id(p) for p in self.module.parameters()}
        return {name: tensor for name, tensor in self.module.named_buffers() if id(tensor) not in parameters}

    def _now(self, name: str) -> Tensor:
        owner, key = self.places[name]
        tensor = owner._buffers[key]
        if tensor is None:
            raise Unsupported(f"the buffer {name} disappears while the model trains; change it in place")
        return tensor


def frozen_changes(name: str) -> str:
    """The message for a frozen parameter that training changes.

    Args:
        name: The parameter's.
    """
    return (
        f"the frozen parameter {name} changes while the model trains, and frozen parameters are not sent; make it a "
        "buffer (register_buffer), and it is averaged over clients"
    )


def same_entries(one: Tensor, other: Tensor) -> Tensor:
    """Where the bits are equal: NaN is like itself.

    Args:
        one: A tensor.
        other: One of the same shape and dtype, on any device.
    """
    bits = BITS[one.element_size()]
    return one.contiguous().view(bits) == other.to(one.device).contiguous().view(bits)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN is like itself.

    Args:
        one: A tensor.
        other: Another one.
    """
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    flat = (tensor.detach().contiguous().reshape(-1) for tensor in (one, other))
    return torch.equal(*(tensor.view(torch.uint8) if tensor.numel() else tensor for tensor in flat))


def _touched(tensor: Tensor) -> tuple[int, int]:
    """Another one after every change in place, and after every new memory."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _mark(tensor: Tensor) -> tuple[Tensor, int]:
    return (tensor.detach().clone(), 0) if tensor.layout is torch.strided else (tensor, tensor._version)


def _same(mark: tuple[Tensor, int], now: Tensor) -> bool:
    before, version = mark
    if now.layout is torch.strided:
        return same_bits(before, now)
    return now is before and now._version == version
