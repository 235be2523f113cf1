"""What one client does in one round: the one local loop of every method, made of the parts in core/step.py.

The serial engine calls it for one client after the other; the stacked engine maps the same parts over many clients.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.batches import Batch, Batches, ClientData, batch_indices, size_of, steps_per_epoch
from fedlesam.core.checks import LOWER, NotFinite
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.gradient import BatchGradient
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import Broadcast, ClientResult, Memory
from fedlesam.core.noise import normal_vectors
from fedlesam.core.recorded import RecordedRound, given_back, held_round
from fedlesam.core.slots import Algorithm
from fedlesam.core.sound import augmented, blame_targets, check_finite, shapes
from fedlesam.core.step import ClientRound, begin, finish, look, move
from fedlesam.core.task import Task
from fedlesam.core.vectors import peaks_of, read_at_once


@dataclass
class LocalStep:
    """One local step as a probe sees it: the gradient has been taken, the weights have not moved yet."""

    model: FlatModel
    """The module that the client trains."""
    round: ClientRound
    """What is fixed for its round, and its vectors."""
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

    Args:
        model: Trained in place.
        data: The client's samples.
        algorithm: The method.
        local: How the client trains.
        broadcast: What the server sent.
        memory: What the client kept from its last active round.
        client: Its number, from which its random numbers derive.
        seed: Of the run.
        task: How a batch becomes a loss; None takes that of `local.loss`.
    """
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
    there = local.augment is not None and model.device.type != "cpu"
    augment_rng = seeds.generator(seed, "batches", broadcast.round, client, device=model.device) if there else rng
    noise = model.hold("noise", r.anchor) if algorithm.perturbation.draws and r.ascends else None
    drawn = normal_vectors(mask_seed + 1, steps, r.anchor)
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
            model.hold("noise", next(drawn))
        gradient.batch, number = (batch, mask_seed), len(losses)
        if recorded is not None:
            yield view
        try:
            loss = look(r, gradient, number, noise) if recorded is None else recorded.step(number).clone()
        except Exception as error:
            error.add_note(f"in local step {number}, on a batch of {shapes(batch)}")
            blame_targets(model, task, batch, f"client {client}")
            raise
        losses.append(loss)
        if recorded is None:
            view.loss = loss
            yield view
            move(r, number)

    def refuse_losses(values: list[float]) -> None:
        for wrong in [number for number, value in enumerate(values) if not math.isfinite(value)]:
            remedy = _remedy(batches.fetch(taken[wrong], mask_seed - len(values) + wrong + 1), taken[wrong])
            raise NotFinite(f"the loss of step {wrong} is not finite", broadcast.round, client, remedy)

    try:
        model.state.check()
        r = given if r is given else given_back(model, given, r)
        result, after, perturbation, correction = finish(r, memory, broadcast, len(losses))
    except Exception:
        refuse_losses(torch.stack(losses).tolist())  # a rule may raise because of them
        raise
    ends = peaks_of([result.update, *perturbation.values(), *correction.values()])
    values, peaks = (part.tolist() for part in read_at_once([torch.stack(losses), ends]))
    refuse_losses(values)
    if not math.isfinite(peaks[0]):
        raise NotFinite("the update is not finite", broadcast.round, client)
    mean, slots = sum(values) / len(values), (perturbation, correction, model.buffers(), after)
    return ClientResult(client, len(batches), result, mean, *slots, peaks=peaks)


def drain(steps: Generator[LocalStep, None, ClientResult], check: Callable[[], None] | None = None) -> ClientResult:
    """Run a client to the end of its round.

    Args:
        steps: What `local_update` returned.
        check: Called at every step; it may raise.
    """
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
