"""Perturbations for one backward pass that were tried and not shipped (docs/results/claim), and a schedule of rho.

cd examples
fedlesam tune --algorithm free_rules:momentum_d --over rho=0.1,0.3,1 --data digits
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlesam.algorithms import SLOW_DECAY, Algorithm
from fedlesam.rules import (
    Ascent,
    Average,
    ControlVariates,
    Dynamic,
    DynamicRegulariser,
    GlobalAscent,
    Perturbation,
    RoundResult,
    State,
    Step,
    ascent_,
)


@dataclass(frozen=True)
class MomentumAscent(Ascent):
    """Along a running sum of this round's loss gradients: freesam with a longer memory."""

    beta: float = 0.5
    gradient = "previous"

    def begin(self, anchor: Tensor, client_state: State) -> State:
        return {"m": torch.zeros_like(anchor)}

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        total = step.client_state["m"].mul_(self.beta).add_(gradient)
        return ascent_(gradient.copy_(total), self.rho)


@dataclass(frozen=True)
class StepBackAscent(Ascent):
    """The last step taken back, correction included: with control variates it estimates the global gradient."""

    gradient = "previous"

    def begin(self, anchor: Tensor, client_state: State) -> State:
        return {"last": anchor.clone()}

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        gradient.copy_(step.client_state["last"]).sub_(step.weights)
        step.client_state["last"].copy_(step.weights)
        return ascent_(gradient, self.rho)


@dataclass(frozen=True)
class RoundBackAscent(Ascent):
    """From where the client is towards the global model it started from: its own progress taken back."""

    gradient = "previous"

    def begin(self, anchor: Tensor, client_state: State) -> State:
        return {"from": anchor}

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return ascent_(gradient.copy_(step.client_state["from"]).sub_(step.weights), self.rho)


@dataclass(frozen=True)
class OldBackAscent(RoundBackAscent):
    """Towards the model it received the time before: FedLESAM's estimate and the client's own progress together."""

    def begin(self, anchor: Tensor, client_state: State) -> State:
        return {"from": client_state.get("old", anchor)}

    def next_client_state(self, anchor: Tensor, client_state: State) -> State:
        return {"old": anchor}


@dataclass(frozen=True)
class ScheduledGlobalAscent(GlobalAscent):
    """FedLESAM whose rho falls to 0 over the rounds, or grows from 0: the server counts them for the clients."""

    shape: Literal["falling", "growing"] = "falling"
    rounds: int = 150

    def initial(self, anchor: Tensor) -> State:
        return {"t": anchor.new_zeros(1)}

    def round_perturbation(self, anchor: Tensor, client_state: State, server_state: State) -> Tensor | None:
        e = super().round_perturbation(anchor, client_state, server_state)
        done = server_state["t"] / self.rounds
        return None if e is None else e * (done if self.shape == "growing" else 1 - done)

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        return {"t": server_state["t"] + 1}


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
