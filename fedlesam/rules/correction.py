"""Slot 2, how to turn: the step direction is gain * g + pull * v + bias, fixed for the round."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlesam.core.checks import param
from fedlesam.core.slots import AffineStep, Correction, LocalResult, RoundResult, State
from fedlesam.core.vectors import add_scaled_, is_number


@dataclass(frozen=True)
class ControlVariates(Correction):
    """SCAFFOLD: turn by c - c_i, the server's minus the client's running estimate of its gradient.

    Karimireddy et al., SCAFFOLD, ICML 2020, option II. The FedLESAM paper prints the sign flipped and the server's
    sum without K/N (docs/errata.md, 2 and 3).
    """

    requires_uniform_weights = True
    scale: float = param(1.0, at_least=0)
    """Of the correction; the released FedLESAM-S has 0.1, the papers 1."""

    def initial(self, anchor: Tensor) -> State:
        return {"c": torch.zeros_like(anchor)}

    def prepare(self, anchor: Tensor, client_state: State, server_state: State) -> AffineStep:
        bias = server_state["c"] - client_state["c"] if "c" in client_state else server_state["c"]
        return AffineStep(bias=bias if is_number(self.scale, 1) else self.scale * bias)

    def next_client_state(self, client_state: State, server_state: State, result: LocalResult) -> State:
        fresh = add_scaled_(-server_state["c"], result.update, -1 / (result.steps * result.lr))
        return {"c": fresh.add_(client_state["c"]) if "c" in client_state else fresh}

    def upload(self, before: State, after: State) -> State:
        return {"change": after["c"] - before["c"] if "c" in before else after["c"]}

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        return {"c": torch.add(server_state["c"], result.uploads["change"], alpha=result.share)}

    def remove_client(self, server_state: State, uploads: State, share: float) -> State:
        return {"c": torch.sub(server_state["c"], uploads["change"], alpha=share)}


@dataclass(frozen=True)
class ClientMomentum(Correction):
    """FedCM: mix the local gradient with the last round's mean one, alpha * g + (1 - alpha) * m.

    Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021.
    """

    alpha: float = param(0.1, above=0, at_most=1)
    """The share of the local gradient."""

    def initial(self, anchor: Tensor) -> State:
        return {"m": torch.zeros_like(anchor)}

    def prepare(self, anchor: Tensor, client_state: State, server_state: State) -> AffineStep:
        return AffineStep(gain=self.alpha, bias=(1 - self.alpha) * server_state["m"])

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        return {"m": result.update / -(result.steps * result.lr)}


@dataclass(frozen=True)
class DynamicRegulariser(Correction):
    """FedDyn: lam * (v - w + h_i), with h_i the sum of this client's updates so far.

    Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021; lam is 1/beta of the FedLESAM paper,
    whose signs of the dual variable contradict each other (docs/errata.md, 4).
    """

    lam: float = param(0.1, at_least=0)
    requires_uniform_weights = True

    def prepare(self, anchor: Tensor, client_state: State, server_state: State) -> AffineStep:
        return AffineStep(
            pull=self.lam, bias=self.lam * (client_state["h"] - anchor) if "h" in client_state else -self.lam * anchor
        )

    def next_client_state(self, client_state: State, server_state: State, result: LocalResult) -> State:
        return {"h": client_state["h"] + result.update if "h" in client_state else result.update}


@dataclass(frozen=True)
class Proximal(Correction):
    """FedProx: prox * (v - w). Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020."""

    prox: float = param(0.1, at_least=0)

    def prepare(self, anchor: Tensor, client_state: State, server_state: State) -> AffineStep:
        return AffineStep(pull=self.prox, bias=-self.prox * anchor)
