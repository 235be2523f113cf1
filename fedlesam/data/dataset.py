"""A data set in memory: raw images and labels, turned into model inputs when a client or the evaluation asks."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedlesam.data.batches import Augment, Batch
from fedlesam.data.source import Labels

STREAMED = 2**26
"""Values of a client, 256 MB as float32, above which its batches are gathered and normalised one by one."""


@dataclass(frozen=True)
class Images:
    """Raw samples, possibly memory-mapped."""

    x: Tensor
    """samples x channels x height x width; uint8, or float32 for a user's own data"""
    y: Tensor
    """int64 class numbers"""

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Domains:
    """Of the training images."""

    names: tuple[str, ...]
    of: Labels
    """The number of each image's domain."""
    test: npt.NDArray[np.bool_] | None = None
    """The images of the publishers' test lists, where a split is to follow them."""


@dataclass(frozen=True)
class DataSet:
    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    """Per channel, of x / scale."""
    std: tuple[float, ...]
    scale: float = 255.0
    """The largest raw value."""
    augment: Augment | None = field(default=None, compare=False)
    """For training only, on normalised batches; the protocol of the paper where it has one."""
    fingerprint: str = ""
    """Of the samples: two data sets with the same one hold the same samples in the same order, however stored."""
    domains: Domains | None = field(default=None, compare=False)
    """With domains there is no test set: a split leaves one of them out for the test."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """channels, height, width"""
        _, channels, height, width = self.train.x.shape
        return channels, height, width

    def normalise(self, x: Tensor) -> Tensor:
        mean = torch.tensor(self.mean).view(1, -1, 1, 1) * self.scale
        std = torch.tensor(self.std).view(1, -1, 1, 1) * self.scale
        return torch.sub(x, mean).div_(std)

    def shard(self, indices: Tensor) -> "Shard":
        """The training samples of one client."""
        return Shard(self, self.train, indices)

    def test_shard(self) -> "Shard":
        return Shard(self, self.test, torch.arange(len(self.test)))


@dataclass(frozen=True)
class Shard:
    """Some samples of a data set, gathered and normalised when they are needed and not kept."""

    data: DataSet
    images: Images
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def labels(self) -> Tensor:
        return self.images.y[self.indices]

    @property
    def streams(self) -> bool:
        """Whether it is too large to be held as a whole."""
        return len(self) * self.images.x[0].numel() > STREAMED

    def batch(self, chosen: Tensor | slice) -> Batch:
        """Some of its samples, by their place in it; the same bits as `tensors` has there."""
        indices = self.indices[chosen]
        return self.data.normalise(self.images.x[indices]), self.images.y[indices]

    def tensors(self) -> Batch:
        return self.batch(slice(None))
