"""All randomness derives from (seed, purpose, round, client): there is no generator state to save or to lose."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

PURPOSES = {"participation": 1, "batches": 2, "step": 3, "epochs": 4, "split": 5, "model": 6, "dropout": 7, "probe": 8}
PURPOSES |= {"privacy": 9, "test": 10}
_Words = npt.NDArray[np.uint32]
Purpose = Literal["participation", "batches", "step", "epochs", "split", "model", "dropout", "probe", "privacy", "test"]


def derive(seed: int, purpose: Purpose, *where: int) -> int:
    """A 63-bit seed for one purpose at one place, e.g. `derive(seed, "batches", round, client)`.

    Args:
        seed: Of the run.
        purpose: What the random numbers are for.
        where: Numbers that say where, such as the round and the client.
    """
    words = np.random.SeedSequence([seed, PURPOSES[purpose], *where]).generate_state(1, np.uint64)
    return int(words[0]) >> 1


FEW, WORD = 12, 0xFFFFFFFF
"""Places whose seeds are derived faster one by one; the largest number for which `derive_each` is written."""


def derive_each(purpose: Purpose, places: Sequence[tuple[int, int, int]]) -> list[int]:
    """`derive(seed, purpose, round, client)` at many places: NumPy's SeedSequence, computed for all of them at once.

    Args:
        purpose: what the seeds are for.
        places: the seed of a run, a round and a client, each.
    """
    if len(places) <= FEW or max(map(max, places)) > WORD:
        return [derive(seed, purpose, *where) for seed, *where in places]
    seed, round, client = np.array(places, np.uint32).T
    factor = 0x43B0D7E5

    def hashed(value: _Words) -> _Words:
        nonlocal factor
        value = value ^ np.uint32(factor)
        factor = factor * 0x931E8875 & WORD
        return _folded(value * np.uint32(factor))

    pool = [hashed(words) for words in (seed, np.full_like(seed, PURPOSES[purpose]), round, client)]
    for i in range(4):
        for j in sorted({0, 1, 2, 3} - {i}):
            pool[j] = _folded(np.uint32(0xCA01F9DD) * pool[j] - np.uint32(0x4973F715) * hashed(pool[i]))
    factor, halves = 0x8B51F9DD, []
    for value in pool[:2]:
        value = value ^ np.uint32(factor)
        factor = factor * 0x58F38DED & WORD
        halves.append(_folded(value * np.uint32(factor)).astype(np.uint64))
    found: list[int] = ((halves[0] | halves[1] << np.uint64(32)) >> np.uint64(1)).tolist()
    return found


def _folded(value: _Words) -> _Words:
    return value ^ value >> np.uint32(16)


def generator(seed: int, purpose: Purpose, *where: int, device: torch.device | None = None) -> torch.Generator:
    """A generator for one purpose at one place; on a GPU it draws there.

    Args:
        seed: Of the run.
        purpose: What the random numbers are for.
        where: Numbers that say where, such as the round and the client.
        device: Where it draws; None is the CPU.
    """
    on = device if device is not None and device.type == "cuda" else torch.device("cpu")
    return torch.Generator(on).manual_seed(derive(seed, purpose, *where))


def reseed_torch(seed: int, device: torch.device) -> None:
    """Seed what dropout layers draw from: a microsecond for each generator, so it can be done before every pass.

    Only the CPU's and this device's: `torch.manual_seed` looks at every backend there is and takes a hundred times as
    long.

    Args:
        seed: For PyTorch's global generators.
        device: Where the model is.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        cuda_generator(device).manual_seed(seed)


def cuda_generator(device: torch.device) -> torch.Generator:
    """The one that layers on a GPU draw from.

    Args:
        device: A CUDA device.
    """
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def state(device: torch.device) -> tuple[bytes, int]:
    """Of the generators that layers draw from: another one after every draw.

    Args:
        device: Where the model is.
    """
    cpu = torch.default_generator.get_state().numpy().tobytes()
    return cpu, cuda_generator(device).get_offset() if device.type == "cuda" else 0


def reseed_everything(seed: int, device: torch.device) -> None:
    """Also Python's and NumPy's global generators, which a user's Dataset may draw from.

    Args:
        seed: For all of them.
        device: Where the model is.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the legacy generator is the one users' transforms draw from
    reseed_torch(seed, device)


@contextlib.contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Give the caller's global generators back as they were.

    Args:
        device: Where the model is.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
