"""Augmentation for a whole batch at once."""

import torch
from torch import Tensor
from torch.nn import functional

PAD = 4


def flip_and_crop(x: Tensor, rng: torch.Generator, pad: int = PAD) -> Tensor:
    """Mirror each image with p .5; then, with p .5, cut it at a random place out of itself with a border of zeros.

    The paper's augmentation of CIFAR. For normalised images, whose zero is the mean colour.

    Args:
        x: A batch of images.
        rng: The only source of randomness.
        pad: The width of the border in pixels.
    """
    count, channels, height, width = x.shape
    flip = torch.rand(count, generator=rng, device=rng.device) < 0.5
    crop = torch.rand(count, generator=rng, device=rng.device) < 0.5
    corner = torch.randint(0, 2 * pad + 1, (2, count), generator=rng, device=rng.device)
    corner = torch.where(crop, corner, pad)
    rows = corner[0, :, None] + torch.arange(height, device=rng.device)
    columns = corner[1, :, None] + torch.arange(width, device=rng.device)
    columns = torch.where(flip[:, None], width + 2 * pad - 1 - columns, columns)
    places = rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]
    padded = functional.pad(x, (pad, pad, pad, pad)).flatten(2)
    chosen = places.to(x.device).flatten(1)[:, None].expand(-1, channels, -1)
    return padded.gather(2, chosen).view(count, channels, height, width)


def flip(x: Tensor, rng: torch.Generator) -> Tensor:
    """Mirror each image with p .5.

    Args:
        x: A batch of images.
        rng: The only source of randomness.
    """
    mirrored = torch.rand(len(x), generator=rng, device=rng.device) < 0.5
    return torch.where(mirrored.to(x.device)[:, None, None, None], x.flip(3), x)


def other_view(x: Tensor, rng: torch.Generator) -> Tensor:
    """Put the last view of each sample first with p .5; a head on frozen features takes the first.

    Args:
        x: A batch of samples x 1 x views x features.
        rng: The only source of randomness.
    """
    swapped = torch.rand(len(x), generator=rng, device=rng.device) < 0.5
    return torch.where(swapped.to(x.device)[:, None, None, None], x.flip(2), x)
