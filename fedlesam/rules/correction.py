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
    sum without K/N (errata 2 and 3).
    """

    formula = (
        "direction = g + scale (c - c_i)",
        "client: c_i <- c_i - c - d_i / (E_i lr)",
        "server: c <- c + (K / N) mean(change of c_i)",
    )
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

    formula = ("direction = alpha g + (1 - alpha) m", "server: m <- -d / (E lr)")
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
    whose signs of the dual variable contradict each other (errata 4).
    """

    formula = ("direction = g + lam (v - w + h_i)", "client: h_i <- h_i + d_i")
    lam: float = param(0.1, at_least=0)
    """The strength of the dynamic regulariser."""
    requires_uniform_weights = True
    any_optimizer = True

    def prepare(self, anchor: Tensor, client_state: State, server_state: State) -> AffineStep:
        return AffineStep(
            pull=self.lam, bias=self.lam * (client_state["h"] - anchor) if "h" in client_state else -self.lam * anchor
        )

    def next_client_state(self, client_state: State, server_state: State, result: LocalResult) -> State:
        return {"h": client_state["h"] + result.update if "h" in client_state else result.update}


@dataclass(frozen=True)
class SentDual(DynamicRegulariser):
    """FedSpeed's: FedDyn's, and the client sends its new h_i, of which the server rule `DualMean` needs the mean.

    Sun et al., FedSpeed, ICLR 2023, arXiv 2302.10429.
    """

    def upload(self, before: State, after: State) -> State:
        return {"h": after["h"]}


@dataclass(frozen=True)
class DualBias(DynamicRegulariser):
    """FedGMT's: lam * h_i alone, FedDyn without its pull to the global model.

    Li et al., One Arrow, Two Hawks: Sharpness-aware Minimization for Federated Learning via Global Model Trajectory,
    ICML 2025.
    """

    formula = ("direction = g + lam h_i", "client: h_i <- h_i + d_i")

    def prepare(self, anchor: Tensor, client_state: State, server_state: State) -> AffineStep:
        return AffineStep(bias=self.lam * client_state["h"] if "h" in client_state else None)


@dataclass(frozen=True)
class Proximal(Correction):
    """FedProx: prox * (v - w). Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020."""

    formula = ("direction = g + prox (v - w)",)
    any_optimizer = True
    prox: float = param(0.1, at_least=0)
    """The strength of the pull towards w."""

    def prepare(self, anchor: Tensor, client_state: State, server_state: State) -> AffineStep:
        return AffineStep(pull=self.prox, bias=-self.prox * anchor)


@dataclass(frozen=True)
class MomentumVariates(Correction):
    """FedMoSWA: turn by m - c_i, m a moving average over the rounds of the clients' c_i.

    Liu et al., Improving Generalization in Federated Learning with Highly Heterogeneous Data via Momentum-Based
    Stochastic Controlled Weight Averaging, ICML 2025, arXiv 2507.20016.
    """

    formula = (
        "direction = g + m - c_i",
        "client: c_i <- c_i - m - d_i / (E_i lr)",
        "server: m <- m + gamma (mean(c_i) - m)",
    )
    requires_uniform_weights = True
    gamma: float = param(0.2, at_least=0, at_most=1)
    """The share of the new value in m."""

    def initial(self, anchor: Tensor) -> State:
        return {"m": torch.zeros_like(anchor)}

    def prepare(self, anchor: Tensor, client_state: State, server_state: State) -> AffineStep:
        return AffineStep(bias=server_state["m"] - client_state["c"] if "c" in client_state else server_state["m"])

    def next_client_state(self, client_state: State, server_state: State, result: LocalResult) -> State:
        fresh = add_scaled_(-server_state["m"], result.update, -1 / (result.steps * result.lr))
        return {"c": fresh.add_(client_state["c"]) if "c" in client_state else fresh}

    def upload(self, before: State, after: State) -> State:
        return {"c": after["c"]}

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        m = server_state["m"]
        return {"m": torch.add(m, result.uploads["c"] - m, alpha=self.gamma)}


@dataclass(frozen=True)
class WeightedMomentum(Correction):
    """FedWMSAM's: alpha * (g + c - c_i) + (1 - alpha) * m, FedCM's momentum and SCAFFOLD's variates; alpha adapts.

    Li et al., FedWMSAM, NeurIPS 2025, arXiv 2511.22080. After every round alpha = .99 * alpha + .01 * q, with q the
    clients' mean of 1 + cos(d_i, m), 0 while m is 0, held between .1 and .9.
    """

    formula = (
        "direction = alpha (g + c - c_i) + (1 - alpha) m",
        "client: c_i <- c_i - c - d_i / (E_i lr)",
        "server: c <- c + (K / N) mean(change of c_i)",
        "server: m <- -d / (E lr)",
        "server: alpha <- .99 alpha + .01 clip(mean(1 + cos(d_i, m)), .1, .9)",
    )
    requires_uniform_weights = True
    alpha: float = param(0.1, above=0, below=1)
    """In the first round."""

    def initial(self, anchor: Tensor) -> State:
        return {"m": torch.zeros_like(anchor), "alpha": anchor.new_tensor(self.alpha), **VARIATES.initial(anchor)}

    def prepare(self, anchor: Tensor, client_state: State, server_state: State) -> AffineStep:
        alpha, turn = server_state["alpha"], VARIATES.prepare(anchor, client_state, server_state).bias
        assert turn is not None
        return AffineStep(gain=alpha, bias=(1 - alpha) * server_state["m"] + alpha * turn)

    def next_client_state(self, client_state: State, server_state: State, result: LocalResult) -> State:
        d, m = result.update, server_state["m"]
        norms = d.norm() * m.norm()
        likeness = 1 + torch.where(norms > 0, torch.dot(d, m) / norms, 0.0)
        after = VARIATES.next_client_state(client_state, server_state, result)
        return {**after, "q": torch.where(m.norm() > 0, likeness, 0.0)}

    def upload(self, before: State, after: State) -> State:
        return {**VARIATES.upload(before, after), "q": after["q"]}

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        alpha = 0.99 * server_state["alpha"] + 0.01 * result.uploads["q"].clamp(0.1, 0.9)
        m = ClientMomentum().aggregate({}, result)
        return {**m, "alpha": alpha, **VARIATES.aggregate(server_state, result)}

    def remove_client(self, server_state: State, uploads: State, share: float) -> State:
        return {**server_state, **VARIATES.remove_client(server_state, uploads, share)}


VARIATES = ControlVariates()
