"""Perturbations to compare FedLESAM's with: what the released code computes, and directions that know nothing.

The random ones draw from PyTorch's default generator, which the local loop seeds from (seed, round, client) before
`constant` and, with the step's number, before every `ascend`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedlesam.core.vectors import ascent_
from fedlesam.rules.base import RoundResult, State
from fedlesam.rules.perturbation import Ascent


@dataclass(frozen=True)
class ReleasedAscent(Ascent):
    """The perturbation of the authors' released code, which is not the paper's (docs/errata.md, 7 and 8).

    It indexes G, the flat last server step, by the *number of a tensor*: every entry of tensor j is shifted by
    -rho * G[j] / (sum over tensors k of abs(G[k]) + 1e-7). All clients have it from the server, from round 1 on.
    """

    sizes: tuple[int, ...] = field(default=(), repr=False, compare=False)
    """Entries per tensor of the model; set by `shaped`."""

    def shaped(self, sizes: Sequence[int]) -> "ReleasedAscent":
        return dataclasses.replace(self, sizes=tuple(sizes))

    def constant(self, anchor: Tensor, mine: State, ours: State) -> Tensor | None:
        if "old" not in ours:
            return None
        step = (anchor - ours["old"])[: len(self.sizes)]
        shifts = step * (-self.rho / (step.abs().sum() + 1e-7))
        return shifts.repeat_interleave(torch.tensor(self.sizes, device=anchor.device))

    def aggregate(self, ours: State, result: RoundResult) -> State:
        return {"old": result.anchor}


@dataclass(frozen=True)
class RandomRoundAscent(Ascent):
    """A placebo: a random direction of norm rho, fixed for a client's round. Theorem 1 cannot tell FedLESAM from it."""

    def constant(self, anchor: Tensor, mine: State, ours: State) -> Tensor | None:
        return ascent_(torch.randn_like(anchor), self.rho) if self.rho else None


@dataclass(frozen=True)
class RandomStepAscent(Ascent):
    """A placebo: a random direction of norm rho, fresh at every step."""

    gradient = "previous"

    def ascend(self, gradient: Tensor, weights: Tensor, mine: State, ours: State) -> Tensor:
        return ascent_(gradient.normal_(), self.rho)
