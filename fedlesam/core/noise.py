"""Standard normal numbers as a function of a seed and a place: no generator, so they can be mapped and compiled.

PyTorch's generators make one number after the other. That takes longer than the step of a small client, and the
clients of a stack would have to take turns.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 1 << 18
"""Numbers that are made at a time, if they are of several steps."""


def _signed(bits: int) -> int:
    return bits - (bits >> 63 << 64)


FACTORS = _signed(0x3C79AC492BA7B653), _signed(0x1C69B3F74AC4AE35)
"""Of Pelle Evensen's mixer "moremur" (2019), 64 bits read as a signed integer."""

BITS = 24
"""Of a uniform number; floats between 1/2 and 1 have as many."""


def standard_normal(seeds: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """`size` numbers for each seed, by the method of Box and Muller from 64 mixed bits for two of them.

    Args:
        seeds: int64.
        size: of the last axis, which is new.
        dtype: of the numbers; the same ones to rounding in any.
    """
    half, exact = (size + 1) // 2, torch.promote_types(dtype, torch.float32)
    bits = _mix_(_mix_(seeds.clone())[..., None] ^ torch.arange(half, device=seeds.device))
    radius = _low_(bits >> 40, BITS).to(exact).add_(0.5).mul_(2.0**-BITS).log_().mul_(-2.0).sqrt_()
    angle = _low_(bits, BITS).to(exact).mul_(math.tau * 2.0**-BITS)
    return torch.cat([angle.cos().mul_(radius), angle.sin().mul_(radius)], -1)[..., :size].to(dtype)


def normal_vectors(seed: int, count: int, like: Tensor) -> Iterator[Tensor]:
    """The vectors of `standard_normal` for so many seeds that follow each other, several made at once.

    Args:
        seed: the first.
        count: the number of vectors.
        like: a vector of their size, type and device.
    """
    each = max(1, BLOCK // like.numel())
    for start in range(0, count, each):
        seeds = torch.arange(start, min(start + each, count), device=like.device) + seed
        yield from standard_normal(seeds, like.numel(), like.dtype).unbind()


def _mix_(x: Tensor) -> Tensor:
    """A permutation of the 64-bit integers that looks random, in place; products drop what is above 64 bits."""
    x.bitwise_xor_(_low_(x >> 27, 37)).mul_(FACTORS[0])
    x.bitwise_xor_(_low_(x >> 33, 31)).mul_(FACTORS[1])
    return x.bitwise_xor_(_low_(x >> 27, 37))


def _low_(x: Tensor, bits: int) -> Tensor:
    """The lowest bits, in place. After a shift, which repeats the sign, they are those of an unsigned one."""
    return x.bitwise_and_((1 << bits) - 1)
