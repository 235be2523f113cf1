"""The mean over the answers of a round, the same bits in whatever order they come.

Sums of floating-point numbers depend on their order; sums of integers do not. Model-sized vectors are therefore added
in fixed point. What is small (losses, BatchNorm statistics) is kept per client and added in the order of the clients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlesam.checks import NotFinite
from fedlesam.messages import Answer
from fedlesam.models.buffers import same_entries
from fedlesam.rules.base import State

SCALE = 2.0**40
"""Steps per unit: a resolution of 9e-13."""

RANGE = 2.0**22
"""The largest sum, 4e6, a bit below what 64-bit integers hold at this scale."""

CHUNK = 1 << 17
"""Entries converted at a time: they stay in the cache, and no second vector of the model's size is made."""


class ExactSum:
    """The sum of weight * x over vectors x, in 64-bit fixed point. Each weight * x is rounded on its own, once."""

    def __init__(self, like: Tensor) -> None:
        self.total = torch.zeros(like.shape, dtype=torch.int64, device=like.device)

    def add(self, x: Tensor, weight: float) -> None:
        for into, part in zip(torch.split(self.total, CHUNK), torch.split(x, CHUNK), strict=True):
            into.add_(torch.mul(part.double(), SCALE * weight).round_().to(torch.int64))

    def mean(self, weight: float, dtype: torch.dtype) -> Tensor:
        return self.total.double().div_(SCALE * weight).to(dtype)


@dataclass(frozen=True)
class Note:
    """The small things of one answer."""

    weight: int
    loss: float
    steps: int
    square: float
    """norm(d_i) ** 2"""
    buffers: Mapping[str, Tensor]


class Reduction:
    """The answers of a round, folded into sums as they come: no two updates are held at once.

    `asked` are the weights of all clients asked, whoever answers: an entry may be so large that as many of its size,
    with all their weight together, stay in range. So an answer is refused or not whatever the others are, and integers
    never wrap. Updates with a norm above `max_norm` are refused too. `buffers` are those that were sent: an entry of
    them that no client changed stays as it is, to the bit, and may be -inf or NaN.

    Weights are counted in `unit`, the power of two at or next above their mean: however many examples the clients have,
    range and resolution are those of the plain mean, whose unit is 1.
    """

    def __init__(
        self,
        round: int,
        asked: Sequence[int],
        *,
        by_examples: bool = False,
        max_norm: float | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.round, self.by_examples, self.max_norm = round, by_examples, max_norm
        self.sent = buffers or {}
        weight = max(1, sum(asked))
        self.unit = 1 << ((weight - 1) // max(1, len(asked))).bit_length()
        self.largest = RANGE * self.unit / weight
        self.sums: dict[str, ExactSum] = {}
        self.notes: dict[int, Note] = {}
        self.lr = 0.0

    def add(self, answer: Answer) -> None:
        """Refuses an answer that is not finite or has exploded before anything is added."""
        d, weight = answer.result.update, answer.examples if self.by_examples else 1
        vectors = {"update": d}
        vectors |= {f"perturbation.{name}": vector for name, vector in answer.perturbation.items()}
        vectors |= {f"correction.{name}": vector for name, vector in answer.correction.items()}
        norm = float(torch.linalg.vector_norm(d, dtype=torch.float64))
        wrong = self._refusal(vectors, answer.buffers, norm)
        if wrong:
            raise NotFinite(wrong, self.round, answer.client)
        for name, vector in vectors.items():
            if name not in self.sums:
                self.sums[name] = ExactSum(vector)
            self.sums[name].add(vector, weight / self.unit)
        self.notes[answer.client] = Note(weight, answer.loss, answer.result.steps, norm**2, answer.buffers)
        self.lr = answer.result.lr

    def _refusal(self, vectors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], norm: float) -> str:
        for name, vector in vectors.items():
            low, high = vector.aminmax()
            peak = max(-float(low), float(high))
            if not math.isfinite(peak):
                return f"{name} is not finite"
            if peak >= self.largest:
                return f"{name} has an entry of {peak:.3g}, too large to be averaged (from {self.largest:.3g})"
        for name, buffer in buffers.items():
            wrong = ~buffer.isfinite()
            if bool(wrong.any()) and name in self.sent:
                wrong &= ~same_entries(buffer, self.sent[name])
            if bool(wrong.any()):
                return f"the buffer {name} is not finite"
        if self.max_norm is not None and norm > self.max_norm:
            return f"the update has norm {norm:.3g}, above {self.max_norm:g}"
        return ""

    @property
    def ordered(self) -> list[Note]:
        return [self.notes[client] for client in sorted(self.notes)]

    @property
    def weight(self) -> int:
        return sum(note.weight for note in self.notes.values())

    def mean(self, slot: str, dtype: torch.dtype) -> State:
        """The mean uploads of one slot."""
        chosen = {name.partition(".")[2]: total for name, total in self.sums.items() if name.startswith(f"{slot}.")}
        return {name: total.mean(self.weight / self.unit, dtype) for name, total in chosen.items()}

    def mean_update(self, dtype: torch.dtype) -> Tensor:
        return self.sums["update"].mean(self.weight / self.unit, dtype)

    def mean_buffers(self) -> State:
        """Floats averaged in double precision, integers by their maximum."""
        notes, means = self.ordered, {}
        for name, first in notes[0].buffers.items():
            if first.is_floating_point():
                total = sum(note.buffers[name].double() * note.weight for note in notes)
                means[name] = torch.as_tensor(total / self.weight).to(first.dtype)
                if name in self.sent:
                    kept = torch.stack([same_entries(note.buffers[name], self.sent[name]) for note in notes]).all(0)
                    means[name] = torch.where(kept, self.sent[name].to(first.device), means[name])
            else:
                means[name] = torch.stack([note.buffers[name] for note in notes]).amax(0)
        return means

    @property
    def steps(self) -> float:
        """The mean of the E_i."""
        return sum(note.steps for note in self.ordered) / len(self.notes)

    @property
    def loss(self) -> float:
        """Of nobody it is NaN."""
        return sum(note.loss for note in self.ordered) / len(self.notes) if self.notes else math.nan

    def divergence(self, moved: Tensor) -> float:
        """The mean over the clients of norm(v_i - w_next)^2, from the moments; of nobody NaN. No d_i is kept."""
        if not self.notes:
            return math.nan
        d, moved = self.mean_update(torch.float64), moved.double()
        squares = sum(note.weight * note.square for note in self.ordered) / self.weight
        return max(0.0, squares - float(2 * d @ moved - moved @ moved))
