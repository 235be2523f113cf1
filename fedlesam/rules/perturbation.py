"""Slot 1, where to look: the gradient of a local step is taken at v + e."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlesam.core.checks import param
from fedlesam.core.slots import Algorithm, NoPerturbation, Perturbation, RoundResult, State, Step, TensorSpec
from fedlesam.core.vectors import ASCENT_EPS, ascent_
from fedlesam.rules.correction import ClientMomentum, WeightedMomentum
from fedlesam.rules.schedule import ramp


@dataclass(frozen=True)
class Ascent(Perturbation):
    """Abstract: a perturbation of norm rho."""

    rho: float = param(0.1, at_least=0)
    """The norm of e."""


@dataclass(frozen=True)
class LocalAscent(Ascent):
    """SAM on the client's own batch: e = rho * g0 / (norm(g0) + 1e-7).

    Foret et al., Sharpness-Aware Minimization, ICLR 2021; in federated learning as FedSAM, Qu et al., ICML 2022.
    """

    formula: ClassVar[tuple[str, ...]] = ("e = rho u(g0)",)
    gradient = "current"

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return ascent_(gradient, self.rho)


@dataclass(frozen=True)
class CorrectedAscent(Ascent):
    """FedSMOO's ascent, pulled towards the clients' common perturbation s by a dual variable mu_i.

    Sun et al., Dynamic Regularized Sharpness Aware Minimization in Federated Learning, ICML 2023. The server's s
    follows their released code, which leaves out the s-hat term of the printed formula (errata 9).
    """

    formula = ("e = rho u(g0 - mu_i - s)", "mu_i <- mu_i + e - s", "server: s <- rho u(mean(mu_i))")
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

    @property
    def formula(self) -> tuple[str, ...]:  # type: ignore[override]
        """As `Rule.formula`."""
        sign = "" if self.direction == "back" else "-"
        return (
            f"e = {sign}rho (w_old - w) / norm(w_old - w)",
            f"{'client' if self.reference == 'received' else 'server'}: w_old <- w",
        )

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
    """SAM along the loss gradient of the previous local step, which is there already: one backward pass.

    Ji et al., A Single-Step, Sharpness-Aware Minimization is All You Need to Achieve Efficient and Accurate Sparse
    Training (S2-SAM), NeurIPS 2024, inside a federated round. A relative is Momentum-SAM (`MomentumAscent`).
    """

    formula = ("e = rho u(g_prev)",)
    gradient = "previous"

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return ascent_(gradient, self.rho)


@dataclass(frozen=True)
class MomentumAscent(Ascent):
    """SAM along the momentum of the round's earlier loss gradients: m = beta * m + g, 0 at the first step.

    Becker et al., Momentum-SAM: Sharpness Aware Minimization without Computational Overhead, arXiv 2401.12033, inside a
    federated round.
    """

    formula = ("m_i <- beta m_i + g_prev", "e = rho u(m_i)")
    gradient = "previous"
    beta: float = param(0.9, at_least=0, below=1)
    """The share of the old value in m."""

    def begin(self, anchor: Tensor, client_state: State) -> State:
        return {"m": torch.zeros_like(anchor)}

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        m = step.client_state["m"]
        m.mul_(self.beta).add_(gradient)
        return ascent_(gradient.copy_(m), self.rho)


@dataclass(frozen=True)
class MixedAscent(LocalAscent):
    """SAM with a share of both gradients: the step goes along (1 - alpha) * g0 + alpha * g(v + e).

    Sun et al., FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization Accuracy, ICLR
    2023, arXiv 2302.10429.
    """

    formula = ("e = rho u(g0)", "g <- (1 - alpha) g0 + alpha g")
    alpha: float = param(1.0, at_least=0, at_most=1)
    """The share of the gradient at v + e in a step."""

    @property
    def mix(self) -> float:
        return self.alpha


@dataclass(frozen=True)
class RampedAscent(LocalAscent):
    """SAM whose rho grows over the first `warmup` rounds: .001 + (rho - .001) * min(1, t / warmup). FedGloss's clients.

    Caldarola et al., Beyond Local Sharpness: Communication-Efficient Global Sharpness-aware Minimization for Federated
    Learning, CVPR 2025, arXiv 2412.03752.
    """

    formula = ("rho_t = rho, with warmup .001 + (rho - .001) min(1, t / warmup)", "e = rho_t u(g0)")
    warmup: int = param(0, at_least=0, whole=True)
    """The rounds in which rho grows; 0 for none."""

    def at(self, round: int) -> Self:
        return replace(self, rho=ramp(self.rho, self.warmup, round), warmup=0)


@dataclass(frozen=True)
class AdaptiveAscent(Ascent):
    """ASAM: e = rho * T^2 g0 / (norm(T g0) + 1e-7), T = abs(v) + eta on tensors called a weight, 1 on the others.

    Caldarola et al., Improving Generalization in Federated Learning by Seeking Flat Minima (FedASAM), ECCV 2022, arXiv
    2203.11834; after Kwon et al., ASAM, ICML 2021.
    """

    formula = ("T = abs(v) + eta for weights, 1 for the others", "e = rho T^2 g0 / (norm(T g0) + 1e-7)")
    gradient = "current"
    rho: float = param(0.7, at_least=0)
    eta: float = param(0.2, at_least=0)
    """Added to abs(v) in the scale of a weight."""
    tensors: tuple[tuple[bool, int], ...] = field(default=(), repr=False, compare=False)
    """Whether each tensor of the model is a weight, and its entries; set by `for_model`."""

    def for_model(self, tensors: Sequence[TensorSpec]) -> "AdaptiveAscent":
        return replace(self, tensors=tuple(("weight" in name, shape.numel()) for name, shape in tensors))

    def begin(self, anchor: Tensor, client_state: State) -> State:
        pieces = [torch.full((size,), not weight, device=anchor.device) for weight, size in self.tensors]
        return {"others": torch.cat(pieces), "size": torch.empty_like(anchor)}

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        size, others = step.client_state["size"], step.client_state["others"]
        size.copy_(step.weights).abs_().add_(self.eta).masked_fill_(others, 1.0)
        norm = gradient.mul_(size).norm()
        return gradient.mul_(size).mul_(self.rho / (norm + ASCENT_EPS))


@dataclass(frozen=True)
class InterpolatedAscent(Ascent):
    """FedGF: e = c * (w~ - v) + (1 - c) * rho * u(g0), w~ = w - rho_g * u(d), between a global and a local ascent.

    Lee and Yoon, Rethinking the Flat Minima Searching in Federated Learning, ICML 2024. d is the last mean update. c is
    the share, in the last `window` rounds, of those whose clients moved by more than `threshold` in the mean; the paper
    and its code give no value for it.
    """

    formula = (
        "e = c (w - rho_g u(d) - v) + (1 - c) rho u(g0)",
        "server: c <- share of the last rounds in which mean(norm(d_i)) > threshold",
    )
    gradient = "current"
    rho: float = param(0.05, at_least=0)
    rho_g: float = param(0.05, at_least=0)
    """The norm of the global ascent."""
    window: int = param(30, at_least=1, whole=True)
    """The rounds that count for c."""
    threshold: float = param(None, at_least=0)
    """The mean norm of updates above which a round counts for c; it must be given."""

    def __post_init__(self) -> None:
        if self.threshold is None:
            raise ValueError("InterpolatedAscent: threshold has no default: give the norm of an update, e.g. 1.0")
        super().__post_init__()

    @property
    def tells(self) -> bool:
        return True  # the mean norm of the updates

    def initial(self, anchor: Tensor) -> State:
        seen = anchor.new_full((self.window,), -1.0)  # the newest last; -1: there was no such round yet
        return {"shift": torch.zeros_like(anchor), "c": anchor.new_zeros(()), "seen": seen}

    def begin(self, anchor: Tensor, client_state: State) -> State:
        return {"back": torch.empty_like(anchor)}

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        c, back = step.server_state["c"], step.client_state["back"]
        back.copy_(step.anchor).add_(step.server_state["shift"]).sub_(step.weights).mul_(c)
        return ascent_(gradient, self.rho).mul_(1 - c).add_(back)

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        moved = result.anchor.new_tensor([float(result.norm > self.threshold)])
        seen = torch.cat([server_state["seen"][1:], moved])
        c = seen.clamp(min=0).sum() / (seen >= 0).sum()
        return {"shift": ascent_(result.update.clone(), -self.rho_g), "c": c, "seen": seen}


@dataclass(frozen=True)
class TrajectoryAscent(Ascent):
    """FedWMSAM: e = rho * u(w + k * M - v) at step k, M = bias / (1 - gain) the direction that the correction adds.

    Li et al., FedWMSAM, NeurIPS 2025, arXiv 2511.22080. M is a gradient, so this looks uphill of w: the formula of the
    paper, read literally. Its README says the opposite, and its code has the sign reversed and indexes by layer number.
    """

    formula = ("M = (the correction without g) / (1 - alpha)", "e = rho u(w + k M - v)")
    gradient = "none"
    rho: float = param(0.01, at_least=0)

    def check(self, algorithm: Algorithm) -> None:
        super().check(algorithm)
        rule = algorithm.correction
        if not isinstance(rule, ClientMomentum | WeightedMomentum) or rule.alpha == 1:
            raise ValueError(
                "TrajectoryAscent follows the momentum of the correction: it works with ClientMomentum or "
                f"WeightedMomentum with alpha below 1, not with {rule!r}"
            )

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        gain, _, bias = step.affine
        assert bias is not None
        ahead = gradient.copy_(bias).mul_(step.number * (1 / (1 - gain))).add_(step.anchor)
        return ascent_(ahead.sub_(step.weights), self.rho)


def divergence(taught: Tensor, outputs: Tensor, tau: float) -> Tensor:
    """KL(softmax(taught / tau), softmax(outputs / tau)), the sum over classes and the mean over the batch.

    Args:
        taught: The teacher's logits, (samples, classes).
        outputs: The logits of the model that learns.
        tau: The temperature of both.
    """
    p, q = F.log_softmax(taught / tau, 1), F.log_softmax(outputs / tau, 1)
    return (p.exp() * (p - q)).sum(1).mean()


@dataclass(frozen=True)
class TaughtDescent(NoPerturbation):
    """FedGMT: the loss + strength * tau^2 * KL(softmax(z_a / tau), softmax(z_v / tau)), a the average of past models.

    Li et al., One Arrow, Two Hawks: Sharpness-aware Minimization for Federated Learning via Global Model Trajectory,
    ICML 2025. After every round a = beta * a + (1 - beta) * w, from the first model on; it is sent with w.
    """

    formula = (
        "e = 0",
        "z_t, z_v = the outputs of a and of v for the batch",
        "g <- gradient of the loss + strength tau^2 KL(softmax(z_t / tau), softmax(z_v / tau))",
        "server: a <- beta a + (1 - beta) (the next w)",
    )
    teaches = "descent"
    beta: float = param(0.95, at_least=0, at_most=1)
    """The share of the old value in the average a."""
    strength: float = param(1.0, at_least=0)
    """The weight of the distance to the teacher's predictions."""
    tau: float = param(3.0, above=0)
    """The temperature of both predictions."""

    def initial(self, anchor: Tensor) -> State:
        return {"a": anchor}

    def teacher(self, anchor: Tensor, server_state: State) -> Tensor:
        return server_state["a"]

    def distil(self, outputs: Tensor, taught: Tensor) -> Tensor:
        return self.strength * self.tau**2 * divergence(taught, outputs, self.tau)

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        assert result.landed is not None
        return {"a": self.beta * server_state["a"] + (1 - self.beta) * result.landed}


@dataclass(frozen=True)
class ProximalAscent(Ascent):
    """FedSOL: ascend how far the predictions have gone from the global model's, e = rho * L * u(q), 0 at step 0.

    Lee et al., FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated Learning, CVPR 2024. q is
    the gradient of KL(softmax(z_w / 3), softmax(z_v / 3)). L is abs(v - w) over its norm along the first axis of each
    tensor, at least 1e-12, or 1 if it is not `adaptive`.
    """

    formula = (
        "q = gradient of KL(softmax(z_w / 3), softmax(z_v / 3)), z_w and z_v the outputs of w and of v",
        "L = abs(v - w) / max(norm(v - w), 1e-12), the norm along the first axis of each tensor; 1 without adaptive",
        "e = rho L u(q), 0 at the first step",
    )
    gradient = "current"
    teaches = "ascent"
    rho: float = param(1.0, at_least=0)
    adaptive: bool = True
    """Whether e is scaled by how far each weight has moved."""
    shapes: tuple[torch.Size, ...] = field(default=(), repr=False, compare=False)
    """Of the model's tensors; set by `for_model`."""

    def for_model(self, tensors: Sequence[TensorSpec]) -> "ProximalAscent":
        return replace(self, shapes=tuple(spec.shape for spec in tensors))

    def distil(self, outputs: Tensor, taught: Tensor) -> Tensor:
        return divergence(taught, outputs, 3.0)

    def begin(self, anchor: Tensor, client_state: State) -> State:
        return {"size": torch.empty_like(anchor)} if self.adaptive else {}

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        e = ascent_(gradient, self.rho).mul_(step.number > 0)
        if not self.adaptive:
            return e
        size = step.client_state["size"].copy_(step.weights).sub_(step.anchor).abs_()
        for piece, shape in zip(torch.split(size, [s.numel() for s in self.shapes]), self.shapes, strict=True):
            rows = piece.view(shape) if shape else piece
            rows.div_(torch.linalg.vector_norm(rows, dim=0).clamp(min=1e-12))
        return e.mul_(size)
