"""Clients that can be made to fail, and mended."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from worlds import federation, mlp, samples, training

from fedlesam import Federation
from fedlesam.federation import DROPOUT, Record

UNPLUGGED = 12345.0
"""A client with this input raises."""
LARGEST_NORM = 60.0
METHODS = ("fedavg", "fedlesam-s", "fedsmoo")


class Clients:
    """Clients whose data can be spoilt and mended while workers train on them: the memory is shared."""

    def __init__(self, sizes: tuple[int, ...] = (7, 12, 5, 9, 16, 3), dtype: torch.dtype = torch.float64) -> None:
        self.pairs = [(x.share_memory_(), y) for x, y in samples(sizes, dtype=dtype)]
        self.good = [x.clone() for x, _ in self.pairs]

    def spoil(self, how: dict[int, str]) -> None:
        for client, mode in how.items():
            x = self.pairs[client][0]
            x.copy_(MODES[mode][0](self.good[client]))

    def mend(self) -> None:
        for (x, _), good in zip(self.pairs, self.good, strict=True):
            x.copy_(good)


MODES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "raises": (lambda x: torch.full_like(x, UNPLUGGED), "OSError: [Errno 5] unplugged"),
    "nan": (lambda x: torch.full_like(x, math.nan), "the loss of step 0 is not finite"),
    "explodes": (lambda x: 1e4 * x, "the update has norm "),
    "too large": (lambda x: 1e9 * x, "update has an entry of "),
    "buffer": (lambda x: 1e30 * x, "the buffer 0.running_var is not finite"),
}
"""What is done to the client's inputs, and the beginning of the reason."""


def sensor(x: Tensor, _: torch.Generator) -> Tensor:
    if bool((x == UNPLUGGED).any()):
        raise OSError(5, "unplugged")
    return x


def linear(dtype: torch.dtype = torch.float64) -> nn.Module:
    """The gradient grows with the inputs, so an update can explode and stay finite."""
    return mlp((5, 3), dtype)


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(5), mlp((5, 4, 3), torch.float32))


def make(method: str, clients: Clients, **settings: Any) -> Federation:
    given = {"model": linear(), "local": training(clip=None, augment=sensor), "on_client_error": "drop"}
    return federation(method, clients=clients.pairs, **{**given, **settings})


def plainly(record: Record) -> dict[str, Any]:
    return {**record.as_dict(), "seconds": None}


def assert_left_out(record: Record, expected: dict[int, str]) -> None:
    found = record.dropped or {}
    assert list(found) == sorted(expected)
    for client, mode in expected.items():
        assert found[client].startswith(DROPOUT if mode == DROPOUT else MODES[mode][1])
