"""A module seen as one vector: with buffers.py the only place that writes into a module."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedlesam.core.buffers import Buffers
from fedlesam.core.choices import Precision as Precision
from fedlesam.core.module_check import check_module, one_number, one_tensor
from fedlesam.core.slots import TensorSpec

Loss = Callable[[Tensor, Tensor], Tensor]

MANY_WEIGHTS = 8_000_000
"""Of convolutions: with more, on a CPU, turning their gradients back costs more than channels-last gains.

ResNet-18 at batch 50 takes 0.89 of the time with 0.7 million of them, 0.97 with 6, 1.02 with 11 (docs/benchmarks.md).
"""


class FlatModel:
    """Takes a module over: its trainable parameters become views into the one vector `weights`.

    Frozen parameters are left alone. Gradients are views into one vector too, which never moves.
    """

    def __init__(self, module: nn.Module, precision: Precision = "fp32", compile: bool = False) -> None:
        self.module, self.bf16 = module, precision == "bf16"
        check_module(module)
        self.call: Callable[[Tensor], Tensor] = torch.compile(module) if compile else module
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not any(p.numel() for p in parameters):
            raise ValueError(
                "the model has no trainable parameters: nothing to train (is requires_grad False everywhere?)"
            )
        kinds = {(p.dtype, p.device) for p in parameters}
        if len(kinds) > 1:
            raise ValueError(
                f"all trainable parameters must have one dtype and one device, got {sorted(map(str, kinds))}; "
                "convert the model first, e.g. model.float().to(device)"
            )
        if not parameters[0].is_floating_point():
            raise ValueError(f"trainable parameters must be real numbers, got {parameters[0].dtype}")
        self.parameters, self.shapes = parameters, [p.shape for p in parameters]
        self.weights = torch.cat([p.detach().reshape(-1) for p in parameters])
        for parameter, view in zip(parameters, self.views(self.weights), strict=True):
            parameter.data = view
        self.state = Buffers(module)
        norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
        self.batch_norm = bool(norms)
        self.needs_batch = any(norm.running_mean is None for norm in norms)
        """Also in eval mode: statistics of one sample are none."""
        convolutions = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Conv2d))
        self.channels_last = convolutions > 0 and (self.device.type != "cpu" or convolutions <= MANY_WEIGHTS)
        self.backward_passes = 0
        self._scratch: dict[str, Tensor] = {}
        self._gradient: Tensor | None = None
        self._grads: list[Tensor] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it is a model of its own; torch would let both write into the same memory."""
        return _own, (self.module, "bf16" if self.bf16 else "fp32", self.call is not self.module)

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def names(self) -> list[str]:
        """Of the trainable parameters, in their order."""
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    @property
    def tensors(self) -> list[TensorSpec]:
        """The trainable parameters, in their order."""
        return [TensorSpec(name, shape) for name, shape in zip(self.names, self.shapes, strict=True)]

    @property
    def sizes(self) -> list[int]:
        """Entries of each trainable parameter, in their order."""
        return [shape.numel() for shape in self.shapes]

    def views(self, flat: Tensor) -> list[Tensor]:
        """`flat` cut into the parameters' shapes, without copying."""
        pieces = torch.split(flat, self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def scratch(self, name: str) -> Tensor:
        """A model-sized vector with arbitrary content, allocated once and reused by every client and step."""
        if name not in self._scratch:
            self._scratch[name] = torch.empty_like(self.weights)
        return self._scratch[name]

    def buffers(self) -> dict[str, Tensor]:
        """A copy of those that are sent, e.g. BatchNorm's statistics."""
        return self.state.copy()

    def load(self, weights: Tensor, buffers: Mapping[str, Tensor]) -> None:
        self.weights.copy_(weights)
        self.load_buffers(buffers)

    def load_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        self.state.load(buffers)

    def forward(self, x: Tensor) -> Tensor:
        """Pictures go in channels-last where convolutions are faster so; the weights keep their layout."""
        if self.channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if not self.bf16:
            return one_tensor(self.call(x))
        with torch.autocast(self.device.type, torch.bfloat16):
            return one_tensor(self.call(x)).float()

    def backward(self, loss: Loss, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        """One forward and backward pass at the current weights: the gradient goes into `out`, the loss is returned."""
        if self._gradient is not out:
            self._gradient, self._grads = out, self.views(out)
        value = one_number(loss(self.forward(x), y))
        for parameter, view in zip(self.parameters, self._grads, strict=True):
            if parameter.grad is not view:  # another vector, or the model has called zero_grad
                parameter.grad = view
        out.zero_()
        torch.autograd.backward(value)
        for parameter, view in zip(self.parameters, self._grads, strict=True):
            if parameter.grad is not view and parameter.grad is not None:  # a model that handles gradients itself
                view.copy_(parameter.grad)
        self.backward_passes += 1
        return value.detach()


def _own(module: nn.Module, precision: Precision, compile: bool) -> FlatModel:
    return FlatModel(copy.deepcopy(module), precision, compile)
