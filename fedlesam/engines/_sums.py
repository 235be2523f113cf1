"""The exact sums of what clients of several federations upload, all of them by one compiled function."""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedlesam.core.exact_sum import in_fixed_point
from fedlesam.core.messages import ClientResult, Results
from fedlesam.core.reduction import uploads_of
from fedlesam.core.slots import State
from fedlesam.engines._compile import compiled

log = logging.getLogger("fedlesam")

MOST = 1 << 22
"""Entries of a stack's updates. Sums of larger ones take little beside their steps, and here twice their memory."""


class StackedSums:
    """Adds up the results of a stack's clients, those of each federation by themselves.

    One after the other these sums take as long as some local steps of a small model. They are whole numbers, so they
    have the bits that they would have one by one; `Reduction` decides whether it takes them.
    """

    def __init__(self) -> None:
        self._program: tuple[object, Callable[..., Sequence[Tensor]] | None] = None, None

    def __call__(
        self, results: Sequence[ClientResult | None], whose: Sequence[int], width: int, compile: bool
    ) -> dict[int, Results]:
        """The results of each federation, by its number.

        Args:
            results: of the stack's clients; None for one whose numbers are not finite.
            whose: the number of each client's federation.
            width: rows of the stack.
            compile: whether to make the sums; else `Reduction` makes them.
        """
        clients: dict[int, list[ClientResult]] = defaultdict(list)
        for number, result in zip(whose, results, strict=True):
            if result is not None:
                clients[number].append(result)
        size = max((own[0].result.update.numel() for own in clients.values()), default=MOST + 1)
        sums: list[State] = [{} for _ in clients]
        if compile and size * width <= MOST:
            sums = self._sums(list(clients.values()), width)
        return {number: Results(own, total) for (number, own), total in zip(clients.items(), sums, strict=True)}

    def _sums(self, clients: list[list[ClientResult]], width: int) -> list[State]:
        places = [place for place, own in enumerate(clients) for _ in own]
        named = uploads_of([result for own in clients for result in own])
        rows = [_filled(rows, width) for rows in named.values()]
        filled = torch.tensor(places + [width] * (width - len(places)), device=rows[0].device)
        program = self._compiled([*rows, filled])
        if program is None:
            return [{} for _ in clients]
        totals = program(*rows, filled)
        shapes = [vectors.shape[1:] for vectors in named.values()]
        each = zip(*(total[: len(clients)].unbind() for total in totals), strict=True)
        return [{n: t.view(s) for n, t, s in zip(named, own, shapes, strict=True)} for own in each]

    def _compiled(self, tensors: list[Tensor]) -> Callable[..., Sequence[Tensor]] | None:
        key = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        if self._program[0] != key:
            try:
                self._program = key, compiled(_totals, tensors)
            except Exception:  # sums one by one are slower, and have the same bits
                log.debug("the sums of a stack cannot be compiled", exc_info=True)
                self._program = key, None
        return self._program[1]


def _totals(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The sums of the rows that have the same place; a row more takes those that only fill up."""
    *vectors, places = tensors
    return tuple(_added(rows, places) for rows in vectors)


def _added(rows: Tensor, places: Tensor) -> Tensor:
    empty = torch.zeros(len(rows) + 1, rows.shape[1], dtype=torch.float64, device=rows.device)
    return empty.index_add(0, places, in_fixed_point(rows))


def _filled(rows: Tensor, width: int) -> Tensor:
    """So many rows, and no copy where they are all there."""
    rows = rows.reshape(len(rows), -1)
    return rows if len(rows) == width else torch.cat([rows, rows.new_zeros(width - len(rows), rows.shape[1])])
