"""The mean over the answers of a round, the same bits in whatever order they come.

Sums of floating-point numbers depend on their order; sums of integers do not. Model-sized vectors are therefore added
in fixed point. What is small (losses, BatchNorm statistics) is kept per client and added in the order of the clients.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlesam.checks import NotFinite
from fedlesam.messages import Answer
from fedlesam.rules.base import State

SCALE = 2.0**40
"""Steps per unit: a resolution of 9e-13, and room for sums up to 8e6."""

CHUNK = 1 << 17
"""Entries converted at a time: they stay in the cache, and no second vector of the model's size is made."""


class ExactSum:
    """The sum of weight * x over vectors x, in 64-bit fixed point."""

    LIMIT = 2.0**62

    def __init__(self, like: Tensor) -> None:
        self.total = torch.zeros(like.shape, dtype=torch.int64, device=like.device)
        self.bound = 0.0
        """No entry of the total can be larger; checked before adding, since integers wrap silently."""

    def add(self, x: Tensor, weight: int) -> bool:
        """Whether x could be added: it is finite, and the total stays in range."""
        low, high = x.aminmax()
        peak = max(-float(low), float(high)) * SCALE * weight
        if not math.isfinite(peak) or self.bound + peak >= self.LIMIT:
            return False
        self.bound += peak
        for into, part in zip(torch.split(self.total, CHUNK), torch.split(x, CHUNK), strict=True):
            into.add_(torch.mul(part.double(), SCALE).round_().to(torch.int64), alpha=weight)
        return True

    def mean(self, weight: int, dtype: torch.dtype) -> Tensor:
        return self.total.double().div_(SCALE * weight).to(dtype)


@dataclass(frozen=True)
class Note:
    """The small things of one answer."""

    weight: int
    loss: float
    steps: int
    square: float
    """norm(d_i) ** 2"""
    peaks: Mapping[str, float]
    """What its vectors add to the bounds of the sums."""
    buffers: Mapping[str, Tensor]


class Reduction:
    """The answers of a round, folded into sums as they come: no two updates are held at once."""

    def __init__(self, round: int, by_examples: bool = False) -> None:
        self.round, self.by_examples = round, by_examples
        self.sums: dict[str, ExactSum] = {}
        self.notes: dict[int, Note] = {}
        self.lr = 0.0

    def add(self, answer: Answer) -> None:
        d, weight = answer.result.update, answer.examples if self.by_examples else 1
        vectors = {"update": d}
        vectors |= {f"perturbation.{name}": vector for name, vector in answer.perturbation.items()}
        vectors |= {f"correction.{name}": vector for name, vector in answer.correction.items()}
        peaks = {}
        for name, vector in vectors.items():
            if name not in self.sums:
                self.sums[name] = ExactSum(vector)
            before = self.sums[name].bound
            if not self.sums[name].add(vector, weight):
                raise self._too_large(name, answer.client)
            peaks[name] = self.sums[name].bound - before
        square = float(torch.linalg.vector_norm(d, dtype=torch.float64)) ** 2
        self.notes[answer.client] = Note(weight, answer.loss, answer.result.steps, square, peaks, answer.buffers)
        self.lr = answer.result.lr

    def check_range(self) -> None:
        """Of sums from several processes: that they stay in range together; if not, whose is too much."""
        bounds = dict.fromkeys(self.sums, 0.0)
        for client in sorted(self.notes):
            for name, peak in self.notes[client].peaks.items():
                bounds[name] = bounds.get(name, 0.0) + peak
                if bounds[name] >= ExactSum.LIMIT:
                    raise self._too_large(name, client)

    def _too_large(self, name: str, client: int) -> NotFinite:
        return NotFinite(f"{name} is too large to be averaged or", self.round, client)

    @property
    def ordered(self) -> list[Note]:
        return [self.notes[client] for client in sorted(self.notes)]

    @property
    def weight(self) -> int:
        return sum(note.weight for note in self.notes.values())

    def mean(self, slot: str, dtype: torch.dtype) -> State:
        """The mean uploads of one slot."""
        chosen = {name.partition(".")[2]: total for name, total in self.sums.items() if name.startswith(f"{slot}.")}
        return {name: total.mean(self.weight, dtype) for name, total in chosen.items()}

    def mean_update(self, dtype: torch.dtype) -> Tensor:
        return self.sums["update"].mean(self.weight, dtype)

    def mean_buffers(self) -> State:
        """Floats averaged in double precision, integers by their maximum."""
        notes, means = self.ordered, {}
        for name, first in notes[0].buffers.items():
            if first.is_floating_point():
                total = sum(note.buffers[name].double() * note.weight for note in notes)
                means[name] = torch.as_tensor(total / self.weight).to(first.dtype)
            else:
                means[name] = torch.stack([note.buffers[name] for note in notes]).amax(0)
        return means

    @property
    def steps(self) -> float:
        """The mean of the E_i."""
        return sum(note.steps for note in self.ordered) / len(self.notes)

    @property
    def loss(self) -> float:
        return sum(note.loss for note in self.ordered) / len(self.notes)

    def divergence(self, moved: Tensor) -> float:
        """The mean over the clients of norm(v_i - w_next)^2, from the moments: no d_i has to be kept."""
        d, moved = self.mean_update(torch.float64), moved.double()
        squares = sum(note.weight * note.square for note in self.ordered) / self.weight
        return max(0.0, squares - float(2 * d @ moved - moved @ moved))
