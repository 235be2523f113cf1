"""Slot 1, where to look: the gradient of a local step is taken at v + e."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedlesam.core.checks import check_choice, check_number
from fedlesam.core.vectors import ascent_
from fedlesam.rules.base import RoundResult, Rule, State


@dataclass(frozen=True)
class Perturbation(Rule):
    """A rule for e: override `constant` if e is fixed for the round, else set `gradient` and override `ascend`."""

    gradient: ClassVar[Literal["unused", "here", "previous"]] = "unused"
    """What `ascend` is shown: nothing (it is not called), the batch gradient at v (a second backward pass),
    or the loss gradient of this client's previous step of the round (zero at the first)."""

    def check(self) -> None:
        """A ValueError if a method is defined that the local loop would never call."""
        name, unused = type(self).__name__, self.gradient == "unused"
        check_choice(name, "gradient", self.gradient, ("unused", "here", "previous"))
        if not unused and type(self).constant is not Perturbation.constant:
            raise ValueError(
                f"{name} has constant() and gradient = {self.gradient!r}, with which constant() is never "
                'called; leave gradient at "unused", or compute the constant part in begin() and add it in ascend()'
            )
        if unused and type(self).ascend is not Perturbation.ascend:
            raise ValueError(
                f'{name} has ascend(), but its gradient is "unused", with which ascend() is never called; '
                'set gradient to "here" or "previous", or derive from Ascent and define constant() alone'
            )

    @property
    def passes(self) -> int:
        """Backward passes per local step."""
        return 2 if self.gradient == "here" else 1

    def shaped(self, sizes: Sequence[int]) -> "Perturbation":
        """This rule for a model whose tensors have so many entries; most rules see one flat vector and do not care."""
        return self

    def constant(self, anchor: Tensor, mine: State, ours: State) -> Tensor | None:
        """The perturbation of the whole round, or None for none."""
        return None

    def begin(self, anchor: Tensor, mine: State) -> State:
        """The working state of a round; clone what `ascend` changes: a failed client's memory must stay as it was."""
        return mine

    def ascend(self, gradient: Tensor, weights: Tensor, mine: State, ours: State) -> Tensor:
        """The perturbation of one step. `gradient` is scratch space and may be overwritten with the answer."""
        raise NotImplementedError(f"{type(self).__name__} sets gradient = {self.gradient!r} and must define ascend()")

    def remember(self, anchor: Tensor, mine: State) -> State:
        """What the client keeps until its next active round."""
        return {}

    def upload(self, mine: State) -> State:
        """What the client sends beside its update."""
        return {}

    def aggregate(self, ours: State, result: RoundResult) -> State:
        """The next round's `ours`."""
        return ours


@dataclass(frozen=True)
class NoPerturbation(Perturbation):
    """e = 0."""


@dataclass(frozen=True)
class Ascent(Perturbation):
    """Abstract: a perturbation of norm rho."""

    rho: float = 0.1

    def __post_init__(self) -> None:
        check_number(type(self).__name__, "rho", self.rho, at_least=0)


@dataclass(frozen=True)
class LocalAscent(Ascent):
    """SAM on the client's own batch: e = rho * g0 / (norm(g0) + 1e-7).

    Foret et al., Sharpness-Aware Minimization, ICLR 2021; in federated learning as FedSAM, Qu et al., ICML 2022.
    """

    gradient = "here"

    def ascend(self, gradient: Tensor, weights: Tensor, mine: State, ours: State) -> Tensor:
        return ascent_(gradient, self.rho)


@dataclass(frozen=True)
class CorrectedAscent(Ascent):
    """FedSMOO's ascent, pulled towards the clients' common perturbation s by a dual variable mu_i.

    Sun et al., Dynamic Regularized Sharpness Aware Minimization in Federated Learning, ICML 2023. The server's s
    follows their released code, which leaves out the s-hat term of the printed formula (docs/errata.md, 9).
    """

    gradient = "here"
    plain_mean = True

    def initial(self, anchor: Tensor) -> State:
        return {"s": torch.zeros_like(anchor)}

    def begin(self, anchor: Tensor, mine: State) -> State:
        return {"mu": mine["mu"].clone() if "mu" in mine else torch.zeros_like(anchor)}

    def ascend(self, gradient: Tensor, weights: Tensor, mine: State, ours: State) -> Tensor:
        e = ascent_(gradient.sub_(mine["mu"]).sub_(ours["s"]), self.rho)
        mine["mu"].add_(e).sub_(ours["s"])
        return e

    def remember(self, anchor: Tensor, mine: State) -> State:
        return {"mu": mine["mu"]}

    def upload(self, mine: State) -> State:
        return {"mu": mine["mu"]}

    def aggregate(self, ours: State, result: RoundResult) -> State:
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("GlobalAscent", "first", self.first, ("none", "origin"))
        check_choice("GlobalAscent", "reference", self.reference, ("received", "previous-round"))
        check_choice("GlobalAscent", "direction", self.direction, ("back", "ahead"))

    def constant(self, anchor: Tensor, mine: State, ours: State) -> Tensor | None:
        old = (mine if self.reference == "received" else ours).get("old")
        if old is None and self.first == "none":
            return None
        back = -anchor if old is None else old - anchor
        norm = back.norm() if self.direction == "back" else -back.norm()
        return back.mul_(self.rho / norm) if norm != 0 else None

    def remember(self, anchor: Tensor, mine: State) -> State:
        return {"old": anchor} if self.reference == "received" else {}

    def aggregate(self, ours: State, result: RoundResult) -> State:
        return {"old": result.anchor} if self.reference == "previous-round" else {}


@dataclass(frozen=True)
class PreviousStepAscent(Ascent):
    """SAM along the loss gradient of the previous local step, which is there already: one backward pass."""

    gradient = "previous"

    def ascend(self, gradient: Tensor, weights: Tensor, mine: State, ours: State) -> Tensor:
        return ascent_(gradient, self.rho)
