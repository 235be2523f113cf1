"""The mean over the results of a round, the same bits in any order of the clients.

Sums of floating-point numbers depend on their order; sums of integers do not. Model-sized vectors are therefore added
in fixed point. Small values (losses, BatchNorm statistics) are kept per client and added in the order of the clients.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedlesam.core.buffers import same_entries
from fedlesam.core.checks import NotFinite
from fedlesam.core.exact_sum import MOST, RANGE, ExactSum, adds_exactly
from fedlesam.core.messages import ClientResult, Results
from fedlesam.core.slots import State
from fedlesam.core.state import unflatten
from fedlesam.core.vectors import peaks_of, rows_of

ABOVE = 1.001
"""A norm in single precision, times this, is no smaller than any entry."""


@dataclass(frozen=True)
class ResultSummary:
    """The small values of one client's result."""

    weight: int
    """Of the client in the mean: 1, or its samples."""
    loss: float
    """Mean over its steps."""
    steps: int
    """E_i, those it took."""
    lr: float
    """The mean of its steps' learning rates."""
    square: float
    """norm(d_i) ** 2"""
    buffers: Mapping[str, Tensor]
    """Of its model after its last step."""


@dataclass
class Reduction:
    """The results of a round, added to sums one by one: no two updates are held at once.

    Whether a result is refused does not depend on the other results, and integers never overflow. An entry of a vector
    may be at most RANGE / weight; by examples, where the sums are wide, at most RANGE, and all active clients together
    may have 2 billion examples.

    Args:
        round: the round.
        asked: the weight of all active clients together, including those that fail.
        by_examples: whether clients are weighted by their number of samples.
        max_norm: of an update; a larger one is refused.
        buffers: those that were sent. An entry that no client changed keeps its bits, and may be -inf or NaN.
    """

    round: int
    asked: int
    by_examples: bool = False
    max_norm: float | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    sums: dict[str, ExactSum] = field(default_factory=dict, init=False)
    """The weighted sums of the results' vectors, by name."""
    summaries: dict[int, ResultSummary] = field(default_factory=dict, init=False)
    """By client, what is not a sum."""

    def add(self, answer: ClientResult) -> None:
        """Add a client's result.

        Args:
            answer: the result.

        Raises:
            NotFinite: it is not finite or too large; nothing was added.
        """
        [refused] = self.add_many(Results([answer]))
        if refused is not None:
            raise refused

    def add_many(self, results: Results) -> list[NotFinite | None]:
        """Add several clients' results, as one by one; for each the error if it is refused.

        Args:
            results: their vectors have the same names.
        """
        answers = results.clients
        if self._takes(results):
            for name, whole in results.sums.items():
                total = self.sums[name] = self.sum_of(name, whole)
                total.add_whole(whole)
            for answer in answers:
                self._summarise(answer, answer.norms[0] ** 2)
            return [None] * len(answers)
        named = uploads_of(answers)
        bounds = _bounds(answers, named)
        wrong, largest = self._refusals(answers, named, bounds)
        good = [i for i, why in enumerate(wrong) if not why]
        weights = [self._weight(answers[i]) for i in good]
        squares = {i: (answers[i].norms or bounds[i])[0] ** 2 for i in good}
        for name, rows in named.items() if good else ():
            total = self.sums[name] = self.sum_of(name, rows[0])
            if len(good) > 1:
                total.add_rows(rows if len(good) == len(answers) else rows[good], weights, largest)
                continue
            square = total.add(rows[good[0]], weights[0], largest * self.asked)
            if name == "update" and not answers[good[0]].norms:
                squares = {good[0]: float(square)}
        for i in good:
            self._summarise(answers[i], squares[i])
        return [NotFinite(why, self.round, a.client) if why else None for why, a in zip(wrong, answers, strict=True)]

    def _takes(self, results: Results) -> bool:
        """Whether sums that were made elsewhere are those that would be made here, and nothing is to be refused."""
        if not results.sums or self.by_examples:
            return False
        bounds = [answer.norms for answer in results.clients]
        if not all(len(norms) == len(results.sums) for norms in bounds) or not self._are_small(results.clients, bounds):
            return False
        return adds_exactly(len(bounds), max(map(max, bounds)))

    def _weight(self, answer: ClientResult) -> int:
        return answer.examples if self.by_examples else 1

    def _summarise(self, answer: ClientResult, square: float) -> None:
        result, weight = answer.result, self._weight(answer)
        summary = ResultSummary(weight, answer.loss, result.steps, result.lr, square, answer.buffers)
        self.summaries[answer.client] = summary

    def sum_of(self, name: str, like: Tensor) -> ExactSum:
        """The sum so far, or a new one.

        Args:
            name: of the vector.
            like: a vector of its size.
        """
        return self.sums.get(name) or ExactSum(like, wide=self.by_examples)

    def _refusals(
        self, answers: Sequence[ClientResult], named: Mapping[str, Tensor], bounds: Sequence[Sequence[float]]
    ) -> tuple[list[str], float]:
        """Why each result cannot be added, empty where it can, and what no entry of those that can is larger than."""
        if self.by_examples and self.asked > MOST:
            why = f"the clients asked have {self.asked} examples, at most {MOST} can be weighted"
            return [why] * len(answers), RANGE
        if self._are_small(answers, bounds):
            return [""] * len(answers), max(map(max, bounds))
        peaks = bounds
        if len(answers) > 1 or answers[0].norms:
            peaks = torch.stack([rows.reshape(len(answers), -1).abs().amax(1) for rows in named.values()], 1).tolist()
        found = [self._refusal(a, dict(zip(named, own, strict=True))) for a, own in zip(answers, peaks, strict=True)]
        return found, max((max(own) for own, why in zip(peaks, found, strict=True) if not why), default=RANGE)

    def _are_small(self, answers: Sequence[ClientResult], bounds: Sequence[Sequence[float]]) -> bool:
        """Whether their numbers need no closer look."""
        if self.max_norm is not None or any(answer.buffers for answer in answers):
            return False
        limit = self._limit
        return all(bound < limit for own in bounds for bound in own)

    @property
    def _limit(self) -> float:
        """What the entries of a vector must be below."""
        return RANGE if self.by_examples else RANGE / self.asked

    def _refusal(self, answer: ClientResult, peaks: Mapping[str, float]) -> str:
        largest = self._limit
        for name, peak in peaks.items():
            if not math.isfinite(peak):
                return f"{name} is not finite"
            if peak >= largest:
                return f"{name} has an entry of {peak:.3g}, too large to be averaged (from {largest:.3g})"
        suspect = [(~buffer.isfinite()).any() for buffer in answer.buffers.values()]
        for name, found in zip(answer.buffers, torch.stack(suspect).tolist() if suspect else (), strict=True):
            if found and not self._is_sent(name, answer.buffers[name]):
                return f"the buffer {name} is not finite"
        if self.max_norm is not None:
            norm = float(torch.linalg.vector_norm(answer.result.update, dtype=torch.float64))
            if norm > self.max_norm:
                return f"the update has norm {norm:.3g}, above {self.max_norm:g}"
        return ""

    def _is_sent(self, name: str, buffer: Tensor) -> bool:
        """Whether the entries of a buffer that are not finite are those that were sent."""
        sent = self.buffers.get(name)
        return sent is not None and bool((buffer.isfinite() | same_entries(buffer, sent)).all())

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

    def keep_update(self) -> None:
        """Give the sums of what rules uploaded back, once their means are made: they are twice a vector each."""
        self.sums = {name: total for name, total in self.sums.items() if name == "update"}

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
                if (sent := self.buffers.get(name)) is not None:
                    kept = torch.stack([same_entries(summary.buffers[name], sent) for summary in summaries]).all(0)
                    means[name] = torch.where(kept, sent.to(first.device), means[name])
            else:
                means[name] = torch.stack([summary.buffers[name] for summary in summaries]).amax(0)
        return means

    @property
    def steps(self) -> float:
        """The mean number of local steps, E_i."""
        return sum(summary.steps for summary in self.ordered) / len(self.summaries)

    @property
    def lr(self) -> float:
        """The mean learning rate of all their steps; 0 without any result."""
        rates = [summary.lr for summary in self.ordered]
        if len(set(rates)) <= 1:
            return rates[0] if rates else 0.0
        return sum(s.steps * s.lr for s in self.ordered) / sum(s.steps for s in self.ordered)

    @property
    def norm(self) -> float:
        """The mean of the norm(d_i)."""
        return sum(math.sqrt(summary.square) for summary in self.ordered) / len(self.summaries)

    @property
    def loss(self) -> float:
        """The mean local loss; NaN without any result."""
        return sum(summary.loss for summary in self.ordered) / len(self.summaries) if self.summaries else math.nan

    def divergence(self, landed: Tensor, anchor: Tensor) -> float:
        """The mean over the clients of norm(v_i - w_next)^2, from the moments of the d_i; NaN without any result.

        Args:
            landed: w_next.
            anchor: w.
        """
        if not self.summaries:
            return math.nan
        squares = sum(summary.weight * summary.square for summary in self.ordered) / self.weight
        return max(0.0, squares - self.sums["update"].pull(self.weight, landed, anchor))


def uploads_of(answers: Sequence[ClientResult]) -> dict[str, Tensor]:
    """The vectors that clients upload, by "update" and "slot/name", a row for each client.

    Args:
        answers: their results.
    """
    named = {"update": rows_of([answer.result.update for answer in answers])}
    for slot in ("perturbation", "correction"):
        for name in getattr(answers[0], slot):
            named[f"{slot}/{name}"] = rows_of([getattr(answer, slot)[name] for answer in answers])
    return named


def norms_of(vectors: Iterable[Tensor]) -> list[Sequence[float]]:
    """For each client the norms of its vectors; that of the first, the update, is in double precision.

    No entry is larger, and the other norms take a quarter of the time.

    Args:
        vectors: a row for each client.
    """
    update, *rest = (rows.reshape(len(rows), -1) for rows in vectors)
    norm, double = torch.linalg.vector_norm, torch.float64
    ends = [norm(update, dim=1, dtype=double), *(norm(rows, dim=1).mul_(ABOVE).double() for rows in rest)]
    found: list[Sequence[float]] = torch.stack(ends, 1).tolist()
    return found


def _bounds(answers: Sequence[ClientResult], named: Mapping[str, Tensor]) -> list[Sequence[float]]:
    """For each client a number for each vector that no entry is larger than, or no number; the device is read once.

    Of one client it is the largest entry, as its norm comes out of the sum, and nothing is read where that is known. Of
    several it is the norm.
    """
    known = [answer.norms for answer in answers]
    if all(len(norms) == len(named) for norms in known):
        return known
    if len(answers) > 1:
        return norms_of(named.values())
    if len(answers[0].peaks) == len(named):
        return [answers[0].peaks]
    return [peaks_of(named.values()).tolist()]
