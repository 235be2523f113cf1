"""Randomness derives from where it is used."""

import itertools
import random

import numpy as np
import pytest
import torch

from fedlesam.core import seeds

CPU = torch.device("cpu")
FROZEN = (2918264622725855778, 2257468866853008578)


def test_every_place_has_its_own_seed() -> None:
    places = itertools.product(range(3), seeds.PURPOSES, range(5), range(5))
    derived = [seeds.derive(seed, purpose, round, client) for seed, purpose, round, client in places]
    assert len(set(derived)) == len(derived) == 3 * len(seeds.PURPOSES) * 25
    assert all(0 <= s < 2**63 for s in derived)


def test_seeds_stay_what_they_are() -> None:
    """Runs of an older version must be repeatable: these numbers may never change."""
    assert seeds.derive(0, "participation", 0) == FROZEN[0]
    assert seeds.derive(7, "batches", 3, 11) == FROZEN[1]


@pytest.mark.parametrize("largest", [99, 2**32 - 1, 2**32, 2**63 + 5])
def test_the_seeds_of_many_places_are_those_of_each(largest: int) -> None:
    """Of several runs; few places, and numbers of more than 32 bits, are derived one by one."""
    places = [(seed, round, client) for seed in (0, 7) for round in (0, largest) for client in range(8)]
    for some in (places, [*places, (largest, 3, 5)], [*places, (1, 2, largest)], places[:3], []):
        one_by_one = [seeds.derive(seed, "batches", round, client) for seed, round, client in some]
        assert seeds.derive_each("batches", some) == one_by_one


def test_global_generators_are_given_back_after_an_error() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    with pytest.raises(RuntimeError), seeds.preserve_rng(CPU):
        seeds.reseed_everything(5, CPU)
        one = random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002
        seeds.reseed_everything(5, CPU)
        assert one == (random.random(), np.random.rand(), float(torch.rand(())))  # noqa: NPY002
        raise RuntimeError
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
