"""The local step, as fast as plain SGD."""

import torch
from torch import Tensor

from fedlesam.core.flat_model import FlatModel
from fedlesam.core.local import LocalTraining
from fedlesam.core.vectors import clip_coefficient
from fedlesam.rules.correction import Turn


class Descent:
    """v = v - lr * (gain * clip(g) + pull * v + bias + weight_decay * v), with the constants folded once a round.

    Works in place and allocates nothing of the model's size; gradients that share memory are copied to a vector of the
    model's first. `centre` is e where the loop walks along u = v + e: decay and pull act on v = u - e. It is a zero of
    no size otherwise, so both cases are the same operations.
    """

    def __init__(
        self, model: FlatModel, v: Tensor, centre: Tensor, turn: Turn, local: LocalTraining, lr: float
    ) -> None:
        self.model, self.v, self.centre, self.lr = model, v, centre, lr
        self.clip, self.momentum = local.clip, local.momentum
        self.pieces = model.views(v)
        self.rate = turn.pull + local.weight_decay
        clip_corrected = local.clip_scope == "corrected"
        self.inner, self.outer = (turn, Turn()) if clip_corrected else (Turn(), turn)
        self.inner_bias = model.views(self.inner.bias) if self.inner.bias is not None else None
        if local.momentum:
            self.heavy = model.scratch("momentum").zero_()
            self.heavy_pieces = model.views(self.heavy)

    def __call__(self, gradients: list[Tensor]) -> None:
        gradients = self._turned(gradients)
        gain = self.outer.gain * clip_coefficient(gradients, self.clip)
        if self.momentum:
            self.heavy.mul_(self.momentum)
            torch._foreach_add_(self.heavy_pieces, gradients, alpha=gain)
            self.heavy.add_(self.v, alpha=self.rate).sub_(self.centre, alpha=self.rate)
            if self.outer.bias is not None:
                self.heavy.add_(self.outer.bias)
            self.v.add_(self.heavy, alpha=-self.lr)
            return
        if self.rate:
            self.v.lerp_(self.centre, self.lr * self.rate)
        torch._foreach_add_(self.pieces, gradients, alpha=-self.lr * gain)
        if self.outer.bias is not None:
            self.v.add_(self.outer.bias, alpha=-self.lr)

    def _turned(self, gradients: list[Tensor]) -> list[Tensor]:
        """gain * g + bias where that is what is clipped, in the gradients themselves if nobody else sees it."""
        if self.inner.gain == 1 and self.inner_bias is None:
            return gradients
        if not apart(gradients):
            gradients = self.model.views(self.model.flatten_(gradients, out=self.model.scratch("gradient")))
        if self.inner.gain != 1:
            torch._foreach_mul_(gradients, self.inner.gain)
        if self.inner_bias is not None:
            torch._foreach_add_(gradients, self.inner_bias)
        return gradients


def apart(gradients: list[Tensor]) -> bool:
    """Whether each has a storage of its own; autograd may give several parameters views of one."""
    storages = [g.untyped_storage() for g in gradients]
    alone = len({s.data_ptr() for s in storages}) == len(storages)
    return alone and all(s.nbytes() == g.nbytes for s, g in zip(storages, gradients, strict=True))
