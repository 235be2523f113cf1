"""All randomness derives from (seed, purpose, round, client): there is no generator state to save or to lose."""

import contextlib
import random
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch

PURPOSES = {"participation": 1, "batches": 2, "step": 3, "epochs": 4, "split": 5, "model": 6, "dropout": 7, "probe": 8}
PURPOSES |= {"privacy": 9}
Purpose = Literal["participation", "batches", "step", "epochs", "split", "model", "dropout", "probe", "privacy"]


def derive(seed: int, purpose: Purpose, *where: int) -> int:
    """A 63-bit seed for one purpose at one place, e.g. `derive(seed, "batches", round, client)`."""
    words = np.random.SeedSequence([seed, PURPOSES[purpose], *where]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def generator(seed: int, purpose: Purpose, *where: int, device: torch.device | None = None) -> torch.Generator:
    """A generator for one purpose at one place; on a GPU it draws there."""
    on = device if device is not None and device.type == "cuda" else torch.device("cpu")
    return torch.Generator(on).manual_seed(derive(seed, purpose, *where))


def reseed_torch(seed: int, device: torch.device) -> None:
    """Seed what dropout layers draw from: a microsecond for each generator, so it can be done before every pass.

    Only the CPU's and this device's: `torch.manual_seed` looks at every backend there is and takes a hundred times as
    long.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        cuda_generator(device).manual_seed(seed)


def cuda_generator(device: torch.device) -> torch.Generator:
    """The one that layers on a GPU draw from."""
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def state(device: torch.device) -> tuple[bytes, int]:
    """Of the generators that layers draw from: another one after every draw."""
    cpu = torch.default_generator.get_state().numpy().tobytes()
    return cpu, cuda_generator(device).get_offset() if device.type == "cuda" else 0


def reseed_everything(seed: int, device: torch.device) -> None:
    """Also Python's and NumPy's global generators, which a user's Dataset may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the legacy generator is the one users' transforms draw from
    reseed_torch(seed, device)


@contextlib.contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Give the caller's global generators back as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
