"""The mean over the answers of a round."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedlesam.messages import Answer
from fedlesam.rules.base import State


class Mean:
    """The running weighted mean of named tensors: floats in double precision, integers by their maximum."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.weight = 0.0

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        self.weight += weight
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                self.sums[name] = torch.maximum(self.sums.get(name, tensor), tensor)
            elif name in self.sums:
                self.sums[name].add_(tensor, alpha=weight)
            else:
                self.sums[name] = tensor.double() * weight

    def like(self, dtypes: Mapping[str, Tensor] | torch.dtype) -> State:
        """The means, as `dtypes` has them."""
        means = {k: s / self.weight if s.is_floating_point() else s for k, s in self.sums.items()}
        return {k: m.to(dtypes if isinstance(dtypes, torch.dtype) else dtypes[k].dtype) for k, m in means.items()}


class Reduction:
    """The answers of a round folded into means as they come, so that no two updates are held at once."""

    def __init__(self, by_examples: bool = False) -> None:
        self.by_examples = by_examples
        self.update, self.perturbation, self.correction, self.buffers = Mean(), Mean(), Mean(), Mean()
        self.clients, self.steps, self.loss, self.squares, self.lr = 0, 0.0, 0.0, 0.0, 0.0

    def add(self, answer: Answer) -> None:
        weight = float(answer.examples) if self.by_examples else 1.0
        d = answer.result.update
        self.update.add({"d": d}, weight)
        self.perturbation.add(answer.perturbation, weight)
        self.correction.add(answer.correction, weight)
        self.buffers.add(answer.buffers, weight)
        self.squares += weight * float(torch.linalg.vector_norm(d, dtype=torch.float64)) ** 2
        self.clients, self.lr = self.clients + 1, answer.result.lr
        self.steps, self.loss = self.steps + answer.result.steps, self.loss + answer.loss

    def divergence(self, moved: Tensor) -> float:
        """The mean over the clients of norm(v_i - w_next)^2, from the moments: no d_i has to be kept."""
        d, moved = self.update.sums["d"] / self.update.weight, moved.double()
        return max(0.0, self.squares / self.update.weight - float(2 * d @ moved - moved @ moved))
