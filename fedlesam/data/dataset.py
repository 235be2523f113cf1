"""A data set in memory: raw images and labels, turned into model inputs when a client or the evaluation asks."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedlesam.core.batches import Augment, Batch
from fedlesam.core.staging import resident
from fedlesam.core.tree import leaves, tree_map
from fedlesam.data._files import Labels

STREAMED = 2**26
"""Values of a client, 256 MB as float32, above which its batches are gathered and normalised one by one."""


@dataclass(frozen=True)
class Images:
    """Raw samples, possibly memory-mapped.

    Attributes:
        x: samples x channels x height x width, uint8 or float32; of a user's own data of any shape and dtype.
        y: int64 class numbers; a user's own data may have any targets.
        whole: Of a user's own samples that are no pair: all of their tensors, as a dict or nested tuple. Then x is
            the first of them, and y the targets, or zeros where only the task knows them.
    """

    x: Tensor
    y: Tensor
    whole: Any = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def samples(self) -> Batch:
        """All of them, as they are stored: (x, y), or `whole`."""
        return (self.x, self.y) if self.whole is None else self.whole


@dataclass(frozen=True)
class Domains:
    """The domains of the training images.

    Attributes:
        names: One name per domain.
        of: The number of each image's domain.
        test: Which images are in the publishers' test lists, where a split has to follow them.
        held: The number of the domain of each image held out, -1 of one in a test list; None where none is.
    """

    names: tuple[str, ...]
    of: Labels
    test: npt.NDArray[np.bool_] | None = None
    held: Labels | None = None

    def part(self, kept: Labels, aside: Labels | None) -> "Domains":
        """Of some of the images.

        Args:
            kept: The numbers of those that stay.
            aside: The numbers of those held out.
        """
        listed = np.zeros(len(self.of), bool) if self.test is None else self.test
        held = None if aside is None else np.where(listed[aside], -1, self.of[aside])
        return Domains(self.names, self.of[kept], None if self.test is None else self.test[kept], held)


@dataclass(frozen=True)
class Owners:
    """Whose each sample is: the natural clients.

    Attributes:
        names: One name per client: a speaking role, a writer.
        of: The number of each training sample's client.
        test: The number of each test sample's client, -1 of nobody's; None where all are of others.
    """

    names: tuple[str, ...]
    of: Labels
    test: Labels | None = None


@dataclass(frozen=True)
class DataSet:
    """A data set; of images with class numbers, of texts, or a user's own.

    Attributes:
        name: As a user types it.
        train: The raw training samples.
        test: The raw test samples; none where the data set has domains.
        classes: The names of the classes; empty where the targets are something else.
        mean: Per channel, of x / scale; empty where the inputs stay as they are.
        std: Per channel, of x / scale.
        scale: The largest raw value.
        augment: For training only, on normalised batches; the protocol of the paper where it has one.
        fingerprint: Data sets with the same one hold the same samples in the same order, however they are stored.
        domains: The domain of every training image; a split leaves one domain out for the test.
        owners: The natural clients, where the data set has some: `--split natural`.
        vocabulary: The words or characters that the token numbers of a text stand for.
    """

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0
    augment: Augment | None = field(default=None, compare=False)
    fingerprint: str = ""
    domains: Domains | None = field(default=None, compare=False)
    owners: Owners | None = field(default=None, compare=False)
    vocabulary: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """How many token numbers there are; 0 where the samples are pictures or numbers."""
        if self.vocabulary or self.train.x.dtype not in (torch.int32, torch.int64):
            return len(self.vocabulary)
        return int(max(part.x.max() for part in (self.train, self.test) if len(part))) + 1

    @property
    def shape(self) -> tuple[int, ...]:
        """channels, height, width; or the shape of one sample of a user's own."""
        return tuple(self.train.x.shape[1:])

    @property
    def outputs(self) -> int:
        """How many numbers a model returns for a sample, or for each position of it."""
        y = self.train.y
        if self.classes or not y.is_floating_point():
            return len(self.classes) or int(max(part.y.max() for part in (self.train, self.test) if len(part))) + 1
        return y[0].numel()

    @property
    def labels(self) -> Labels:
        """The class numbers of the training samples; where the targets are something else, all are of one class."""
        return self.train.y.numpy() if self.classes else np.zeros(len(self.train), dtype=np.int64)

    def normalise(self, x: Tensor) -> Tensor:
        """Model inputs from raw ones.

        Args:
            x: Raw samples of this data set.

        Returns:
            (x / scale - mean) / std, per channel.
        """
        if not self.mean:
            return x
        moments = _moments if x.device.type == "cpu" else _moments_there
        mean, std = moments(tuple(self.mean), tuple(self.std), self.scale, x.device)
        return torch.sub(x, mean).div_(std)

    def shard(self, indices: Tensor) -> "Shard":
        """The training samples of one client, usable as a client of a Federation.

        Args:
            indices: The numbers of its samples in the training set.
        """
        return Shard(self, self.train, indices)

    def test_shard(self, indices: Tensor | None = None) -> "Shard":
        """Test samples.

        Args:
            indices: Their numbers in the test set; None takes all.
        """
        return Shard(self, self.test, torch.arange(len(self.test)) if indices is None else indices)


def _moments(
    mean: tuple[float, ...], std: tuple[float, ...], scale: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of raw values, as they are subtracted and divided by."""
    one, other = (torch.tensor(part).view(1, -1, 1, 1) * scale for part in (mean, std))
    return (one, other) if device.type == "cpu" else (one.to(device), other.to(device))


_moments_there = functools.lru_cache(maxsize=64)(_moments)
"""On a GPU, whose batches may be normalised one by one: to send six numbers would stop it each time."""


@dataclass(frozen=True)
class Shard:
    """Some samples of a data set, gathered and normalised when they are needed and not kept.

    Attributes:
        data: The data set.
        images: Its training or its test samples.
        indices: The numbers of the shard's samples among them.
    """

    data: DataSet
    images: Images
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def labels(self) -> Tensor:
        """The class numbers."""
        return self.images.y[self.indices]

    @property
    def streams(self) -> bool:
        """Whether it is too large to be held as a whole."""
        whole = self.images.whole
        values: int = self.images.x[0].numel() if whole is None else sum(leaf[0].numel() for leaf in leaves(whole))
        return len(self) * values > STREAMED

    def batch(self, chosen: Tensor | slice) -> Batch:
        """Some of its samples, the same bits as `tensors` has there.

        Args:
            chosen: Their places in the shard.
        """
        return self.inputs(self.raw(chosen))

    def raw(self, chosen: Tensor | slice) -> Batch:
        """Some of its samples as they are stored.

        Args:
            chosen: Their places in the shard.
        """
        indices = self.indices[chosen]
        if self.images.whole is not None:
            return tree_map(lambda tensor: tensor[indices], self.images.whole)
        return self.images.x[indices], self.images.y[indices]

    def inputs(self, raw: Batch) -> Batch:
        """What a model takes, made where the samples are.

        Args:
            raw: Samples as they are stored.
        """
        return raw if self.images.whole is not None else (self.data.normalise(raw[0]), raw[1])

    def part(self, places: Tensor) -> "Shard":
        """Some of its samples.

        Args:
            places: In the shard.
        """
        return replace(self, indices=self.indices[places])

    def stays(self, room: int) -> int:
        """Bytes of the data set where it can stay on a device: uint8 pictures that fit; 0 of any other.

        Args:
            room: Bytes that there are for its training and its test samples.
        """
        if self.images.whole is not None or self.images.x.dtype != torch.uint8:
            return 0
        parts = {id(part): part for part in (self.data.train, self.data.test, self.images)}
        size = sum(part.x.nbytes + part.y.nbytes for part in parts.values())
        return size if size <= room else 0

    def on(self, device: torch.device, room: int) -> "Shard":
        """The same samples on a device, where all clients share them, if they can stay there; else itself.

        Args:
            device: Where they should be.
            room: Bytes that there are for the data set.
        """
        if not self.stays(room):
            return self
        images = Images(resident(self.images.x, device), resident(self.images.y, device))
        return replace(self, images=images, indices=resident(self.indices, device))

    def tensors(self) -> Batch:
        """All of its samples as (x, y), or in the form of a user's own."""
        return self.batch(slice(None))


def _order(labels: Labels) -> Labels:
    """One fixed shuffle, the same for every seed. Each beginning of it has the classes in the whole set's proportions.

    Up to the rounding of counts: the j-th of a class's n samples stands at (j + 1/2) / n of the way.
    """
    shuffled = np.random.default_rng(0).permutation(len(labels))
    place = np.empty(len(labels))
    for label in np.unique(labels):
        members = np.flatnonzero(labels[shuffled] == label)
        place[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.asarray(shuffled[np.argsort(place, kind="stable")], dtype=np.int64)


def select(data: DataSet, samples: int | None, held_out: int | float | None) -> DataSet:
    """Fewer training samples, and training samples held out for evaluation in place of the test data.

    Args:
        data: The whole data set.
        samples: How many training samples to keep, the classes in their proportions. None keeps all.
        held_out: A count, or a share of the training samples; the choice does not depend on `samples`.

    Returns:
        The smaller data set; with `held_out` it has no sample of the test data.

    Raises:
        ValueError: There are fewer training samples.
    """
    if samples is None and held_out is None:
        return data
    total = len(data.train)
    held = 0 if held_out is None else _count(held_out, total)
    wanted = total - held if samples is None else samples
    if not 1 <= wanted <= total - held:
        there = f"{total - held:,} beside the {held:,} held out" if held else f"{total:,}"
        asked = f"{wanted:,} training samples were asked for"
        raise ValueError(f"data {data.name}: {asked}, it has {there}; give fewer --samples")
    chosen = _order(data.labels)
    name = f"{data.fingerprint} {wanted} of {total}{f', {held} held out' if held else ''}"
    kept, aside = np.sort(chosen[:wanted]), np.sort(chosen[total - held :])
    owners = data.owners
    if owners is not None:
        owners = Owners(owners.names, owners.of[kept], owners.test if held_out is None else owners.of[aside])
    domains = None if data.domains is None else data.domains.part(kept, None if held_out is None else aside)
    test = data.test if held_out is None else _part(data.train, aside)
    return replace(data, train=_part(data.train, kept), test=test, fingerprint=name, owners=owners, domains=domains)


def _count(held_out: int | float, total: int) -> int:
    count = held_out if isinstance(held_out, int) else round(held_out * total) if 0 < held_out < 1 else 0
    if not 1 <= count < total:
        wanted = f"a count from 1 to {total - 1:,}, or a share between 0 and 1, such as 10%"
        raise ValueError(f"--held-out {held_out}: expected {wanted}")
    return count


def _part(images: Images, chosen: Labels) -> Images:
    where = torch.from_numpy(chosen)
    one = images.x.stride(0) == 0  # stored once, as in a stand-in: it stays that
    x = images.x[:1].expand(len(where), *images.x.shape[1:]) if one else images.x[where]
    return Images(x, images.y[where], tree_map(lambda tensor: tensor[where], images.whole))
