"""The batches of many clients, a row each: one gather a step where their samples are tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.batches import Augment, Batch, Batches, batch_indices, steps_per_epoch
from fedlesam.core.slots import Algorithm
from fedlesam.core.sound import augmented
from fedlesam.core.task import Supervised, Task, is_pair
from fedlesam.core.tree import join, leaves, tree_items, tree_map
from fedlesam.engines._mapped import NotStackable

IGNORED = -100
"""The class number that `F.cross_entropy` leaves out of its mean: it fills the last batch of an epoch up."""


@dataclass
class Member:
    """A client of a stack."""

    client: int
    data: Batches
    size: int
    steps: int
    """Its local steps of the round."""
    rng: torch.Generator
    """Draws the order of its samples, and the augmentation."""
    mask: int = 0
    """Its seed of the round, for rules and samples that draw."""


def order_of(size: int, batch_size: int, steps: int, rng: torch.Generator) -> Tensor:
    """The places of the samples of each batch, a row per step, as `batch_indices` has them; -1 fills up."""
    per_epoch = steps_per_epoch(size, batch_size, join_last=False)
    epochs = range(-(-steps // per_epoch))
    orders = torch.stack(
        [torch.arange(size) if per_epoch == 1 else torch.randperm(size, generator=rng) for _ in epochs]
    )
    if missing := per_epoch * batch_size - size:
        orders = F.pad(orders, (0, missing), value=-1)
    return orders.view(-1, batch_size)[:steps]


def can_fill_up(task: Task, algorithm: Algorithm, data: Batches) -> bool:
    """Whether batches of fewer samples can be filled up: the loss has a target that it ignores.

    A rule that teaches would average over what fills them up.
    """
    if algorithm.perturbation.teaches:
        return False
    whole = isinstance(task.loss, Supervised) and task.loss.compare is F.cross_entropy and task.targets is None
    if not whole or data.tensors is None or not is_pair(data.tensors):
        return False
    return isinstance(data.tensors[1], Tensor) and not data.tensors[1].is_floating_point()


class Gathered:
    """Batches of clients whose samples are tensors of one shape.

    Args:
        members: the clients, those with more steps first.
        batch_size: samples of a batch.
        width: rows of a batch; those beyond the clients have any content.
        fill: whether all batches have the same size; without it all clients have as many samples.
    """

    def __init__(self, members: Sequence[Member], batch_size: int, width: int, fill: bool) -> None:
        self.samples = join(torch.cat, [member.data.tensors for member in members])
        device = leaves(self.samples)[0].device
        orders = [order_of(m.size, batch_size, m.steps, m.rng) for m in members]
        self.places = torch.full((len(orders[0]), width, batch_size), -1)
        start = 0
        for row, (order, member) in enumerate(zip(orders, members, strict=True)):
            self.places[: len(order), row] = torch.where(order < 0, -1, order + start)
            start += member.size
        self.missing = self.places < 0
        self.places = self.places.clamp_(min=0).to(device)
        self.counts: list[int] | None = None
        if fill:
            self.missing = self.missing.to(device)
        else:
            self.counts = (batch_size - self.missing[:, 0].sum(1)).tolist()
        self.holes = bool(self.missing.any())

    def __call__(self, step: int, rows: int) -> Batch:
        """The batches of the first rows at a step."""
        chosen = self.places[step, :rows]
        if self.counts is not None:
            chosen = chosen[:, : self.counts[step]]
        flat = chosen.reshape(-1)
        batch = tree_map(lambda t: t.index_select(0, flat).view(*chosen.shape, *t.shape[1:]), self.samples)
        if self.counts is None and self.holes:
            hole, (x, y) = self.missing[step, :rows], batch
            return x, y.masked_fill(hole.view(*hole.shape, *[1] * (y.ndim - 2)), IGNORED)
        return batch


class Fetched:
    """Batches of clients with as many samples each, fetched and augmented client by client."""

    def __init__(self, members: Sequence[Member], batch_size: int, width: int, augment: Augment | None) -> None:
        self.members, self.width, self.augment = members, width, augment
        self.orders: list[Iterator[Tensor | slice]] = [
            batch_indices(m.size, batch_size, None, False, m.rng, m.data.home) for m in members
        ]

    def __call__(self, step: int, rows: int) -> Batch:
        """The batches of a step; steps must be asked for in their order."""
        found = [m.data.fetch(next(o), m.mask + step + 1) for m, o in zip(self.members, self.orders, strict=True)]
        if self.augment is not None:
            found = [augmented(batch, self.augment, m.rng) for batch, m in zip(found, self.members, strict=True)]
        return stacked(found + found[:1] * (self.width - len(found)))


def stacked(batches: list[Batch]) -> Batch:
    """One batch with a row per client; NotStackable if theirs differ in shape, or are not tensors alone."""
    kinds = {tuple((path, getattr(leaf, "shape", None)) for path, leaf in tree_items(batch)) for batch in batches}
    if len(kinds) == 1 and all(isinstance(leaf, Tensor) for leaf in leaves(batches[0])):
        return join(torch.stack, batches)
    raise NotStackable(
        "the stacked engine needs batches of tensors that have one shape for all clients, and these differ, as "
        "padded text does; pad to one length in collate, or use the plain engine"
    )


def draw_noise(out: Tensor, members: Sequence[Member], step: int) -> None:
    """Standard normal numbers for a step, each client's from its own seed."""
    for row, member in zip(out, members, strict=False):
        seeds.reseed_torch(member.mask + step + 1, out.device)
        row.normal_()
