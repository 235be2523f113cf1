"""Slot 1, where to look: the gradient of a local step is taken at v + e."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlesam.core.checks import param
from fedlesam.core.slots import Perturbation, RoundResult, State, Step
from fedlesam.core.vectors import ascent_


@dataclass(frozen=True)
class Ascent(Perturbation):
    """Abstract: a perturbation of norm rho."""

    rho: float = param(0.1, at_least=0)


@dataclass(frozen=True)
class LocalAscent(Ascent):
    """SAM on the client's own batch: e = rho * g0 / (norm(g0) + 1e-7).

    Foret et al., Sharpness-Aware Minimization, ICLR 2021; in federated learning as FedSAM, Qu et al., ICML 2022.
    """

    gradient = "current"

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return ascent_(gradient, self.rho)


@dataclass(frozen=True)
class CorrectedAscent(Ascent):
    """FedSMOO's ascent, pulled towards the clients' common perturbation s by a dual variable mu_i.

    Sun et al., Dynamic Regularized Sharpness Aware Minimization in Federated Learning, ICML 2023. The server's s
    follows their released code, which leaves out the s-hat term of the printed formula (docs/errata.md, 9).
    """

    gradient = "current"
    requires_uniform_weights = True

    def initial(self, anchor: Tensor) -> State:
        return {"s": torch.zeros_like(anchor)}

    def begin(self, anchor: Tensor, client_state: State) -> State:
        return {"mu": client_state["mu"].clone() if "mu" in client_state else torch.zeros_like(anchor)}

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        mu, s = step.client_state["mu"], step.server_state["s"]
        e = ascent_(gradient.sub_(mu).sub_(s), self.rho)
        mu.add_(e).sub_(s)
        return e

    def next_client_state(self, anchor: Tensor, client_state: State) -> State:
        return {"mu": client_state["mu"]}

    def upload(self, client_state: State) -> State:
        return {"mu": client_state["mu"]}

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        return {"s": ascent_(result.uploads["mu"].clone(), self.rho)}


@dataclass(frozen=True)
class GlobalAscent(Ascent):
    """FedLESAM: e = rho * (old - w) / norm(old - w), the last global progress taken back, estimates the global ascent.

    Fan et al., Locally Estimated Global Perturbations are Better than Local Perturbations for Federated
    Sharpness-aware Minimization, ICML 2024, Algorithm 1. `old` is the global model this client received in its
    previous *active* round; the norm is over all trainable parameters together.
    """

    first: Literal["none", "origin"] = "none"
    """A client that was never active: no perturbation, or the paper's literal old = 0."""
    reference: Literal["received", "previous-round"] = "received"
    """`old`: what this client received last, or the previous round's global model (one more download)."""
    direction: Literal["back", "ahead"] = "back"
    """Against the last progress, as the paper has it, or along it."""

    def round_perturbation(self, anchor: Tensor, client_state: State, server_state: State) -> Tensor | None:
        old = (client_state if self.reference == "received" else server_state).get("old")
        if old is None and self.first == "none":
            return None
        back = -anchor if old is None else old - anchor
        norm = back.norm()
        signed = self.rho if self.direction == "back" else -self.rho
        return back.mul_(torch.where(norm > 0, signed / norm, 0.0))

    def next_client_state(self, anchor: Tensor, client_state: State) -> State:
        return {"old": anchor} if self.reference == "received" else {}

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        return {"old": result.anchor} if self.reference == "previous-round" else {}


@dataclass(frozen=True)
class PreviousStepAscent(Ascent):
    """SAM along the loss gradient of the previous local step, which is there already: one backward pass."""

    gradient = "previous"

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return ascent_(gradient, self.rho)
