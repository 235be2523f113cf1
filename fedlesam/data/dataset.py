"""A data set in memory: raw images and labels, turned into model inputs when a client or the evaluation asks."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedlesam.data.batches import Augment, Batch


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

    def tensors(self) -> Batch:
        return self.data.normalise(self.images.x[self.indices]), self.labels()
