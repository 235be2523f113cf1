"""Three rules of one's own, one for each slot, and the method they make.

    cd examples && python my_rule.py

In code: `fl.Federation(..., algorithm=my_method(rho=0.05))`. By name, from this folder: `my_rule:my_method`.
docs/add-a-rule.md explains every line.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fedlesam as fl
from fedlesam.rules import (
    ASCENT_EPS,
    AffineStep,
    Ascent,
    Correction,
    LocalResult,
    RoundResult,
    ServerRule,
    State,
    Step,
    param,
)


@dataclass(frozen=True)
class ScaledAscent(Ascent):
    """ASAM's ascent: large weights are moved further, e = rho * w^2 * g / norm(|w| * g).

    Kwon et al., ASAM: Adaptive Sharpness-Aware Minimization, ICML 2021.
    """

    gradient = "current"

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        size = step.weights.abs()
        scaled = gradient.mul_(size)
        norm = scaled.norm()
        return scaled.mul_(size).mul_(self.rho / (norm + ASCENT_EPS))


@dataclass(frozen=True)
class OwnMomentum(Correction):
    """Mix the gradient with this client's own mean direction of its last active round; nothing more is sent."""

    alpha: float = param(0.5, above=0)

    def prepare(self, anchor: Tensor, client_state: State, server_state: State) -> AffineStep:
        return (
            AffineStep(gain=self.alpha, bias=(1 - self.alpha) * client_state["m"])
            if "m" in client_state
            else AffineStep()
        )

    def next_client_state(self, client_state: State, server_state: State, result: LocalResult) -> State:
        return {"m": result.update / -(result.steps * result.lr)}


@dataclass(frozen=True)
class ServerMomentum(ServerRule):
    """FedAvgM: a = beta * a + d, then w + lr_g * a. Hsu et al., 2019."""

    beta: float = param(0.9, at_least=0)
    lr_g: float = param(1.0, above=0)

    def initial(self, anchor: Tensor) -> State:
        return {"a": torch.zeros_like(anchor)}

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        a = self.beta * state["a"] + result.update
        return torch.add(result.anchor, a, alpha=self.lr_g), {"a": a}


def my_method(rho: float = 0.5, alpha: float = 0.5, beta: float = 0.5) -> fl.Algorithm:
    return fl.Algorithm(ScaledAscent(rho), OwnMomentum(alpha), ServerMomentum(beta))


if __name__ == "__main__":
    torch.manual_seed(0)
    digits = fl.data.load("digits")
    by_class = digits.train.y.argsort()  # a sorted order, so that every client sees one or two classes only
    federation = fl.Federation(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        clients=[digits.shard(part) for part in by_class.chunk(10)],
        algorithm=my_method(),
        local=fl.LocalTraining(lr=0.05, epochs=1, batch_size=20),
        active=0.5,
        test=digits.test_shard(),
        execution=fl.Execution(threads=1),
    )
    print(federation.algorithm)
    for record in federation.run(10):
        print(f"round {record.round}: test accuracy {record.test_accuracy:.3f}")
