"""Slot 2, how to turn: the step direction is gain * g + pull * v + bias, fixed for the round.

Every correction of this family is affine in (g, v), so the vector `bias` is computed once a round, not once a step.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedlesam.core.checks import check_number
from fedlesam.rules.base import LocalResult, RoundResult, Rule, State


class Turn(NamedTuple):
    gain: float = 1.0
    pull: float = 0.0
    bias: Tensor | None = None


@dataclass(frozen=True)
class Correction(Rule):
    """A rule for (gain, pull, bias). Override `prepare`, and the rest as far as the rule has memory."""

    def prepare(self, anchor: Tensor, mine: State, ours: State) -> Turn:
        return Turn()

    def remember(self, mine: State, ours: State, result: LocalResult) -> State:
        """What the client keeps until its next active round."""
        return {}

    def upload(self, before: State, after: State) -> State:
        """What the client sends, from its memory before and after the round."""
        return {}

    def aggregate(self, ours: State, result: RoundResult) -> State:
        """The next round's `ours`."""
        return ours


@dataclass(frozen=True)
class NoCorrection(Correction):
    """The plain gradient."""


@dataclass(frozen=True)
class ControlVariates(Correction):
    """SCAFFOLD: turn by c - c_i, the server's minus the client's running estimate of its gradient.

    Karimireddy et al., SCAFFOLD, ICML 2020, option II. The FedLESAM paper prints the sign flipped and the server's
    sum without K/N (docs/errata.md, 2 and 3).
    """

    plain_mean = True
    scale: float = 1.0
    """Of the turn; the released FedLESAM-S has 0.1, the papers 1."""

    def __post_init__(self) -> None:
        check_number("ControlVariates", "scale", self.scale, at_least=0)

    def initial(self, anchor: Tensor) -> State:
        return {"c": torch.zeros_like(anchor)}

    def prepare(self, anchor: Tensor, mine: State, ours: State) -> Turn:
        bias = ours["c"] - mine["c"] if "c" in mine else ours["c"]
        return Turn(bias=bias if self.scale == 1 else self.scale * bias)

    def remember(self, mine: State, ours: State, result: LocalResult) -> State:
        fresh = torch.sub(-ours["c"], result.update, alpha=1 / (result.steps * result.lr))
        return {"c": fresh.add_(mine["c"]) if "c" in mine else fresh}

    def upload(self, before: State, after: State) -> State:
        return {"change": after["c"] - before["c"] if "c" in before else after["c"]}

    def aggregate(self, ours: State, result: RoundResult) -> State:
        return {"c": torch.add(ours["c"], result.uploads["change"], alpha=result.share)}

    def forget(self, ours: State, sent: State, share: float) -> State:
        return {"c": torch.sub(ours["c"], sent["change"], alpha=share)}


@dataclass(frozen=True)
class ClientMomentum(Correction):
    """FedCM: mix the local gradient with the last round's mean one, alpha * g + (1 - alpha) * m.

    Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        check_number("ClientMomentum", "alpha", self.alpha, above=0)
        if self.alpha > 1:
            raise ValueError(f"ClientMomentum: alpha is a share of the local gradient, at most 1, got {self.alpha}")

    def initial(self, anchor: Tensor) -> State:
        return {"m": torch.zeros_like(anchor)}

    def prepare(self, anchor: Tensor, mine: State, ours: State) -> Turn:
        return Turn(gain=self.alpha, bias=(1 - self.alpha) * ours["m"])

    def aggregate(self, ours: State, result: RoundResult) -> State:
        return {"m": result.update / -(result.steps * result.lr)}


@dataclass(frozen=True)
class DynamicRegulariser(Correction):
    """FedDyn: lam * (v - w + h_i), with h_i the sum of this client's updates so far.

    Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021; lam is 1/beta of the FedLESAM paper,
    whose signs of the dual variable contradict each other (docs/errata.md, 4).
    """

    lam: float = 0.1
    plain_mean = True

    def __post_init__(self) -> None:
        check_number("DynamicRegulariser", "lam", self.lam, at_least=0)

    def prepare(self, anchor: Tensor, mine: State, ours: State) -> Turn:
        return Turn(pull=self.lam, bias=self.lam * (mine["h"] - anchor) if "h" in mine else -self.lam * anchor)

    def remember(self, mine: State, ours: State, result: LocalResult) -> State:
        return {"h": mine["h"] + result.update if "h" in mine else result.update}


@dataclass(frozen=True)
class Proximal(Correction):
    """FedProx: prox * (v - w). Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020."""

    prox: float = 0.1

    def __post_init__(self) -> None:
        check_number("Proximal", "prox", self.prox, at_least=0)

    def prepare(self, anchor: Tensor, mine: State, ours: State) -> Turn:
        return Turn(pull=self.prox, bias=-self.prox * anchor)
