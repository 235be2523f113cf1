"""Clients that stay silent: drawn from the seed, the round and the client alone."""

import dataclasses
import math

import pytest
import torch
from failing import (
    Clients,
    make,
)
from worlds import assert_same_bits, states

from fedlesam.algorithms import CATALOGUE
from fedlesam.federation import DROPOUT


def test_dropout_comes_from_the_seed_the_round_and_the_client_alone() -> None:
    fed, same = (make("fedavg", Clients(), dropout=0.4) for _ in range(2))
    other = make("fedavg", Clients(), dropout=0.4, seed=8)
    everybody = range(6)
    draws = [fed.draw_silent(t, everybody) for t in range(200)]
    assert draws == [same.draw_silent(t, everybody) for t in range(200)]
    assert draws != [other.draw_silent(t, everybody) for t in range(200)]
    for t in range(50):
        for few in ([0], [2, 5], [1, 3, 4]):
            assert fed.draw_silent(t, few) == [client for client in draws[t] if client in few]
    fed.round([0, 1])
    assert fed.draw_silent(7, everybody) == draws[7], "nor from what was trained"


def test_more_dropout_drops_the_same_clients_and_more() -> None:
    feds = [make("fedavg", Clients(), dropout=p) for p in (0.0, 0.2, 0.7, 1 - 1e-9)]
    for t in range(50):
        none, few, many, everyone = (fed.draw_silent(t, range(6)) for fed in feds)
        assert none == []
        assert set(few) <= set(many)
        assert everyone == list(range(6))


def test_the_statistics_of_dropout() -> None:
    """Each client with probability P, independent of the other clients and of the round before."""
    rounds, p = 3000, 0.3
    fed = make("fedavg", Clients(), dropout=p)
    silent = torch.zeros(rounds, 6)
    for t in range(rounds):
        silent[t, fed.draw_silent(t, range(6))] = 1
    sigma = math.sqrt(p * (1 - p) / rounds)
    assert (silent.mean(0) - p).abs().max() < 4.5 * sigma
    together = silent.T @ silent / rounds
    pairs = together[~torch.eye(6, dtype=torch.bool)]
    assert (pairs - p * p).abs().max() < 4.5 * math.sqrt(p * p * (1 - p * p) / rounds)
    again = (silent[1:] * silent[:-1]).mean(0)
    assert (again - p * p).abs().max() < 4.5 * math.sqrt(p * p * (1 - p * p) / rounds)


@pytest.mark.parametrize("method", [name for name in CATALOGUE if name != "dp-fedsam"])  # its mean is over those asked
def test_a_round_with_dropout_is_the_round_of_those_who_answer(method: str) -> None:
    fed, only = make(method, Clients(), dropout=0.7, active=4), make(method, Clients(), active=4)
    seen = set()
    for t in range(6):
        active = fed.draw_active(t)
        assert active == only.draw_active(t), "participation is drawn apart"
        silent = fed.draw_silent(t, active)
        survivors = [client for client in active if client not in silent]
        seen.add(len(survivors))
        record = fed.round()
        assert record.active == active
        assert record.dropped == (dict.fromkeys(silent, DROPOUT) or None)
        if not survivors:
            only.state = dataclasses.replace(only.state, round=t + 1)
            continue
        expected = only.round(survivors)
        names = ("train_loss", "divergence", "lr", "backward_passes", "bytes_up")
        assert [getattr(record, name) for name in names] == [getattr(expected, name) for name in names]
        assert_same_bits(states(fed), states(only))
    assert seen == {0, 1, 2}, seen
