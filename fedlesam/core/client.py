"""What one client does in one round: the one local loop of every method and every engine.

`begin` fixes what stays for the round, `look` takes the gradient of a step, `move` makes the step, `finish` makes the
result. They work in place on flat vectors and read none of them on the host. The serial engine calls them for one
client after the other (`local_update`); the stacked engine maps them over many clients at once.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, cast

import torch
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.batches import Batch, Batches, ClientData, batch_indices, size_of, steps_per_epoch
from fedlesam.core.checks import LOWER, NotFinite
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.gradient import BatchGradient
from fedlesam.core.lesson import Lesson
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import Broadcast, ClientResult, Memory
from fedlesam.core.slots import AffineStep, Algorithm, LocalResult, State, Step
from fedlesam.core.sound import augmented, check_finite, shapes
from fedlesam.core.task import Task
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
    local: LocalTraining
    lr: float | Tensor
    anchor: Tensor
    steps: float | Tensor
    """E, the number of its steps."""
    client_state: State
    """The perturbation's working state."""
    server_state: State
    affine: AffineStep
    centre: Tensor
    """What weight decay and pull act around: e where the loop runs along u = v + e, else a zero of no size."""
    u: Tensor
    """Where the gradient is taken. Between two steps it is v, or v + e if e is fixed for the round."""
    v: Tensor
    """The local model, but u itself if e is fixed for the round."""
    g: Tensor
    ascent: Tensor | None
    """The gradient that `ascend` is given and may overwrite with its result; None if it is not called."""
    first: Tensor | None
    """The gradient at v, for a rule that mixes it in."""
    momentum: Tensor | None
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
    """What the rules fix for a client's round: the perturbation's state, the correction, and e if it is constant."""
    rule, anchor = algorithm.perturbation, broadcast.weights
    client_state = rule.begin(anchor, memory.perturbation)
    affine = algorithm.correction.prepare(anchor, memory.correction, broadcast.correction)
    ascends = rule.gradient != "unused"
    e = None if ascends else rule.round_perturbation(anchor, client_state, broadcast.perturbation)
    return client_state, affine, e if e is None else check_shape(e, anchor)


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
    """Take the gradient of one step at v + e into `r.g`; the loss there."""
    climb(r, gradient, number, noise)
    return differentiate(r, gradient)


def climb(r: ClientRound, gradient: Gradient, number: int | Tensor, noise: Tensor | None = None) -> None:
    """Go to u = v + e, with the first of two passes if e needs one."""
    rule = r.algorithm.perturbation
    if rule.gradient == "current":
        gradient(r.u, r.g, final=False, lesson=_lesson(r) if rule.teaches == "ascent" else None)
        assert r.ascent is not None
        r.ascent.copy_(r.g)
    if r.first is not None:
        r.first.copy_(r.g)
    if r.ascent is not None:
        e = rule.ascend(r.ascent, Step(r.v, r.anchor, number, r.affine, r.client_state, r.server_state, noise))
        r.e = check_shape(e, r.anchor)
        r.u.copy_(r.v).add_(r.e)


def differentiate(r: ClientRound, gradient: Gradient) -> Tensor:
    """Take the gradient that the step goes along into `r.g`; the loss at u."""
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
        pull_(r, lr * local.weight_decay)
        adamw_(r.v, g, r.momentum, r.second, lr, number, add)
    elif r.momentum is not None:
        add(r.momentum.mul_(local.momentum), g, gain)
        add(add(r.momentum, r.v, rate), r.centre, -rate)
        if bias is not None:
            r.momentum.add_(bias)
        add(r.v, r.momentum, -lr)
    else:
        if not is_number(rate, 0):
            pull_(r, lr * rate)
        add(r.v, g, -lr * gain)
        if bias is not None:
            add(r.v, bias, -lr)
    if r.v is not r.u:
        r.u.copy_(r.v)


def pull_(r: ClientRound, share: float | Tensor) -> None:
    """Move v by a share of the way to the centre."""
    if r.mapped:
        r.v.sub_((r.v - r.centre) * share)
    else:
        r.v.lerp_(r.centre, share)


def finish(
    r: ClientRound, memory: Memory, broadcast: Broadcast, steps: int
) -> tuple[LocalResult, Memory, State, State]:
    """The result of a client's round, what the client keeps, and what its two rules upload."""
    rule, correction = r.algorithm.perturbation, r.algorithm.correction
    start = r.anchor if r.ascends or r.e is None else r.anchor + r.e
    mean = r.algorithm.mean_lr(cast(float, r.lr), steps)  # tensors in a map over clients
    update, privacy = r.v - start, r.algorithm.privacy
    result = LocalResult(update if privacy is None else privacy.clipped(update), steps, mean)
    after = Memory(
        rule.next_client_state(r.anchor, r.client_state),
        correction.next_client_state(memory.correction, broadcast.correction, result),
    )
    return result, after, rule.upload(r.client_state), correction.upload(memory.correction, after.correction)


@dataclass
class LocalStep:
    """One local step as a probe sees it: the gradient has been taken, the weights have not moved yet."""

    model: FlatModel
    round: ClientRound
    loss: Tensor
    """Of the batch, at v + e."""

    @property
    def e(self) -> Tensor | None:
        """The perturbation; the next step may overwrite it."""
        e = self.round.e
        return e if e is None or self.model.order is None else self.model.plain(e, torch.empty_like(e))

    def weights(self) -> Tensor:
        """A copy of the client's local model v."""
        v = self.round.v if self.round.ascends else self.round.v - self.round.centre
        return self.model.plain(v, torch.empty_like(v))


def local_update(
    model: FlatModel,
    data: ClientData,
    algorithm: Algorithm,
    local: LocalTraining,
    broadcast: Broadcast,
    memory: Memory,
    *,
    client: int,
    seed: int,
    task: Task | None = None,
) -> Generator[LocalStep, None, ClientResult]:
    """Train one client, yielding before every step; the generator's value is the client's result.

    Without a task it is that of `local.loss`. A model with graphs makes a step whole after the yield, so that its
    gradient is not there to be looked at.
    """
    from fedlesam.core.recorded import RecordedRound, given_back, held_round  # made of the parts above

    task = local.task() if task is None else task
    mask_seed = seeds.derive(seed, "step", broadcast.round, client)
    seeds.reseed_torch(mask_seed, model.device)
    memory = memory.to(model.device)
    per_epoch = steps_per_epoch(size_of(data), local.batch_size, model.batch_norm)
    steps = local.steps_of(seed, broadcast.round, client, per_epoch)
    graphs = model.graphs if algorithm.perturbation.teaches != "descent" else None
    graphs = None if graphs is None or graphs.refused is not None else graphs
    u = model.weights if model.order is None else model.scratch("plain")
    given = r = begin(algorithm, local, broadcast, memory, steps, u, model.scratch)
    if model.order is not None or graphs is not None:
        r = held_round(model, given)
    model.load_buffers(broadcast.buffers)
    model.module.train()
    batches = Batches(data, model.device, task.collate)
    rng = seeds.generator(seed, "batches", broadcast.round, client)
    on_gpu = local.augment is not None and model.device.type == "cuda"
    augment_rng = seeds.generator(seed, "batches", broadcast.round, client, device=model.device) if on_gpu else rng
    noise = model.scratch("noise") if algorithm.perturbation.draws else None
    losses: list[Tensor] = []
    taken: list[Tensor | slice] = []
    view, gradient = LocalStep(model, r, r.anchor.new_zeros(())), BatchGradient(model, task, broadcast.buffers)
    recorded = None if graphs is None else RecordedRound(graphs, r, gradient, noise)
    orders = batch_indices(len(batches), local.batch_size, None, model.batch_norm, rng, batches.home)
    for indices in islice(orders, steps):
        mask_seed += 1
        taken.append(indices)
        batch = batches.fetch(indices, mask_seed)
        if local.augment is not None:
            batch = augmented(batch, local.augment, augment_rng)
        if noise is not None:
            seeds.reseed_torch(mask_seed, model.device)
            noise.copy_(model.hold("noise", noise.normal_())) if model.order is not None else noise.normal_()

        gradient.batch, number = (batch, mask_seed), len(losses)
        if recorded is not None:
            yield view
        try:
            loss = look(r, gradient, number, noise) if recorded is None else recorded.step(number).clone()
        except Exception as error:
            error.add_note(f"in local step {number}, on a batch of {shapes(batch)}")
            raise
        losses.append(loss)
        if recorded is None:
            view.loss = loss
            yield view
            move(r, number)

    values = torch.stack(losses).tolist()
    wrong = next((number for number, value in enumerate(values) if not math.isfinite(value)), None)
    if wrong is not None:
        batch = batches.fetch(taken[wrong], mask_seed - len(values) + wrong + 1)
        remedy = _remedy(batch, taken[wrong])
        raise NotFinite(f"the loss of step {wrong} is not finite", broadcast.round, client, remedy)
    model.state.check()
    r = given if r is given else given_back(model, given, r)
    result, after, perturbation, correction = finish(r, memory, broadcast, len(values))
    if not all(math.isfinite(end) for end in result.update.aminmax()):
        raise NotFinite("the update is not finite", broadcast.round, client)
    mean = sum(values) / len(values)
    return ClientResult(client, len(batches), result, mean, perturbation, correction, model.buffers(), after)


def drain(steps: Generator[LocalStep, None, ClientResult], check: Callable[[], None] | None = None) -> ClientResult:
    """Run a client to the end of its round; `check` is called at every step and may raise."""
    while True:
        try:
            next(steps)
            if check is not None:
                check()
        except StopIteration as end:
            result: ClientResult = end.value
            return result


def _remedy(batch: Batch, numbers: Tensor | slice) -> str:
    """For a loss that is not finite: where the samples are to blame, no learning rate helps."""
    try:
        check_finite(batch, "its data", numbers)
    except ValueError as error:
        return str(error)
    return LOWER


def check_shape(e: Tensor, anchor: Tensor) -> Tensor:
    """The cheapest check that would have caught the released code's scalar perturbations (docs/errata.md, 8)."""
    if e.shape != anchor.shape:
        raise ValueError(
            f"a perturbation must have the model's {tuple(anchor.shape)} entries, got shape {tuple(e.shape)}"
        )
    return e
