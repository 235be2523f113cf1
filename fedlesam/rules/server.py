"""Slot 3, how to land: from the mean update d to the next global model."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedlesam.core.checks import check_params, param
from fedlesam.core.slots import Algorithm, RoundResult, ServerRule, State
from fedlesam.core.vectors import ascent_
from fedlesam.rules.correction import SentDual
from fedlesam.rules.schedule import ramp


@dataclass(frozen=True)
class Adam(ServerRule):
    """FedAdam, without bias correction. Reddi et al., Adaptive Federated Optimization, ICLR 2021."""

    formula = ("a <- b1 a + (1 - b1) d", "b <- b2 b + (1 - b2) d^2", "w <- w + lr_g a / (sqrt(b) + eps)")
    lr_g: float = param(0.1, above=0)
    """The server's learning rate."""
    b1: float = param(0.9, at_least=0, below=1)
    """The share of the old value in the first moment a."""
    b2: float = param(0.99, at_least=0, below=1)
    """The share of the old value in the second moment b."""
    eps: float = param(0.01, above=0)
    """Added to the root of the second moment."""

    def initial(self, anchor: Tensor) -> State:
        return {"a": torch.zeros_like(anchor), "b": torch.zeros_like(anchor)}

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        d = result.update
        a = self.b1 * state["a"] + (1 - self.b1) * d
        b = self._second(state["b"], d)
        return result.anchor + self.lr_g * a / (b.sqrt() + self.eps), {"a": a, "b": b}

    def _second(self, b: Tensor, d: Tensor) -> Tensor:
        """The next second moment."""
        return self.b2 * b + (1 - self.b2) * d * d


@dataclass(frozen=True)
class Yogi(Adam):
    """FedYogi: FedAdam with b - (1 - b2) * d^2 * sign(b - d^2). Reddi et al., Adaptive Federated Optimization, 2021."""

    formula = ("a <- b1 a + (1 - b1) d", "b <- b - (1 - b2) d^2 sign(b - d^2)", "w <- w + lr_g a / (sqrt(b) + eps)")

    def _second(self, b: Tensor, d: Tensor) -> Tensor:
        square = d * d
        return b - (1 - self.b2) * square * torch.sign(b - square)


@dataclass(frozen=True)
class Adagrad(ServerRule):
    """FedAdagrad: w + lr_g * d / (sqrt(b) + eps), b += d^2. Reddi et al., Adaptive Federated Optimization, 2021."""

    formula = ("b <- b + d^2", "w <- w + lr_g d / (sqrt(b) + eps)")
    lr_g: float = param(0.1, above=0)
    """The server's learning rate."""
    eps: float = param(0.01, above=0)
    """Added to the root of the sum b."""

    def initial(self, anchor: Tensor) -> State:
        return {"b": torch.zeros_like(anchor)}

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        d = result.update
        b = state["b"] + d * d
        return result.anchor + self.lr_g * d / (b.sqrt() + self.eps), {"b": b}


@dataclass(frozen=True)
class ServerMomentum(ServerRule):
    """FedAvgM: m = beta * m + d, then w + lr_g * m.

    Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, arXiv
    1909.06335, 2019.
    """

    formula = ("m <- beta m + d", "w <- w + lr_g m")
    lr_g: float = param(1.0, above=0)
    """The server's learning rate, a factor of m."""
    beta: float = param(0.9, at_least=0, below=1)
    """The share of the old m that stays."""

    def initial(self, anchor: Tensor) -> State:
        return {"m": torch.zeros_like(anchor)}

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        m = self.beta * state["m"] + result.update
        return torch.add(result.anchor, m, alpha=self.lr_g), {"m": m}


@dataclass(frozen=True)
class Nesterov(ServerRule):
    """FedNSAM's server: rounds start at w + gamma * m; m = gamma * m + d with d from that start; then w + m.

    Liu et al., FedNSAM, arXiv 2602.23827.
    """

    formula = ("start: w + gamma m", "m <- gamma m + d", "w <- w + m")
    gamma: float = param(0.85, at_least=0, below=1)
    """The share of the old m that stays."""

    def initial(self, anchor: Tensor) -> State:
        return {"m": torch.zeros_like(anchor)}

    def start(self, state: State, weights: Tensor) -> Tensor:
        return torch.add(weights, state["m"], alpha=self.gamma)

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        m = self.gamma * state["m"] + result.update
        return result.anchor + m, {"m": m}


@dataclass(frozen=True)
class Dynamic(ServerRule):
    """FedDyn's landing: w + d + H, with H += (K/N) * d, which keeps H the mean over all clients of their h_i."""

    formula: ClassVar[tuple[str, ...]] = ("H <- H + (K / N) d", "w <- w + d + H")
    lr_g: float = 1.0
    """Only 1 is accepted."""
    requires_uniform_weights = True

    def __post_init__(self) -> None:
        if self.lr_g != 1:
            raise ValueError(
                f"Dynamic: the dynamic server has no global learning rate, lr_g must be 1, got {self.lr_g}"
            )

    def initial(self, anchor: Tensor) -> State:
        return {"H": torch.zeros_like(anchor)}

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        total = torch.add(state["H"], result.update, alpha=result.share)
        return result.anchor + result.update + total, {"H": total}

    def remove_client(self, server_state: State, uploads: State, share: float) -> State:
        return {"H": torch.sub(server_state["H"], uploads["update"], alpha=share)}


@dataclass(frozen=True)
class ShiftedDynamic(Dynamic):
    """FedGloss's server: rounds start at w - rho_s * u(d), d the last mean update; landing as FedDyn from that start.

    Caldarola et al., Beyond Local Sharpness: Communication-Efficient Global Sharpness-aware Minimization for Federated
    Learning, CVPR 2025, arXiv 2412.03752. With a `warmup` rho_s grows as the clients' rho (`RampedAscent`).
    """

    formula = ("start: w - rho_s u(d of the last round)", "H <- H + (K / N) d", "w <- w + d + H")
    rho_s: float = param(0.15, at_least=0)
    """The norm of the shift of a round's start."""
    warmup: int = param(0, at_least=0, whole=True)
    """The rounds in which rho_s grows; 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_params(self)

    def at(self, round: int) -> Self:
        return replace(self, rho_s=ramp(self.rho_s, self.warmup, round), warmup=0)

    def initial(self, anchor: Tensor) -> State:
        return {**super().initial(anchor), "d": torch.zeros_like(anchor)}

    def start(self, state: State, weights: Tensor) -> Tensor:
        return ascent_(state["d"].clone(), -self.rho_s).add_(weights)

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        weights, landed = super().step(state, result)
        return weights, {**landed, "d": result.update}

    def remove_client(self, server_state: State, uploads: State, share: float) -> State:
        return {**server_state, **super().remove_client(server_state, uploads, share)}


@dataclass(frozen=True)
class DualMean(ServerRule):
    """FedSpeed's landing: w + d + the mean, over the clients that answered, of their new h_i.

    Sun et al., FedSpeed, ICLR 2023, arXiv 2302.10429. FedDyn's has the mean over all clients.
    """

    formula = ("w <- w + d + mean(h_i)",)
    requires_uniform_weights = True

    def check(self, algorithm: Algorithm) -> None:
        super().check(algorithm)
        if not isinstance(algorithm.correction, SentDual):
            name = type(algorithm.correction).__name__
            raise ValueError(f"DualMean adds the clients' h_i, which {name} does not send: use the correction SentDual")

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        return result.anchor + result.update + result.uploads["h"], state
