"""The three slots of a method, and what a rule in one of them is given and gives back.

Where to look (`Perturbation`), how to turn (`Correction`), how to land (`ServerRule`). A rule is a frozen set of
hyper-parameters with pure methods on flat vectors. The rules themselves are in `fedlesam.rules`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedlesam.core.checks import check_choice, check_params, param

State = dict[str, Tensor]
"""Named vectors of one slot: a client's state stays with it, the server's is broadcast, an upload is sent back."""


class TensorSpec(NamedTuple):
    """One trainable tensor of the model: a stretch of the flat vector."""

    name: str
    shape: torch.Size


class AffineStep(NamedTuple):
    """A correction of the round: the step goes along gain * g + pull * v + bias."""

    gain: float = 1.0
    pull: float = 0.0
    bias: Tensor | None = None


class Step(NamedTuple):
    """One local step, as an ascent sees it."""

    weights: Tensor
    """v, the client's local model."""
    anchor: Tensor
    """w, the global model the round started from."""
    number: int | Tensor
    """k, from 0."""
    affine: AffineStep
    """The correction of this round."""
    client_state: State
    """What `Perturbation.begin` returned; an ascent may change it in place."""
    server_state: State
    noise: Tensor | None = None
    """Standard normal numbers, fresh in every step, for a rule that sets `draws`."""


@dataclass(frozen=True)
class LocalResult:
    """What one client did in one round."""

    update: Tensor
    """d_i = v_i(end) - w"""
    steps: int
    """E_i, the local steps it really took"""
    lr: float


@dataclass(frozen=True)
class RoundResult:
    """What the active clients that answered did in one round, as means over them."""

    anchor: Tensor
    """w, the global model the round started from"""
    update: Tensor
    """d, the mean of the d_i"""
    steps: float
    """the mean of the E_i"""
    lr: float
    share: float
    """K / N, the clients that answered over all clients"""
    uploads: State
    """the mean of what the slot's rule had the clients upload"""


@dataclass(frozen=True)
class Rule:
    """What rules of all slots have in common. Override what the rule needs."""

    requires_uniform_weights: ClassVar[bool] = False
    """The rule is correct only for the plain mean over clients: weighting them by examples is refused."""

    def __post_init__(self) -> None:
        check_params(self)

    def initial(self, anchor: Tensor) -> State:
        """The server's state of this slot before the first round."""
        return {}

    def remove_client(self, server_state: State, uploads: State, share: float) -> State:
        """The server's state without a client whose memory is lost. Override it where the state is a sum over clients.

        Args:
            server_state: the state of this slot.
            uploads: the sum of all that the client ever uploaded for this slot; for a server rule the sum of its
                updates, as `update`.
            share: 1 / N.
        """
        return server_state


@dataclass(frozen=True)
class Perturbation(Rule):
    """Slot 1, where to look: the gradient of a local step is taken at v + e.

    Override `round_perturbation` if e is fixed for the round. Otherwise set `gradient` and override `ascend`.
    A rule reads no number of a vector on the host (`float(norm)`, `if norm > 0`): it uses `torch.where`.
    """

    gradient: ClassVar[Literal["unused", "current", "previous"]] = "unused"
    """What `ascend` is given: nothing (it is not called), the batch gradient at v (a second backward pass),
    or the loss gradient of this client's previous step of the round (zero at the first)."""
    draws: ClassVar[bool] = False
    """The rule uses random numbers: `step.noise`, or PyTorch's generator in `round_perturbation`, which is seeded."""

    def check(self) -> None:
        """A ValueError if a method is defined that the local loop would never call."""
        name, unused = type(self).__name__, self.gradient == "unused"
        check_choice(name, "gradient", self.gradient, ("unused", "current", "previous"))
        if not unused and type(self).round_perturbation is not Perturbation.round_perturbation:
            raise ValueError(
                f"{name} has round_perturbation() and gradient = {self.gradient!r}, with which it is never called; "
                'leave gradient at "unused", or compute the constant part in begin() and add it in ascend()'
            )
        if unused and type(self).ascend is not Perturbation.ascend:
            raise ValueError(
                f'{name} has ascend(), but its gradient is "unused", with which ascend() is never called; '
                'set gradient to "current" or "previous", or define round_perturbation() alone'
            )

    @property
    def passes(self) -> int:
        """Backward passes per local step."""
        return 2 if self.gradient == "current" else 1

    def for_model(self, tensors: Sequence[TensorSpec]) -> "Perturbation":
        """This rule for a model with these tensors. Most rules see one flat vector and do not care."""
        return self

    def round_perturbation(self, anchor: Tensor, client_state: State, server_state: State) -> Tensor | None:
        """The perturbation of the whole round, or None for none."""
        return None

    def begin(self, anchor: Tensor, client_state: State) -> State:
        """The working state of a round. Clone what `ascend` changes: a failed client's memory must stay as it was."""
        return client_state

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        """The perturbation of one step. `gradient` is scratch space and may be overwritten with the result."""
        raise NotImplementedError(f"{type(self).__name__} sets gradient = {self.gradient!r} and must define ascend()")

    def next_client_state(self, anchor: Tensor, client_state: State) -> State:
        """What the client keeps until its next active round."""
        return {}

    def upload(self, client_state: State) -> State:
        """What the client sends beside its update."""
        return {}

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        """The server's state of the next round."""
        return server_state


@dataclass(frozen=True)
class Correction(Rule):
    """Slot 2, how to turn: the step goes along gain * g + pull * v + bias, fixed for the round.

    Every correction of this family is affine in (g, v), so the vector `bias` is computed once a round, not once a step.
    Override `prepare`, and the rest as far as the rule has memory.
    """

    def prepare(self, anchor: Tensor, client_state: State, server_state: State) -> AffineStep:
        """gain, pull and bias of the round."""
        return AffineStep()

    def next_client_state(self, client_state: State, server_state: State, result: LocalResult) -> State:
        """What the client keeps until its next active round."""
        return {}

    def upload(self, before: State, after: State) -> State:
        """What the client sends, from its memory before and after the round."""
        return {}

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        """The server's state of the next round."""
        return server_state


@dataclass(frozen=True)
class ServerRule(Rule):
    """Slot 3, how to land: from the mean update d to the next global model. Its state is never sent."""

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        """The next global model, and the rule's next state."""
        raise NotImplementedError(f"{type(self).__name__} must define step()")


@dataclass(frozen=True)
class NoPerturbation(Perturbation):
    """e = 0."""


@dataclass(frozen=True)
class NoCorrection(Correction):
    """The plain gradient."""


@dataclass(frozen=True)
class Average(ServerRule):
    """w + lr_g * d. McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017."""

    lr_g: float = param(1.0, above=0)

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        return torch.add(result.anchor, result.update, alpha=self.lr_g), state


@dataclass(frozen=True)
class Algorithm:
    """A federated method. Any perturbation works with any correction and any server rule.

    Args:
        perturbation: where to look.
        correction: how to turn.
        server: how to land.
        lr_decay: the factor of the local learning rate per round, unless `LocalTraining` sets its own.
    """

    perturbation: Perturbation = field(default_factory=NoPerturbation)
    correction: Correction = field(default_factory=NoCorrection)
    server: ServerRule = field(default_factory=Average)
    lr_decay: float = param(0.998, above=0)

    def __post_init__(self) -> None:
        check_params(self)
        for slot, kind in (("perturbation", Perturbation), ("correction", Correction), ("server", ServerRule)):
            rule = getattr(self, slot)
            if not isinstance(rule, kind):
                raise ValueError(f"Algorithm: {slot} must be a {kind.__name__}, got {rule!r}")
        self.perturbation.check()

    def for_model(self, tensors: Sequence[TensorSpec]) -> "Algorithm":
        """This method for a model with these trainable tensors."""
        return replace(self, perturbation=self.perturbation.for_model(tensors))

    @property
    def uniform_rules(self) -> list[str]:
        """The rules that forbid weighting clients by their examples."""
        rules = (self.perturbation, self.correction, self.server)
        return [type(rule).__name__ for rule in rules if rule.requires_uniform_weights]
