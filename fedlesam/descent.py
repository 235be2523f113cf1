"""The local step, as fast as plain SGD."""

import torch
from torch import Tensor

from fedlesam.local import LocalTraining
from fedlesam.models.flat import FlatModel
from fedlesam.rules.correction import Turn
from fedlesam.vectors import clip_coefficient


class Descent:
    """v = v - lr * (gain * clip(g) + pull * v + bias + weight_decay * v), with the constants folded once a round.

    Works in place and allocates nothing of the model's size. `centre` is e where the loop walks along u = v + e: decay
    and pull act on v = u - e. It is a zero of no size otherwise, so both cases are the same operations.
    """

    def __init__(
        self, model: FlatModel, v: Tensor, centre: Tensor, turn: Turn, local: LocalTraining, lr: float
    ) -> None:
        self.v, self.centre, self.lr, self.clip, self.momentum = v, centre, lr, local.clip, local.momentum
        self.pieces = model.views(v)
        self.rate = turn.pull + local.weight_decay
        clip_corrected = local.clip_scope == "corrected"
        self.inner, self.outer = (turn, Turn()) if clip_corrected else (Turn(), turn)
        self.inner_bias = model.views(self.inner.bias) if self.inner.bias is not None else None
        if local.momentum:
            self.heavy = model.scratch("momentum").zero_()
            self.heavy_pieces = model.views(self.heavy)

    def __call__(self, gradients: list[Tensor]) -> None:
        if self.inner.gain != 1:
            torch._foreach_mul_(gradients, self.inner.gain)
        if self.inner_bias is not None:
            torch._foreach_add_(gradients, self.inner_bias)
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
