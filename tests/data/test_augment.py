"""Flip and crop against a slow oracle, image by image, and against the probabilities it promises."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedlesam.data.augment import flip_and_crop


def slow(x: Tensor, draw: torch.Generator, pad: int) -> Tensor:
    """One image at a time, from the same draws."""
    flips = torch.rand(len(x), generator=draw)
    crops = torch.rand(len(x), generator=draw)
    tops, lefts = torch.randint(0, 2 * pad + 1, (2, len(x)), generator=draw)
    out = []
    for i, image in enumerate(x):
        if flips[i] < 0.5:
            image = image.flip(-1)
        if crops[i] < 0.5:
            wide = functional.pad(image, (pad, pad, pad, pad))
            top, left = int(tops[i]), int(lefts[i])
            image = wide[:, top : top + x.shape[2], left : left + x.shape[3]]
        out.append(image)
    return torch.stack(out)


@settings(max_examples=50)
@given(
    st.integers(0, 2**31),
    st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 12), st.integers(1, 12)),
    st.integers(0, 5),
)
def test_oracle(seed: int, shape: tuple[int, ...], pad: int) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    before = x.clone()
    found = flip_and_crop(x, torch.Generator().manual_seed(seed), pad)
    assert torch.equal(found, slow(x, torch.Generator().manual_seed(seed), pad))
    assert torch.equal(x, before)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_memory_layout_does_not_matter(layout: torch.memory_format) -> None:
    x = torch.randn(8, 3, 32, 32)
    found = flip_and_crop(x.contiguous(memory_format=layout), torch.Generator().manual_seed(1))
    assert torch.equal(found, flip_and_crop(x, torch.Generator().manual_seed(1)))


def test_statistics() -> None:
    """Each image holds its own coordinates, so that what happened to it can be read off one inner pixel."""
    count, size = 40_000, 12
    x = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).float()
    found = flip_and_crop(x.expand(count, -1, -1, -1), torch.Generator().manual_seed(0))
    inner = found[:, :, 5:7, 5:7]
    flipped = inner[:, 1, 0, 0] > inner[:, 1, 0, 1]
    down = inner[:, 0, 0, 0] - 5
    across = torch.where(flipped, size - 1 - inner[:, 1, 0, 0], inner[:, 1, 0, 0]) - 5
    assert abs(flipped.float().mean() - 0.5) < 0.01
    still = (down == 0) & (across == 0)
    assert abs(still.float().mean() - (0.5 + 0.5 / 81)) < 0.01
    moves = torch.bincount(((down + 4) * 9 + across + 4).long()[~still], minlength=81).float()
    assert moves[40] == 0
    expected = count * 0.5 / 81
    assert (
        float(((moves - expected) ** 2 / expected).sum() - expected) < 130
    )  # chi-square, 80 cells; the middle one is out
    together = torch.corrcoef(torch.stack([flipped, ~still]).float())[0, 1]
    assert abs(together) < 0.02


def test_only_the_given_generator() -> None:
    x = torch.randn(4, 3, 32, 32)
    state = torch.get_rng_state()
    first = flip_and_crop(x, torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, pickle.loads(pickle.dumps(flip_and_crop))(x, torch.Generator().manual_seed(3)))
