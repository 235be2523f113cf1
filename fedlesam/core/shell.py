"""A module without its weights, from which modules with given weights are made."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedlesam.core.buffers import Buffers
from fedlesam.core.saving import separate


class Shell:
    """Takes a module over and gives the memory of its trainable parameters back.

    Args:
        module: as the user made it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.strides = [parameter.stride() for parameter in _trainable(module)]
        for parameter in _trainable(module):
            parameter.grad = None
            parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)

    def filled(self, weights: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
        """A module of its own with these weights, in eval mode.

        Args:
            weights: of the trainable parameters, in their order; they are copied.
            buffers: those that are sent.
        """
        module = copy.deepcopy(self.module)
        for parameter, stride, piece in zip(_trainable(module), self.strides, weights, strict=True):
            own = torch.empty_strided(piece.shape, stride, dtype=piece.dtype, device=piece.device)
            parameter.data = own.copy_(piece)
        Buffers(module).load(buffers)
        separate(module)
        return module.eval()


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
