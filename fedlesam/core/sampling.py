"""Which clients are active in a round."""

from collections.abc import Callable, Sequence

import numpy as np

from fedlesam.core import seeds

Sampling = Callable[[int, np.random.Generator, int, int], Sequence[int]]
"""A function of (round, rng, clients, active): the numbers of the clients of a round, drawn from rng alone."""


def count_active(active: int | float, clients: int) -> int:
    """How many clients a round has: an int is a count, a float a share of them.

    Args:
        active: A count (int) or a share (float) of the clients.
        clients: All there are.
    """
    if isinstance(active, bool) or not isinstance(active, int | float | np.integer | np.floating):
        raise ValueError(f"active must be a count (int) or a share (float), got {active!r}")
    if isinstance(active, int | np.integer):
        if not 1 <= active <= clients:
            raise ValueError(f"active must be from 1 to the number of clients, {clients}, got {active}")
        return int(active)
    if not 0 < active <= 1:
        raise ValueError(f"active as a share must be above 0 and at most 1, got {active}; a count is an int, e.g. 10")
    return max(1, round(float(active) * clients))


def draw(seed: int, round: int, clients: int, active: int, sampling: Sampling | None) -> list[int]:
    """The active clients of a round: by a function of one's own, or uniform without replacement.

    Args:
        seed: Of the run.
        round: From 0.
        clients: All there are.
        active: How many are drawn.
        sampling: A function of (round, rng, clients, active); None draws uniformly.
    """
    rng = np.random.default_rng(seeds.derive(seed, "participation", round))
    if sampling is None:
        return sorted(rng.choice(clients, active, replace=False).tolist())
    try:
        return check_active(sampling(round, rng, clients, active), clients)
    except (ValueError, TypeError) as error:
        raise ValueError(f"sampling(round={round}): {error}") from error


def draw_silent(seed: int, round: int, active: Sequence[int], dropout: float) -> list[int]:
    """Those of the active clients that will never answer, each by its own draw.

    Args:
        seed: Of the run.
        round: The number of the round, from 0.
        active: The clients of the round.
        dropout: The probability of each.
    """
    if not dropout:
        return []
    drawn = {client: seeds.derive(seed, "dropout", round, client) for client in active}
    return [client for client, own in drawn.items() if np.random.default_rng(own).random() < dropout]


def check_active(active: Sequence[int], clients: int) -> list[int]:
    """The numbers of clients in their order; a ValueError if one is none, or is there twice.

    Args:
        active: The numbers that were given.
        clients: All there are.
    """
    for i in active:
        if isinstance(i, bool) or not isinstance(i, int | np.integer):
            raise ValueError(f"active must list client numbers, e.g. [0, 3], got {i!r} in {list(active)}")
    chosen = sorted(int(i) for i in active)
    if not chosen:
        raise ValueError("active is empty: a round needs at least one client")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"active names a client twice: {chosen}")
    if chosen[0] < 0 or chosen[-1] >= clients:
        raise ValueError(f"active names clients outside 0 to {clients - 1}: {chosen}")
    return chosen
