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


def test_global_generators_are_given_back_after_an_error() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    with pytest.raises(RuntimeError), seeds.preserve_rng(CPU):
        seeds.reseed_everything(5, CPU)
        one = random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002
        seeds.reseed_everything(5, CPU)
        assert one == (random.random(), np.random.rand(), float(torch.rand(())))  # noqa: NPY002
        raise RuntimeError
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
