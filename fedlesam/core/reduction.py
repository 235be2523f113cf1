"""The mean over the results of a round, the same bits in any order of the clients.

Sums of floating-point numbers depend on their order; sums of integers do not. Model-sized vectors are therefore added
in fixed point. Small values (losses, BatchNorm statistics) are kept per client and added in the order of the clients.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlesam.core.buffers import same_entries
from fedlesam.core.checks import NotFinite
from fedlesam.core.messages import ClientResult
from fedlesam.core.slots import State
from fedlesam.core.state import flatten, unflatten

SCALE = 2.0**40
"""Steps per unit: a resolution of 9e-13."""

RANGE = 2.0**22
"""The largest sum, 4e6, a bit below what 64-bit integers hold at this scale."""

LOW = 31
"""Bits of the lower half of a sum by examples; the upper half has as many."""

MOST = 1 << LOW
"""Examples that can be weighted in a round: neither half can wrap."""

CHUNK = 1 << 17
"""Entries converted at a time: they stay in the cache, and no second vector of the model's size is made."""


class ExactSum:
    """The sum of weight * x over vectors x, in 64-bit fixed point.

    Args:
        like: a vector of the same size and device.
        wide: use two integers per entry, for weights by examples. One is enough for a plain mean; with weights it would
            lose range, and a scale that depends on the active clients would give other bits when one of them fails.
    """

    def __init__(self, like: Tensor, wide: bool = False) -> None:
        self.wide = wide
        self.total = torch.zeros(2 * like.numel() if wide else like.shape, dtype=torch.int64, device=like.device)

    def add(self, x: Tensor, weight: int) -> None:
        """Add weight * x.

        Args:
            x: a vector.
            weight: an integer.
        """
        halves = self.total.chunk(2) if self.wide else (self.total,)
        for *into, part in zip(*(torch.split(half, CHUNK) for half in halves), torch.split(x, CHUNK), strict=True):
            fixed = torch.mul(part.double(), SCALE).round_().to(torch.int64)
            if self.wide:
                into[1].add_(fixed & (MOST - 1), alpha=weight)
                fixed >>= LOW
            into[0].add_(fixed, alpha=weight)

    def mean(self, weight: int, dtype: torch.dtype) -> Tensor:
        """The sum divided by a weight.

        Args:
            weight: the sum of all weights.
            dtype: of the result.
        """
        if self.wide:
            high, low = self.total.chunk(2)
            total = high.double().mul_(MOST).add_(low)
        else:
            total = self.total.double()
        return total.div_(SCALE * weight).to(dtype)


@dataclass(frozen=True)
class ResultSummary:
    """The small values of one client's result."""

    weight: int
    loss: float
    steps: int
    square: float
    """norm(d_i) ** 2"""
    buffers: Mapping[str, Tensor]


class Reduction:
    """The results of a round, added to sums one by one: no two updates are held at once.

    Whether a result is refused does not depend on the other results, and integers never overflow. An entry of a vector
    may be at most RANGE / weight; by examples, where the sums are wide, at most RANGE, and all active clients together
    may have 2 billion examples.

    Args:
        round: the round.
        weight: of all active clients together, including those that fail.
        by_examples: whether clients are weighted by their number of samples.
        max_norm: of an update; a larger one is refused.
        buffers: those that were sent. An entry that no client changed keeps its bits, and may be -inf or NaN.
    """

    def __init__(
        self,
        round: int,
        weight: int,
        *,
        by_examples: bool = False,
        max_norm: float | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.round, self.asked, self.by_examples, self.max_norm = round, weight, by_examples, max_norm
        self.received = buffers or {}
        self.largest = RANGE if by_examples else RANGE / weight
        self.sums: dict[str, ExactSum] = {}
        self.summaries: dict[int, ResultSummary] = {}
        self.lr = 0.0

    def add(self, answer: ClientResult) -> None:
        """Add a client's result.

        Args:
            answer: the result.

        Raises:
            NotFinite: it is not finite or too large; nothing was added.
        """
        d, weight = answer.result.update, answer.examples if self.by_examples else 1
        vectors = flatten(update=d, perturbation=answer.perturbation, correction=answer.correction)
        norm = float(torch.linalg.vector_norm(d, dtype=torch.float64))
        wrong = self._refusal(vectors, answer.buffers, norm)
        if wrong:
            raise NotFinite(wrong, self.round, answer.client)
        for name, vector in vectors.items():
            self.sums[name] = self.sum_of(name, vector)
            self.sums[name].add(vector, weight)
        self.summaries[answer.client] = ResultSummary(weight, answer.loss, answer.result.steps, norm**2, answer.buffers)
        self.lr = answer.result.lr

    def sum_of(self, name: str, like: Tensor) -> ExactSum:
        """The sum so far, or a new one.

        Args:
            name: of the vector.
            like: a vector of its size.
        """
        return self.sums.get(name) or ExactSum(like, wide=self.by_examples)

    def _refusal(self, vectors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], norm: float) -> str:
        if self.by_examples and self.asked > MOST:
            return f"the clients asked have {self.asked} examples, at most {MOST} can be weighted"
        for name, vector in vectors.items():
            low, high = vector.aminmax()
            peak = max(-float(low), float(high))
            if not math.isfinite(peak):
                return f"{name} is not finite"
            if peak >= self.largest:
                return f"{name} has an entry of {peak:.3g}, too large to be averaged (from {self.largest:.3g})"
        for name, buffer in buffers.items():
            wrong = ~buffer.isfinite()
            if bool(wrong.any()) and name in self.received:
                wrong &= ~same_entries(buffer, self.received[name])
            if bool(wrong.any()):
                return f"the buffer {name} is not finite"
        if self.max_norm is not None and norm > self.max_norm:
            return f"the update has norm {norm:.3g}, above {self.max_norm:g}"
        return ""

    @property
    def ordered(self) -> list[ResultSummary]:
        """In the order of the clients."""
        return [self.summaries[client] for client in sorted(self.summaries)]

    @property
    def weight(self) -> int:
        """Of the clients whose result was added."""
        return sum(summary.weight for summary in self.summaries.values())

    def mean(self, slot: str, dtype: torch.dtype) -> State:
        """The mean of what a slot's rule uploads.

        Args:
            slot: its name.
            dtype: of the result.
        """
        sums = {name: total for name, total in self.sums.items() if name.startswith(f"{slot}/")}
        return {name: total.mean(self.weight, dtype) for name, total in unflatten(sums, slot)[slot].items()}

    def mean_update(self, dtype: torch.dtype) -> Tensor:
        """The mean update d.

        Args:
            dtype: of the result.
        """
        return self.sums["update"].mean(self.weight, dtype)

    def mean_buffers(self) -> State:
        """Floats averaged in double precision, integers by their maximum."""
        summaries, means = self.ordered, {}
        for name, first in summaries[0].buffers.items():
            if first.is_floating_point():
                total = sum(summary.buffers[name].double() * summary.weight for summary in summaries)
                means[name] = torch.as_tensor(total / self.weight).to(first.dtype)
                if name in self.received:
                    kept = torch.stack(
                        [same_entries(summary.buffers[name], self.received[name]) for summary in summaries]
                    ).all(0)
                    means[name] = torch.where(kept, self.received[name].to(first.device), means[name])
            else:
                means[name] = torch.stack([summary.buffers[name] for summary in summaries]).amax(0)
        return means

    @property
    def steps(self) -> float:
        """The mean number of local steps, E_i."""
        return sum(summary.steps for summary in self.ordered) / len(self.summaries)

    @property
    def loss(self) -> float:
        """The mean local loss; NaN without any result."""
        return sum(summary.loss for summary in self.ordered) / len(self.summaries) if self.summaries else math.nan

    def divergence(self, moved: Tensor) -> float:
        """The mean over the clients of norm(v_i - w_next)^2, from the moments of the d_i; NaN without any result.

        Args:
            moved: w_next - w.
        """
        if not self.summaries:
            return math.nan
        d, moved = self.mean_update(torch.float64), moved.double()
        squares = sum(summary.weight * summary.square for summary in self.ordered) / self.weight
        return max(0.0, squares - float(2 * d @ moved - moved @ moved))
