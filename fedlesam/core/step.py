"""One step of one client: the mathematics of every method and every engine.

`begin` fixes what stays for the round, `look` takes the gradient of a step, `move` makes the step, `finish` makes the
result. They work in place on flat vectors and read none of them on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from fedlesam.core.lesson import Lesson
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import Broadcast, Memory, check_upload
from fedlesam.core.slots import AffineStep, Algorithm, LocalResult, State, Step
from fedlesam.core.vectors import adamw_, add_fused_, add_scaled_, clip_coefficient, is_number


class Gradient(Protocol):
    """Where the gradients of one step come from."""

    def __call__(self, at: Tensor, out: Tensor, *, final: bool, lesson: Lesson | None = None) -> Tensor:
        """Write the gradient of the batch loss at the weights `at` into `out`, and return the loss.

        Args:
            at: the weights.
            out: the gradient's vector.
            final: False for the first of two passes, which must leave the model's buffers as they were.
            lesson: what is differentiated in place of the loss, or beside it.
        """
        ...


@dataclass
class ClientRound:
    """One client's round: what is fixed for it, and the vectors that its steps change in place."""

    algorithm: Algorithm
    """The method, with the numbers of this round."""
    local: LocalTraining
    """How the client trains."""
    lr: float | Tensor
    """The learning rate at the round's first step."""
    anchor: Tensor
    """w, the global model that was sent."""
    steps: float | Tensor
    """E, the number of its steps."""
    client_state: State
    """The perturbation's working state."""
    server_state: State
    """The perturbation's, as it was sent."""
    affine: AffineStep
    """The correction of the round."""
    centre: Tensor
    """What weight decay and pull act around: e where the loop runs along u = v + e, else a zero of no size."""
    u: Tensor
    """Where the gradient is taken. Between two steps it is v, or v + e if e is fixed for the round."""
    v: Tensor
    """The local model, but u itself if e is fixed for the round."""
    g: Tensor
    """The gradient of the step under way, of the loss at v + e."""
    ascent: Tensor | None
    """The gradient that `ascend` is given and may overwrite with its result; None if it is not called."""
    first: Tensor | None
    """The gradient at v, for a rule that mixes it in."""
    momentum: Tensor | None
    """The heavy ball, or AdamW's first moment; None without."""
    second: Tensor | None
    """AdamW's second moment; its first is `momentum`."""
    e: Tensor | None
    """The perturbation: of the round, or of the last step."""
    mapped: bool = False
    """These are the rows of a map over clients, which has no rule for `lerp_`."""

    @property
    def ascends(self) -> bool:
        """Whether the perturbation changes from step to step."""
        return self.algorithm.perturbation.gradient != "unused"


def settle(algorithm: Algorithm, broadcast: Broadcast, memory: Memory) -> tuple[State, AffineStep, Tensor | None]:
    """What the rules fix for a client's round: the perturbation's state, the correction, and e if it is constant.

    Args:
        algorithm: The method, with the numbers of this round.
        broadcast: What the server sent.
        memory: What the client kept from its last active round.
    """
    rule, anchor = algorithm.perturbation, broadcast.weights
    client_state = rule.begin(anchor, memory.perturbation)
    affine = algorithm.correction.prepare(anchor, memory.correction, broadcast.correction)
    ascends = rule.gradient != "unused"
    e = None if ascends else rule.round_perturbation(anchor, client_state, broadcast.perturbation)
    return client_state, affine, e if e is None else _check_shape(e, anchor)


def begin(
    algorithm: Algorithm,
    local: LocalTraining,
    broadcast: Broadcast,
    memory: Memory,
    steps: int,
    u: Tensor,
    vector: Callable[[str], Tensor],
) -> ClientRound:
    """Start a client's round at the global model.

    A perturbation that is constant in the round is a shifted start: the loop runs along u = v + e from w + e, and the
    update is the same. FedLESAM so costs what FedAvg costs, operation for operation (docs/design.md).

    Args:
        algorithm: the method.
        local: how the client trains.
        broadcast: what the server sent.
        memory: what the client kept from its last active round.
        steps: the number of steps to come.
        u: the vector in which gradients are taken; it is overwritten.
        vector: gives a vector of the model's size by its name, with any content.
    """
    algorithm = algorithm.at(broadcast.round)
    rule, anchor, ascends = algorithm.perturbation, broadcast.weights, algorithm.perturbation.gradient != "unused"
    adamw = local.optimizer == "adamw"
    client_state, affine, e = settle(algorithm, broadcast, memory)
    u.copy_(anchor)
    if e is not None:
        u.add_(e)
    return ClientRound(
        algorithm=algorithm,
        local=local,
        lr=local.lr_at(broadcast.round, algorithm),
        anchor=anchor,
        steps=steps,
        client_state=client_state,
        server_state=broadcast.perturbation,
        affine=affine,
        centre=anchor.new_zeros(()) if e is None else e,
        u=u,
        v=vector("v").copy_(anchor) if ascends else u,
        g=vector("g").zero_(),
        ascent=vector("ascent").zero_() if ascends else None,
        first=vector("first") if not is_number(rule.mix, 1) else None,
        momentum=vector("momentum").zero_() if local.momentum or adamw else None,
        second=vector("second").zero_() if adamw else None,
        e=e,
    )


def look(r: ClientRound, gradient: Gradient, number: int | Tensor, noise: Tensor | None = None) -> Tensor:
    """Take the gradient of one step at v + e into `r.g`; the loss there.

    Args:
        r: The client's round.
        gradient: Computes gradients of the step's batch.
        number: k, the number of the step, from 0.
        noise: Standard normal numbers for a rule that `draws`.
    """
    climb(r, gradient, number, noise)
    return differentiate(r, gradient)


def climb(r: ClientRound, gradient: Gradient, number: int | Tensor, noise: Tensor | None = None) -> None:
    """Go to u = v + e, with the first of two passes if e needs one.

    Args:
        r: The client's round.
        gradient: Computes gradients of the step's batch.
        number: k, the number of the step, from 0.
        noise: Standard normal numbers for a rule that `draws`.
    """
    rule = r.algorithm.perturbation
    if rule.gradient == "current":
        gradient(r.u, r.g, final=False, lesson=_lesson(r) if rule.teaches == "ascent" else None)
        assert r.ascent is not None
        r.ascent.copy_(r.g)
    if r.first is not None:
        r.first.copy_(r.g)
    if r.ascent is not None:
        e = rule.ascend(r.ascent, Step(r.v, r.anchor, number, r.affine, r.client_state, r.server_state, noise))
        r.e = _check_shape(e, r.anchor)
        r.u.copy_(r.v).add_(r.e)


def differentiate(r: ClientRound, gradient: Gradient) -> Tensor:
    """Take the gradient that the step goes along into `r.g`; the loss at u.

    Args:
        r: The client's round, at u.
        gradient: Computes gradients of the step's batch.
    """
    rule = r.algorithm.perturbation
    loss = gradient(r.u, r.g, final=True, lesson=_lesson(r) if rule.teaches == "descent" else None)
    if r.first is not None:
        add_scaled_(r.g.mul_(rule.mix), r.first, 1 - rule.mix)
    return loss


def _lesson(r: ClientRound) -> Lesson:
    rule = r.algorithm.perturbation
    return Lesson(rule, rule.teacher(r.anchor, r.server_state))


def move(r: ClientRound, number: int | Tensor) -> None:
    """v = v - lr * (gain * clip(g) + pull * v + bias + weight_decay * v), or with clip(gain * g + bias).

    AdamW takes gain * clip(g) + pull * v + bias for the gradient, and weight decay beside it.

    Args:
        r: The client's round; its gradient has been taken.
        number: k, the number of the step, from 0.
    """
    (gain, pull, bias), local, g = r.affine, r.local, r.g
    add = add_scaled_ if r.mapped else add_fused_
    lr = r.algorithm.lr_of(r.lr, number, r.steps)
    rate = pull + local.weight_decay
    if r.algorithm.perturbation.gradient == "previous" and r.ascent is not None:
        r.ascent.copy_(g)
    if local.clip_scope == "corrected":
        if not is_number(gain, 1):
            g.mul_(gain)
        if bias is not None:
            g.add_(bias)
        gain, bias = 1.0, None
    if local.clip is not None:
        g.mul_(clip_coefficient(g, local.clip))
    if isinstance(gain, Tensor):
        g.mul_(gain)
        gain = 1.0
    if r.momentum is not None and r.second is not None:
        add(add(g.mul_(gain), r.v, pull), r.centre, -pull)
        if bias is not None:
            g.add_(bias)
        _pull(r, lr * local.weight_decay)
        adamw_(r.v, g, r.momentum, r.second, lr, number, add)
    elif r.momentum is not None:
        add(r.momentum.mul_(local.momentum), g, gain)
        add(add(r.momentum, r.v, rate), r.centre, -rate)
        if bias is not None:
            r.momentum.add_(bias)
        add(r.v, r.momentum, -lr)
    else:
        if not is_number(rate, 0):
            _pull(r, lr * rate)
        add(r.v, g, -lr * gain)
        if bias is not None:
            add(r.v, bias, -lr)
    if r.v is not r.u:
        r.u.copy_(r.v)


def _pull(r: ClientRound, share: float | Tensor) -> None:
    """Move v by a share of the way to the centre."""
    if r.mapped:
        r.v.sub_((r.v - r.centre) * share)
    else:
        r.v.lerp_(r.centre, share)


def finish(
    r: ClientRound, memory: Memory, broadcast: Broadcast, steps: int
) -> tuple[LocalResult, Memory, State, State]:
    """The result of a client's round, what the client keeps, and what its two rules upload.

    Args:
        r: The client's round, after its last step.
        memory: What the client kept from its last active round.
        broadcast: What the server sent.
        steps: The number of steps that were made.
    """
    rule, correction, privacy = r.algorithm.perturbation, r.algorithm.correction, r.algorithm.privacy
    mean = r.algorithm.mean_lr(cast(float, r.lr), steps)  # tensors in a map over clients
    update = r.v - (r.anchor if r.ascends or r.e is None else r.anchor + r.e)
    result = LocalResult(update if privacy is None else privacy.clipped(update), steps, mean)
    after = Memory(
        rule.next_client_state(r.anchor, r.client_state),
        correction.next_client_state(memory.correction, broadcast.correction, result),
    )
    own = check_upload(correction.upload(memory.correction, after.correction), correction)
    return result, after, check_upload(rule.upload(r.client_state), rule), own


def _check_shape(e: Tensor, anchor: Tensor) -> Tensor:
    """The cheapest check that would have caught the released code's scalar perturbations (docs/errata.md, 8)."""
    if e.shape != anchor.shape:
        raise ValueError(
            f"a perturbation must have the model's {tuple(anchor.shape)} entries, got shape {tuple(e.shape)}"
        )
    return e
