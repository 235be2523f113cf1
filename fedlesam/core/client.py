"""What one client does in one round: the one local loop of every method."""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlesam.algorithms import Algorithm
from fedlesam.core import seeds
from fedlesam.core.batches import Batches, ClientData, batch_indices
from fedlesam.core.checks import LOWER, NotFinite
from fedlesam.core.descent import Descent
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import Answer, Broadcast, Memory
from fedlesam.data.sound import check_finite
from fedlesam.rules.base import LocalResult


@dataclass
class Step:
    """One local step as an instrument sees it: the gradient has been taken, the weights have not moved yet."""

    model: FlatModel
    v: Tensor
    e: Tensor | None
    shifted: bool
    """The loop walks along u = v + e, so `v` holds u."""
    loss: float = math.nan

    def weights(self) -> Tensor:
        """A copy of the client's local model v."""
        return self.v - self.e if self.shifted and self.e is not None else self.v.clone()


def local_update(
    model: FlatModel,
    data: ClientData,
    algorithm: Algorithm,
    local: LocalTraining,
    sent: Broadcast,
    memory: Memory,
    *,
    client: int,
    seed: int,
) -> Generator[Step, None, Answer]:
    """Train one client, yielding before every step; the generator's value is its answer.

    A perturbation that is constant in the round is a shifted start: the loop walks along u = v + e from w + e, and the
    update is the same. FedLESAM so costs what FedAvg costs, operation for operation (docs/design.md).
    """
    rule, correction = algorithm.perturbation, algorithm.correction
    anchor, u, lr = sent.weights, model.weights, local.lr_at(sent.round, algorithm)
    mask_seed = seeds.derive(seed, "step", sent.round, client)
    seeds.reseed_torch(mask_seed, model.device)

    mine = rule.begin(anchor, memory.perturbation)
    turn = correction.prepare(anchor, memory.correction, sent.correction)
    ascends = rule.gradient != "unused"
    e = None if ascends else rule.constant(anchor, mine, sent.perturbation)
    model.load(anchor, sent.buffers)
    model.module.train()
    start = anchor if e is None else u.add_(_same_shape(e, anchor)).clone()
    v = model.scratch("v").copy_(anchor) if ascends else u
    g = model.scratch("g").zero_() if ascends else v
    descend = Descent(model, v, anchor.new_zeros(()) if e is None else e, turn, local, lr)
    step = Step(model, v, e, shifted=not ascends)

    batches = Batches(data, model.device)
    draw = seeds.generator(seed, "batches", sent.round, client)
    epochs = local.epochs_of(seed, sent.round, client)
    steps, losses = 0, 0.0
    for indices in batch_indices(len(batches), local.batch_size, epochs, model.batch_norm, draw):
        mask_seed += 1
        x, y = batches.fetch(indices, mask_seed)
        if local.augment is not None:
            x = local.augment(x, draw)

        if rule.gradient == "here":
            buffers = model.buffers()
            seeds.reseed_torch(mask_seed, model.device)
            model.backward(local.loss, x, y)
            model.load_buffers(buffers)
            model.flatten_(model.gradients(), out=g)
        if ascends:
            seeds.reseed_torch(mask_seed, model.device)
            step.e = rule.ascend(g, v, mine, sent.perturbation)
            torch.add(v, _same_shape(step.e, anchor), out=u)
        seeds.reseed_torch(mask_seed, model.device)
        step.loss = model.backward(local.loss, x, y)
        if not math.isfinite(step.loss):
            raise NotFinite(f"the loss of step {steps} is not finite", sent.round, client, _remedy(x, y, indices))
        yield step

        gradients = model.gradients()
        if rule.gradient == "previous":
            model.flatten_(gradients, out=g)
        descend(gradients)
        if ascends:
            u.copy_(v)
        steps, losses = steps + 1, losses + step.loss

    model.state.check()
    result = LocalResult(v - start, steps, lr)
    if not all(math.isfinite(end) for end in result.update.aminmax()):
        raise NotFinite("the update is not finite", sent.round, client)
    after = Memory(rule.remember(anchor, mine), correction.remember(memory.correction, sent.correction, result))
    return Answer(
        client=client,
        examples=len(batches),
        result=result,
        loss=losses / steps,
        perturbation=rule.upload(mine),
        correction=correction.upload(memory.correction, after.correction),
        buffers=model.buffers(),
        memory=after,
    )


def finish(steps: Generator[Step, None, Answer], check: Callable[[], None] | None = None) -> Answer:
    """Run a client to the end of its round; `check` is called at every step and may raise."""
    while True:
        try:
            next(steps)
            if check is not None:
                check()
        except StopIteration as end:
            answer: Answer = end.value
            return answer


def _remedy(x: Tensor, y: Tensor, numbers: Tensor | slice) -> str:
    """For a loss that is not finite: where the samples are to blame, no learning rate helps."""
    try:
        check_finite(x, y, "its data", numbers)
    except ValueError as error:
        return str(error)
    return LOWER


def _same_shape(e: Tensor, anchor: Tensor) -> Tensor:
    """The cheapest check that would have caught the released code's scalar perturbations (docs/errata.md, 8)."""
    if e.shape != anchor.shape:
        raise ValueError(
            f"a perturbation must have the model's {tuple(anchor.shape)} entries, got shape {tuple(e.shape)}"
        )
    return e
