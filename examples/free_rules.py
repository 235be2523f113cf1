"""Perturbations for one backward pass that were tried and not shipped (docs/results/claim), and a schedule of rho.

cd examples
fedlesam tune --algorithm free_rules:momentum_d --over rho=0.1,0.3,1 --data digits
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlesam.algorithms import SLOW_DECAY, Algorithm
from fedlesam.core.vectors import ascent_
from fedlesam.rules.base import RoundResult, State
from fedlesam.rules.correction import ControlVariates, DynamicRegulariser
from fedlesam.rules.perturbation import Ascent, GlobalAscent, Perturbation
from fedlesam.rules.server import Average, Dynamic


@dataclass(frozen=True)
class MomentumAscent(Ascent):
    """Along a running sum of this round's loss gradients: freesam with a longer memory."""

    beta: float = 0.5
    gradient = "previous"

    def begin(self, anchor: Tensor, mine: State) -> State:
        return {"m": torch.zeros_like(anchor)}

    def ascend(self, gradient: Tensor, weights: Tensor, mine: State, ours: State) -> Tensor:
        mine["m"].mul_(self.beta).add_(gradient)
        return ascent_(gradient.copy_(mine["m"]), self.rho)


@dataclass(frozen=True)
class StepBackAscent(Ascent):
    """The last step taken back, correction included: with control variates it estimates the global gradient."""

    gradient = "previous"

    def begin(self, anchor: Tensor, mine: State) -> State:
        return {"last": anchor.clone()}

    def ascend(self, gradient: Tensor, weights: Tensor, mine: State, ours: State) -> Tensor:
        torch.sub(mine["last"], weights, out=gradient)
        mine["last"].copy_(weights)
        return ascent_(gradient, self.rho)


@dataclass(frozen=True)
class RoundBackAscent(Ascent):
    """From where the client is towards the global model it started from: its own progress taken back."""

    gradient = "previous"

    def begin(self, anchor: Tensor, mine: State) -> State:
        return {"from": anchor}

    def ascend(self, gradient: Tensor, weights: Tensor, mine: State, ours: State) -> Tensor:
        return ascent_(torch.sub(mine["from"], weights, out=gradient), self.rho)


@dataclass(frozen=True)
class OldBackAscent(RoundBackAscent):
    """Towards the model it received the time before: FedLESAM's estimate and the client's own progress together."""

    def begin(self, anchor: Tensor, mine: State) -> State:
        return {"from": mine.get("old", anchor)}

    def remember(self, anchor: Tensor, mine: State) -> State:
        return {"old": anchor}


@dataclass(frozen=True)
class ScheduledGlobalAscent(GlobalAscent):
    """FedLESAM whose rho falls to 0 over the rounds, or grows from 0: the server counts them for the clients."""

    shape: Literal["falling", "growing"] = "falling"
    rounds: int = 150

    def initial(self, anchor: Tensor) -> State:
        return {"t": anchor.new_zeros(1)}

    def constant(self, anchor: Tensor, mine: State, ours: State) -> Tensor | None:
        e = super().constant(anchor, mine, ours)
        done = ours["t"] / self.rounds
        return None if e is None else e * (done if self.shape == "growing" else 1 - done)

    def aggregate(self, ours: State, result: RoundResult) -> State:
        return {"t": ours["t"] + 1}


def on_scaffold(rule: Perturbation) -> Algorithm:
    return Algorithm(rule, ControlVariates(), Average())


def on_feddyn(rule: Perturbation) -> Algorithm:
    return Algorithm(rule, DynamicRegulariser(0.1), Dynamic(), SLOW_DECAY)


def momentum(rho: float = 0.1, beta: float = 0.5) -> Algorithm:
    return Algorithm(MomentumAscent(rho, beta))


def momentum_s(rho: float = 0.1, beta: float = 0.5) -> Algorithm:
    return on_scaffold(MomentumAscent(rho, beta))


def momentum_d(rho: float = 0.1, beta: float = 0.5) -> Algorithm:
    return on_feddyn(MomentumAscent(rho, beta))


def step_back_s(rho: float = 0.1) -> Algorithm:
    return on_scaffold(StepBackAscent(rho))


def step_back_d(rho: float = 0.1) -> Algorithm:
    return on_feddyn(StepBackAscent(rho))


def round_back(rho: float = 0.1) -> Algorithm:
    return Algorithm(RoundBackAscent(rho))


def round_back_s(rho: float = 0.1) -> Algorithm:
    return on_scaffold(RoundBackAscent(rho))


def round_back_d(rho: float = 0.1) -> Algorithm:
    return on_feddyn(RoundBackAscent(rho))


def old_back(rho: float = 0.1) -> Algorithm:
    return Algorithm(OldBackAscent(rho))


def falling(rho: float = 0.1, rounds: int = 150) -> Algorithm:
    return Algorithm(ScheduledGlobalAscent(rho, shape="falling", rounds=rounds))


def growing(rho: float = 0.1, rounds: int = 150) -> Algorithm:
    return Algorithm(ScheduledGlobalAscent(rho, shape="growing", rounds=rounds))
