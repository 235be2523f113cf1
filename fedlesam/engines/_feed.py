"""The batches of many clients, a row each: one gather for many steps where their samples are tensors."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.batches import Augment, Batch, Batches, batch_indices, steps_per_epoch
from fedlesam.core.flat_model import CalledModel, FlatModel
from fedlesam.core.slots import Algorithm
from fedlesam.core.sound import augmented
from fedlesam.core.task import Supervised, Task, is_pair
from fedlesam.core.tree import join, leaves, tree_items, tree_map
from fedlesam.engines._mapped import NotStackable

IGNORED = -100
"""The class number that `F.cross_entropy` leaves out of its mean: it fills the last batch of an epoch up."""


BLOCK = 1 << 20
"""Entries of samples that are gathered at a time."""


@dataclass
class Member:
    """A client of a stack."""

    client: int
    data: Batches
    size: int
    steps: int
    """Its local steps of the round."""
    seed: int
    """Of its run."""
    round: int
    kind: tuple[object, ...]
    """Members of one kind can be in one stack."""
    entries: int = 0
    """Of its largest tensor of samples."""
    mask: int = 0
    """Its seed of the round, for rules and samples that draw."""
    fills: bool = False
    """Whether its batches can be filled up."""

    @property
    def place(self) -> tuple[int, int, int]:
        """What the order of its samples derives from."""
        return self.seed, self.round, self.client

    @cached_property
    def rng(self) -> torch.Generator:
        """Draws the order of its samples."""
        return seeds.generator(self.seed, "batches", self.round, self.client)

    @cached_property
    def augment_rng(self) -> torch.Generator:
        """Draws the augmentation, where that is done client by client: on a GPU from a generator of its own there."""
        if self.data.device.type == "cpu":
            return self.rng
        return seeds.generator(self.seed, "batches", self.round, self.client, device=self.data.device)


def orders_of(drawn: Sequence[int], size: int, batch_size: int, steps: int) -> Tensor:
    """The places of the samples of each batch as `batch_indices` has them: (seeds, steps, samples); -1 fills up."""
    per_epoch, rng = steps_per_epoch(size, batch_size, join_last=False), torch.Generator()
    epochs = -(-steps // per_epoch)
    if per_epoch > 1:
        each = []
        for seed in drawn:
            rng.manual_seed(seed)
            each += [torch.randperm(size, generator=rng) for _ in range(epochs)]
        orders = torch.cat(each).view(-1, size)
    else:
        orders = torch.arange(size).repeat(len(drawn) * epochs, 1)
    if missing := per_epoch * batch_size - size:
        orders = F.pad(orders, (0, missing), value=-1)
    return orders.reshape(len(drawn), -1, batch_size)[:, :steps]


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


def samples_are_apart(model: FlatModel, task: Task, data: Batches) -> bool:
    """Whether the outputs for a sample do not depend on the others of its batch, which may only fill it up.

    Args:
        model: with any weights.
        task: how a batch becomes a loss.
        data: a client's samples.
    """
    called = CalledModel(model.module, None, model.called.cast)  # compiled, it would be so for these sizes, too
    model.module.eval()
    with torch.no_grad():
        both, one = (called.run(task, data.fetch(torch.arange(size), 0)).outputs for size in (2, 1))
    far = (both[:1] - one).abs().amax()
    return bool(far <= 1e-3 * both.abs().amax())


class Gathered:
    """Batches of clients whose samples are tensors of one shape, gathered for many steps at once.

    Args:
        members: the clients, those with more steps first.
        batch_size: samples of a batch.
        width: rows of a batch; those beyond the clients have any content.
        fill: whether all batches have the same size; without it all clients have as many samples.
    """

    def __init__(self, members: Sequence[Member], batch_size: int, width: int, fill: bool) -> None:
        self.samples = join(torch.cat, [member.data.tensors for member in members])
        held = leaves(self.samples)
        places = _places(members, batch_size, width)
        missing = places < 0
        self.counts = None if fill else (batch_size - missing[:, 0].sum(1)).tolist()
        self.missing = missing.to(held[0].device) if fill and bool(missing.any()) else None
        self.places = places.clamp_(min=0).to(held[0].device)
        largest = max(tensor[0].numel() for tensor in held)
        self.block = max(1, BLOCK // (width * batch_size * largest))
        self.held: tuple[int, Sequence[Batch]] = -1, ()

    def __call__(self, step: int, rows: int) -> Batch:
        """The batches of the first rows at a step."""
        block, place = divmod(step, self.block)
        if self.held[0] != block:
            self.held = block, self._gathered(slice(block * self.block, (block + 1) * self.block))
        batch, count = self.held[1][place], None if self.counts is None else self.counts[step]
        if count is None and rows == self.places.shape[1]:
            return batch
        return tree_map(lambda t: t[:rows, :count].contiguous(), batch)

    def _gathered(self, steps: slice) -> list[Batch]:
        chosen = self.places[steps]
        flat = chosen.reshape(-1)
        batch = tree_map(lambda t: t.index_select(0, flat).view(*chosen.shape, *t.shape[1:]), self.samples)
        if self.missing is not None:
            hole, (x, y) = self.missing[steps], batch
            batch = x, y.masked_fill(hole.view(*hole.shape, *[1] * (y.ndim - 3)), IGNORED)
        each = iter([part for own in zip(*(leaf.unbind() for leaf in leaves(batch)), strict=True) for part in own])
        return [tree_map(lambda _: next(each), batch) for _ in chosen]


def _places(members: Sequence[Member], batch_size: int, width: int) -> Tensor:
    """The numbers of the samples of each batch among those of all clients: (steps, width, samples); -1 fills up."""
    starts = torch.tensor([0, *accumulate(member.size for member in members)])
    drawn = seeds.derive_each("batches", [member.place for member in members])
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, member in enumerate(members):
        alike[member.size, member.steps].append(row)
    if len(alike) == 1 and len(members) == width and members[0].size % batch_size == 0:
        orders = orders_of(drawn, members[0].size, batch_size, members[0].steps)
        return orders.add_(starts[:-1, None, None]).transpose(0, 1).contiguous()
    places = torch.full((members[0].steps, width, batch_size), -1)
    for (size, steps), rows in alike.items():
        orders = orders_of([drawn[row] for row in rows], size, batch_size, steps)
        orders = torch.where(orders < 0, -1, orders + starts[rows, None, None])
        places[:steps, rows] = orders.transpose(0, 1)
    return places


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
            draws = [m.augment_rng for m in self.members]
            found = [augmented(batch, self.augment, rng) for batch, rng in zip(found, draws, strict=True)]
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
