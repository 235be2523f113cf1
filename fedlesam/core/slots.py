"""The three slots of a method, and what a rule in one of them is given and gives back.

Where to look (`Perturbation`), how to turn (`Correction`), how to land (`ServerRule`). A rule is a frozen set of
hyper-parameters with pure methods on flat vectors. The rules themselves are in `fedlesam.rules`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor

from fedlesam.core.checks import check_choice, check_params, param
from fedlesam.core.privacy import Privacy
from fedlesam.core.vectors import is_number

State = dict[str, Tensor]
"""Named vectors of a slot, or numbers as 0-d tensors: a client's stays with it, the server's and an upload are sent."""


class TensorSpec(NamedTuple):
    """One trainable tensor of the model: a stretch of the flat vector."""

    name: str
    """As in `named_parameters`."""
    shape: torch.Size
    """Of the parameter."""


class AffineStep(NamedTuple):
    """A correction of the round: the step goes along gain * g + pull * v + bias."""

    gain: float | Tensor = 1.0
    """A number, or a 0-d tensor where it is computed."""
    pull: float = 0.0
    """A factor of v."""
    bias: Tensor | None = None
    """A vector of the model's size; None for zero."""


class Step(NamedTuple):
    """One local step, as an ascent sees it."""

    weights: Tensor
    """v, the client's local model."""
    anchor: Tensor
    """w, the global model the round started from."""
    number: int | Tensor
    """k, from 0; as a tensor it has one entry, of a floating dtype."""
    affine: AffineStep
    """The correction of this round."""
    client_state: State
    """What `Perturbation.begin` returned; an ascent may change it in place."""
    server_state: State
    """What this slot keeps at the server, as it was sent."""
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
    """the mean of its steps' learning rates"""


@dataclass(frozen=True)
class RoundResult:
    """What the active clients that answered did in one round, as means over them."""

    anchor: Tensor
    """w, the global model before the round"""
    update: Tensor
    """d, the mean of the d_i"""
    steps: float
    """the mean of the E_i"""
    lr: float
    """the mean of all their steps' learning rates"""
    share: float
    """K / N, the clients that answered over all clients"""
    uploads: State
    """the mean of what the slot's rule had the clients upload; a server rule sees the correction's"""
    norm: float = 0.0
    """the mean of the norm(d_i); NaN with privacy"""
    landed: Tensor | None = None
    """the next global model; the server rule, which makes it, is given None"""


@dataclass(frozen=True)
class Rule:
    """What rules of all slots have in common. Override what the rule needs.

    Arguments of the methods, which have the same names everywhere:
        algorithm: the method that the rule is part of.
        round: from 0.
        tensors: the model's trainable ones, in the order of the flat vector.
        anchor: w, the global model that the round started from.
        weights: w, the global model of now.
        client_state: what this slot keeps with the client.
        before: the client's state before the round.
        after: the client's state after the round.
        server_state: what this slot keeps at the server and broadcasts.
        state: what a server rule keeps.
        gradient: what the attribute `gradient` says; scratch space, which may be overwritten with the result.
        step: the local step.
        outputs: the logits of v, (samples, classes).
        taught: the logits of the teacher, likewise.
        result: what one client (`LocalResult`) or all of them (`RoundResult`) did in the round.
        uploads: the sum of all that the client uploaded for this slot; for a server rule of its updates, as `update`.
        share: 1 / N.
    """

    formula: ClassVar[tuple[str, ...]] = ()
    """What the rule computes, a line each, in the notation of `fedlesam explain`."""
    requires_order: ClassVar[bool] = False
    """The rule looks at places inside a model's tensors, by more than their first axis: no other layout is used."""
    requires_uniform_weights: ClassVar[bool] = False
    """The rule is correct only for the plain mean over clients: weighting them by examples is refused."""

    def __post_init__(self) -> None:
        check_params(self)

    @property
    def tells(self) -> bool:
        """Whether the server learns more of clients through the rule than their mean update."""
        return type(self).remove_client is not Rule.remove_client

    def check(self, algorithm: "Algorithm") -> None:
        """A ValueError if the rule cannot be used so, or with the other rules of this method."""

    def at(self, round: int) -> Self:
        """This rule in a round, from 0: a copy with that round's numbers where they follow a schedule."""
        return self

    def initial(self, anchor: Tensor) -> State:
        """The server's state of this slot before the first round."""
        return {}

    def remove_client(self, server_state: State, uploads: State, share: float) -> State:
        """The server's state without a client whose memory is lost. Override it where that is a sum over clients."""
        return server_state


@dataclass(frozen=True)
class Perturbation(Rule):
    """Slot 1, where to look: the gradient of a local step is taken at v + e.

    Override `round_perturbation` if e is fixed for the round. Otherwise set `gradient` and override `ascend`.
    A rule reads no number of a vector on the host (`float(norm)`, `if norm > 0`): it uses `torch.where`.
    """

    gradient: ClassVar[Literal["unused", "none", "current", "previous"]] = "unused"
    """What `ascend` is given: it is not called ("unused"), scratch space alone ("none"), the batch gradient at v (a
    second backward pass), or the loss gradient of this client's previous step of the round (zero at the first)."""
    teaches: ClassVar[Literal["", "ascent", "descent"]] = ""
    """Where `distil` enters: it is ascended in place of the loss, or added to the loss that is descended."""
    draws: ClassVar[bool] = False
    """The rule uses random numbers: `step.noise`, or PyTorch's generator in `round_perturbation`, which is seeded."""

    def check(self, algorithm: "Algorithm") -> None:
        """A ValueError if a method is defined that the local loop would never call."""
        name, unused = type(self).__name__, self.gradient == "unused"
        check_choice(name, "gradient", self.gradient, ("unused", "none", "current", "previous"))
        check_choice(name, "teaches", self.teaches, ("", "ascent", "descent"))
        if self.teaches == "ascent" and self.gradient != "current":
            raise ValueError(f'{name} ascends what it distils, which only gradient = "current" computes')
        if not is_number(self.mix, 1) and self.gradient != "current":
            raise ValueError(f'{name} mixes in the gradient at v, which only gradient = "current" computes')
        if not unused and self.is_constant:
            raise ValueError(
                f"{name} has round_perturbation() and gradient = {self.gradient!r}, with which it is never called; "
                'leave gradient at "unused", or compute the constant part in begin() and add it in ascend()'
            )
        if unused and type(self).ascend is not Perturbation.ascend:
            raise ValueError(
                f'{name} has ascend(), but its gradient is "unused", with which ascend() is never called; '
                'set gradient to "current", "previous" or "none", or define round_perturbation() alone'
            )

    @property
    def tells(self) -> bool:
        return super().tells or type(self).upload is not Perturbation.upload

    @property
    def passes(self) -> int:
        """Backward passes per local step."""
        return 2 if self.gradient == "current" else 1

    @property
    def mix(self) -> float:
        """The share of the gradient at v + e in the step's gradient; the rest is that at v."""
        return 1.0

    @property
    def is_constant(self) -> bool:
        """Whether the rule perturbs the whole round by one vector."""
        return type(self).round_perturbation is not Perturbation.round_perturbation

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
        """The perturbation of one step."""
        raise NotImplementedError(f"{type(self).__name__} sets gradient = {self.gradient!r} and must define ascend()")

    def teacher(self, anchor: Tensor, server_state: State) -> Tensor:
        """The weights of the teacher of a rule that `teaches`: a second model, which sees the same batches."""
        return anchor

    def distil(self, outputs: Tensor, taught: Tensor) -> Tensor:
        """One number from the logits of v and of the teacher, the mean over the batch."""
        raise NotImplementedError(f"{type(self).__name__} teaches and must define distil()")

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

    any_optimizer: ClassVar[bool] = False
    """The rule does not take an update for a sum of SGD steps (dividing it by steps * lr): AdamW may make them."""

    @property
    def tells(self) -> bool:
        return super().tells or (type(self).upload, type(self).aggregate) != (Correction.upload, Correction.aggregate)

    def prepare(self, anchor: Tensor, client_state: State, server_state: State) -> AffineStep:
        """gain, pull and bias of the round."""
        return AffineStep()

    def next_client_state(self, client_state: State, server_state: State, result: LocalResult) -> State:
        """What the client keeps until its next active round."""
        return {}

    def upload(self, before: State, after: State) -> State:
        """What the client sends beside its update."""
        return {}

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        """The server's state of the next round."""
        return server_state


@dataclass(frozen=True)
class ServerRule(Rule):
    """Slot 3, how to land: from the mean update d to the next global model. Its state is never sent."""

    def check(self, algorithm: "Algorithm") -> None:
        """A ValueError if both this rule and the perturbation would shift the start of a round."""
        if type(self).start is not ServerRule.start and algorithm.perturbation.is_constant:
            raise ValueError(
                f"{type(self).__name__} starts a round away from w, and {type(algorithm.perturbation).__name__} "
                "shifts the whole round as well: use only one of them"
            )

    def start(self, state: State, weights: Tensor) -> Tensor:
        """What the clients of the next round are sent in place of w. They start there; `step` still adds to w."""
        return weights

    def step(self, state: State, result: RoundResult) -> tuple[Tensor, State]:
        """The next global model, and the rule's next state."""
        raise NotImplementedError(f"{type(self).__name__} must define step()")


@dataclass(frozen=True)
class NoPerturbation(Perturbation):
    """e = 0."""

    formula: ClassVar[tuple[str, ...]] = ("e = 0",)


@dataclass(frozen=True)
class NoCorrection(Correction):
    """The plain gradient."""

    formula = ("direction = g",)
    any_optimizer = True


@dataclass(frozen=True)
class Average(ServerRule):
    """w + lr_g * d. McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017."""

    formula = ("w <- w + lr_g d",)
    lr_g: float = param(1.0, above=0)
    """The server's learning rate, a factor of d."""

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
        lr_floor: what is left of the learning rate at the end of a client's round, in which it falls step by step:
            step k of E has the rate lr * ((1 - k / E) + lr_floor * k / E).
        privacy: clipping of updates and noise on their mean; only with rules that learn of clients through it.

    Arguments of the methods:
        tensors: the model's, in the order of the flat vector.
        round: from 0.
        lr: the learning rate at the start of a client's round.
        number: of a step, from 0.
        steps: of the client's round.
    """

    perturbation: Perturbation = field(default_factory=NoPerturbation)
    correction: Correction = field(default_factory=NoCorrection)
    server: ServerRule = field(default_factory=Average)
    lr_decay: float = param(0.998, above=0)
    lr_floor: float = param(1.0, at_least=0, at_most=1)
    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        check_params(self)
        for slot, kind in (("perturbation", Perturbation), ("correction", Correction), ("server", ServerRule)):
            if not isinstance(rule := getattr(self, slot), kind):
                raise ValueError(f"Algorithm: {slot} must be a {kind.__name__}, got {rule!r}")
        for rule in self.rules:
            rule.check(self)
            if self.privacy is not None and rule.tells:
                why = "it shows the server more than the clipped mean update, and without noise; use rules as in fedsam"
                raise ValueError(f"privacy does not work with {type(rule).__name__}: {why}")

    def __repr__(self) -> str:
        shown = ["perturbation", "correction", "server", "lr_decay"]
        shown += ["lr_floor"] * (not is_number(self.lr_floor, 1)) + ["privacy"] * (self.privacy is not None)
        return f"Algorithm({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def _repr_markdown_(self) -> str:
        """Its equations, where a notebook shows it."""
        from fedlesam.core.formulas import equations

        return f"`{self!r}`\n\n$$\n{equations(self).latex().replace('align*', 'aligned')}\n$$"

    @property
    def rules(self) -> tuple[Perturbation, Correction, ServerRule]:
        """The three rules, in the order of the slots."""
        return self.perturbation, self.correction, self.server

    def for_model(self, tensors: Sequence[TensorSpec]) -> "Algorithm":
        """This method for a model with these trainable tensors."""
        return replace(self, perturbation=self.perturbation.for_model(tensors))

    def at(self, round: int) -> "Algorithm":
        """This method in a round, for rules whose numbers follow a schedule."""
        e, c, s = self.perturbation.at(round), self.correction.at(round), self.server.at(round)
        return self if (e, c, s) == self.rules else replace(self, perturbation=e, correction=c, server=s)

    def lr_of(self, lr: float | Tensor, number: float | Tensor, steps: float | Tensor) -> float | Tensor:
        """The learning rate of one step."""
        passed = number / steps
        return lr if is_number(self.lr_floor, 1) else lr * ((1 - passed) + self.lr_floor * passed)

    def mean_lr(self, lr: float, steps: int) -> float:
        """The mean of the learning rates of a client's steps."""
        return cast(float, self.lr_of(lr, (steps - 1) / 2, steps))

    @property
    def uniform_rules(self) -> list[str]:
        """The rules that forbid weighting clients by their examples."""
        names = [type(rule).__name__ for rule in self.rules if rule.requires_uniform_weights]
        return names + ["Privacy"] * (self.privacy is not None)
