"""The experiment's data: 10,000 training pictures, at 100 clients or in one hand."""

import numpy as np
from numpy.typing import NDArray

from fedlesam import seeds
from fedlesam.data import splits

CLIENTS, PER_CLIENT = 100, 100
BETA = 0.1


def clients(labels: NDArray[np.int64], count: int, seed: int) -> list[NDArray[np.int64]]:
    """`PER_CLIENT` samples each, class proportions from Dirichlet(.1), no sample with two clients."""
    draw = np.random.default_rng(seeds.derive(seed, "split"))
    kept = np.sort(draw.permutation(len(labels))[: count * PER_CLIENT])
    split = splits.dirichlet(labels[kept], count, draw, beta=BETA, repeat=False)
    return [kept[indices] for indices in split.clients]


def pooled(labels: NDArray[np.int64], count: int, seed: int) -> list[NDArray[np.int64]]:
    """One client with the same samples."""
    assert count == 1
    return [np.concatenate(clients(labels, CLIENTS, seed))]
