"""The order of the weights in a model's own vector: that of its tensors, or with convolutions in channels-last.

Everybody else sees vectors in the plain order of the tensors: files, messages, memories, server, probes. A vector is
turned where a client's round begins and where it ends.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Order:
    """Turns vectors.

    Args:
        shapes: of the model's tensors.
        turned: for each of them, whether it is in channels-last; then it has four axes.
    """

    def __init__(self, shapes: Sequence[torch.Size], turned: Sequence[bool]) -> None:
        self.shapes, self.turned = list(shapes), list(turned)
        self.sizes = [shape.numel() for shape in shapes]

    def plain_views(self, flat: Tensor) -> list[Tensor]:
        """A vector in the plain order, cut into the tensors' shapes without copying.

        Args:
            flat: the vector.
        """
        return [piece.view(shape) for piece, shape in zip(torch.split(flat, self.sizes), self.shapes, strict=True)]

    def views(self, flat: Tensor) -> list[Tensor]:
        """A vector in this order, cut into the tensors' shapes without copying.

        Args:
            flat: the vector.
        """
        pieces = zip(torch.split(flat, self.sizes), self.shapes, self.turned, strict=True)
        return [_channels_last(piece, shape) if turned else piece.view(shape) for piece, shape, turned in pieces]

    def inward(self, plain: Tensor, into: Tensor) -> Tensor:
        """Write a vector of the plain order in this order.

        Args:
            plain: the vector.
            into: where it goes.
        """
        return self._copy(self.plain_views(plain), self.views(into), into)

    def outward(self, flat: Tensor, into: Tensor) -> Tensor:
        """Write a vector of this order in the plain order.

        Args:
            flat: the vector.
            into: where it goes.
        """
        return self._copy(self.views(flat), self.plain_views(into), into)

    def _copy(self, source: Sequence[Tensor], places: Sequence[Tensor], into: Tensor) -> Tensor:
        with torch.no_grad():
            for piece, place in zip(source, places, strict=True):
                place.copy_(piece)
        return into


def _channels_last(piece: Tensor, shape: torch.Size) -> Tensor:
    outputs, inputs, height, width = shape
    return piece.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
