"""What holds for any shape, participation, client size, batch size and hyper-parameter."""

from dataclasses import dataclass, field
from typing import Any

import family_oracle
import torch
from family_loop import FedAvg
from family_oracle import METHODS
from family_worlds import HYPER
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import CONTROL_VARIATES, DYNAMIC, GLOBAL_ASCENT, Oracle
from torch import Tensor
from worlds import assert_same_bits, federation, mlp, play, samples, states

from fedlesam import algorithms
from fedlesam.algorithms import CATALOGUE
from fedlesam.core.batches import batch_indices
from fedlesam.core.local import LocalTraining
from fedlesam.core.seeds import generator
from fedlesam.federation import Federation


@dataclass(frozen=True)
class World:
    widths: tuple[int, ...]
    sizes: tuple[int, ...]
    schedule: tuple[tuple[int, ...], ...]
    epochs: tuple[int, ...]
    settings: dict[str, Any]
    hyper: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def epochs_of(self, round: int, client: int) -> int:
        return self.epochs[(round + client) % len(self.epochs)]

    def algorithm(self, method: str) -> dict[str, Any]:
        takes = HYPER.get(method, algorithms.hyperparameters(method))
        chosen = {key: value for key, value in self.hyper.items() if key in takes}
        return HYPER.get(method, {}) | chosen

    def federation(self, method: str, shuffled: bool = False) -> Federation:
        fed = federation(
            algorithms.get(method, **self.algorithm(method)),
            model=mlp(self.widths, seed=self.seed),
            clients=samples(self.sizes, self.widths[0], self.widths[-1], seed=self.seed),
            seed=self.seed,
            local=LocalTraining(epochs=self.epochs_of, **self.settings),
        )
        return play(fed, [active[::-1] if shuffled else active for active in self.schedule])

    def oracle(self, method: str) -> Oracle:
        oracle = Oracle(
            method,
            mlp(self.widths, seed=self.seed),
            samples(self.sizes, self.widths[0], self.widths[-1], seed=self.seed),
            self.epochs_of,
            seed=self.seed,
            lr_g=0.1 if method == "fedadam" else 1.0,
            **{**self.settings, **self.algorithm(method)},
        )
        for active in self.schedule:
            oracle.round(active)
        return oracle

    def family(self, method: str) -> FedAvg:
        settings = {**self.settings}
        batch_size = settings.pop("batch_size")

        def batches(t: int, i: int) -> list[Tensor | slice]:
            draw = generator(self.seed, "batches", t, i)
            return list(batch_indices(self.sizes[i], batch_size, self.epochs_of(t, i), False, draw))

        clients = samples(self.sizes, self.widths[0], self.widths[-1], seed=self.seed)
        given = family_oracle.World(mlp(self.widths, seed=self.seed), clients, batches, lambda t, i, k: 0, **settings)
        oracle = METHODS[method](given, **self.algorithm(method))
        oracle.play(self.schedule)
        return oracle


def between(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_subnormal=False)


HYPERPARAMETERS: dict[str, st.SearchStrategy[Any]] = {
    "rho": between(0.0, 0.3),
    "alpha": between(0.05, 0.95),
    "lam": between(0.0, 0.5),
    "prox": between(0.0, 0.5),
    "eta": between(0.05, 1.0),
    "rho_g": between(0.0, 0.3),
    "window": st.integers(1, 4),
    "threshold": between(0.0, 0.5),
    "rho_s": between(0.0, 0.3),
    "warmup": st.integers(0, 4),
    "gamma": between(0.0, 0.95),
    "floor": between(0.0, 1.0),
    "beta": between(0.0, 0.99),
    "strength": between(0.0, 2.0),
    "tau": between(0.5, 4.0),
    "adaptive": st.booleans(),
    "clip": between(0.05, 1.0),
    "noise": st.just(0.0),
}


@st.composite
def worlds(draw: st.DrawFn) -> World:
    sizes = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)))
    numbers = st.sets(st.integers(0, len(sizes) - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    return World(
        widths=(*draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)), draw(st.integers(2, 4))),
        sizes=sizes,
        schedule=tuple(draw(st.lists(numbers, min_size=1, max_size=4))),
        epochs=tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))),
        settings={
            "lr": draw(between(0.05, 0.3)),
            "lr_decay": draw(between(0.8, 1.0)),
            "batch_size": draw(st.integers(1, 10)),
            "weight_decay": draw(st.sampled_from([0.0, 1e-3, 0.1])),
            "clip": draw(between(0.05, 3.0)),
            "clip_scope": draw(st.sampled_from(["loss", "corrected"])),
            "momentum": draw(st.sampled_from([0.0, 0.0, 0.5])),
        },
        hyper={name: draw(values) for name, values in HYPERPARAMETERS.items()},
        seed=draw(st.integers(0, 1000)),
    )


methods = st.sampled_from(list(CATALOGUE))
plain = st.sampled_from([name for name in CATALOGUE if name not in METHODS])
family = st.sampled_from([name for name in CATALOGUE if name in METHODS])


def drift(world: World) -> float:
    """How far a running sum of means may be off: sums have steps of 2^-40, so a mean is off by half of one a round."""
    return len(world.schedule) * 2.0**-41 + 1e-13


@settings(max_examples=150)
@given(plain, worlds())
def test_agrees_with_the_oracle(method: str, world: World) -> None:
    ours, truth = states(world.federation(method)), world.oracle(method).states()
    assert {name for name in truth if "client" not in name} == {name for name in ours if "client" not in name}
    assert ours.keys() == truth.keys()
    for name in truth:
        torch.testing.assert_close(ours[name], truth[name], atol=1e-10, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


@settings(max_examples=40)
@given(family, worlds())
def test_the_family_agrees_with_its_oracle(method: str, world: World) -> None:
    weights = world.federation(method).weights
    torch.testing.assert_close(weights, world.family(method).w, atol=1e-10, rtol=0)


@settings(max_examples=40)
@given(methods, worlds())
def test_order_and_repetition_do_not_matter(method: str, world: World) -> None:
    one = world.federation(method)
    assert_same_bits(states(one), states(world.federation(method, shuffled=True)))


@settings(max_examples=40)
@given(st.sampled_from(CONTROL_VARIATES), worlds())
def test_c_is_the_mean_of_all_c_i(method: str, world: World) -> None:
    """Over all N clients; one that was never active has c_i = 0."""
    fed = world.federation(method)
    total = sum(memory.correction["c"] for memory in fed.memories.values())
    torch.testing.assert_close(fed.state.correction["c"], total / len(world.sizes), atol=drift(world), rtol=0)


@settings(max_examples=40)
@given(st.sampled_from(DYNAMIC), worlds())
def test_big_h_is_the_mean_of_all_h_i(method: str, world: World) -> None:
    fed = world.federation(method)
    total = sum(memory.correction["h"] for memory in fed.memories.values())
    torch.testing.assert_close(fed.state.server["H"], total / len(world.sizes), atol=drift(world), rtol=0)


@settings(max_examples=40)
@given(methods, worlds())
def test_memory_is_kept_for_clients_that_were_active(method: str, world: World) -> None:
    fed = world.federation(method)
    assert set(fed.memories) == {client for active in world.schedule for client in active}


@settings(max_examples=40)
@given(st.sampled_from(GLOBAL_ASCENT), worlds())
def test_clients_of_one_round_share_their_old_model(method: str, world: World) -> None:
    fed = world.federation(method)
    last = {client: t for t, active in enumerate(world.schedule) for client in active}
    for one, t in last.items():
        for other, s in last.items():
            mine, theirs = (fed.memories[i].perturbation["old"] for i in (one, other))
            assert (mine is theirs) == (t == s)


@settings(max_examples=40)
@given(st.sampled_from(GLOBAL_ASCENT), worlds())
def test_fedlesam_looks_at_distance_rho(method: str, world: World) -> None:
    """Every perturbation is 0 or of norm rho over all parameters, and points away from the global progress."""
    oracle, fed = world.oracle(method), world.federation(method)
    rho = world.hyper["rho"]
    for client, memory in fed.memories.items():
        e = fed.algorithm.perturbation.round_perturbation(fed.state.weights, memory.perturbation, {})
        old = torch.cat([t.reshape(-1) for t in oracle.old_i[client].values()])
        assert e is not None
        assert abs(float(e.norm()) - rho) < 1e-13
        assert float(e @ (fed.state.weights - old)) <= 0
