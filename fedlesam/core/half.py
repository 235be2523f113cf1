"""Passes in bfloat16: under autocast, or with weights, activations and gradients in it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedlesam.core.buffers import Unsupported
from fedlesam.core.choices import Precision
from fedlesam.core.tree import tree_map


class Cast:
    """Calls a module in a precision; its outputs are in single precision again, so that losses are.

    Args:
        precision: of the run.
        device: the kind of device.
    """

    def __init__(self, precision: Precision, device: str) -> None:
        self.precision, self.device = precision, device

    def call(self, module: Callable[..., Any], inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """What the module returns.

        Args:
            module: the module, or its compiled form.
            inputs: its arguments.
            named: its named arguments.
        """
        if self.precision == "bf16":
            with torch.autocast(self.device, torch.bfloat16):
                return tree_map(_single, module(*inputs, **named))
        if self.precision == "bf16-pure":
            return tree_map(_single, module(*tree_map(_half, inputs), **tree_map(_half, named)))
        return module(*inputs, **named)


class HalfWeights:
    """The module's parameters as views into a bf16 copy of the flat weights, made anew for every pass.

    A step of SGD is often smaller than the last digit of a bf16 weight, and would be lost. So the weights that rules
    move, send and sum stay in single precision, and only passes see them rounded. BatchNorm and InstanceNorm keep
    single precision, as PyTorch's kernels for them want it beside bf16 inputs.

    Args:
        module: it is changed.
        parameters: the trainable ones.
        weights: the flat vector.
        views: cuts a flat vector into the parameters' shapes.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        weights: Tensor,
        views: Callable[[Tensor], list[Tensor]],
    ) -> None:
        norms = [layer for layer in module.modules() if isinstance(layer, _NormBase)]
        single = {id(tensor) for layer in norms for tensor in (*layer.parameters(), *layer.buffers())}
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and buffer.dtype != torch.bfloat16 and id(buffer) not in single:
                raise Unsupported(
                    f"bf16-pure: the buffer {name} is in {buffer.dtype}, and results computed with it would not be in "
                    "bf16; use the precision bf16, or make it a bfloat16 buffer"
                )
        self.vector = weights.to(torch.bfloat16)
        self.chosen = [id(parameter) not in single for parameter in parameters]
        for parameter, half, view in zip(parameters, self.chosen, views(self.vector), strict=True):
            if half:
                parameter.data = view
        for parameter in module.parameters():
            if not parameter.requires_grad and parameter.is_floating_point() and id(parameter) not in single:
                parameter.data = parameter.data.to(torch.bfloat16)

    def rounded(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Other weights, in the precision of each parameter.

        Args:
            pieces: in the parameters' shapes.
        """
        return [piece.to(torch.bfloat16) if half else piece for half, piece in zip(self.chosen, pieces, strict=True)]


def _single(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x


def _half(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16) if x.is_floating_point() else x
