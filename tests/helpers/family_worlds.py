"""What the family's oracle and the package are both given."""

import functools
from typing import Any

import torch
from agreement import SETTINGS
from family_loop import FedAvg, Places
from family_oracle import METHODS, World
from torch import Tensor, nn
from worlds import SCHEDULE, epochs, mlp, samples

from fedlesam.core.batches import batch_indices
from fedlesam.core.seeds import derive, generator

SEED = 7

HYPER: dict[str, dict[str, Any]] = {
    "fedspeed": {"rho": 0.15, "lam": 0.2, "alpha": 0.7},
    "fedspeed-released": {"rho": 0.15, "lam": 0.2},
    "fedasam": {"rho": 0.3, "eta": 0.4},
    "fedgf": {"rho": 0.15, "rho_g": 0.25, "window": 3, "threshold": 0.2},
    "fedgloss": {"rho": 0.15, "rho_s": 0.25, "lam": 0.2, "warmup": 0},
    "fednsam": {"rho": 0.15, "gamma": 0.6},
    "fednsam-released": {"rho": 0.15, "gamma": 0.6},
    "fedsmoo-released": {"rho": 0.15, "lam": 0.2},
    "fedswa": {"floor": 0.3, "lr_g": 1.2},
    "fedmoswa": {"floor": 0.3, "gamma": 0.4, "lr_g": 1.2},
    "fedgmt": {"beta": 0.6, "strength": 0.8, "tau": 2.0, "lam": 0.2},
    "fedsol": {"rho": 0.7, "adaptive": True},
    "fedwmsam": {"rho": 0.15, "alpha": 0.8},
    "dp-fedsam": {"rho": 0.15, "clip": 0.2, "noise": 0.0},
    "msam": {"rho": 0.15, "beta": 0.7},
    "fedavgm": {"lr_g": 0.8},
    "fedyogi": {"lr_g": 0.05},
    "fedadagrad": {"lr_g": 0.05},
}
"""Values that differ from the defaults, and with which every term shows."""


def batches(t: int, i: int, sizes: tuple[int, ...], join_last: bool = False) -> list[Places]:
    draw = generator(SEED, "batches", t, i)
    return list(batch_indices(sizes[i], SETTINGS["batch_size"], epochs(t, i), join_last, draw))


def world(model: nn.Module | None = None, join_last: bool = False, **settings: Any) -> World:
    clients = samples()
    sizes = tuple(len(x) for x, _ in clients)
    given = {key: SETTINGS[key] for key in ("lr", "lr_decay", "weight_decay", "clip")}
    return World(
        mlp() if model is None else model,
        clients,
        lambda t, i: batches(t, i, sizes, join_last),
        lambda t, i, k: derive(SEED, "step", t, i) + 1 + k,
        **{**given, **settings},
    )


def oracle(method: str, wrong: str = "", model: nn.Module | None = None, **change: Any) -> FedAvg:
    """Settings of the world are recognised by their names; the others are the method's."""
    of_world = {key: change.pop(key) for key in ("clip_scope", "momentum", "join_last") if key in change}
    return METHODS[method](world(model, **of_world), wrong, **{**HYPER[method], **change})


def ends(method: str, wrong: str = "", **change: Any) -> tuple[Tensor, ...]:
    """The global models after each of the eight rounds."""
    usual = {**HYPER[method], "clip_scope": "loss", "momentum": 0.0}
    return _ends(method, wrong, **{key: value for key, value in change.items() if usual.get(key, ...) != value})


@functools.cache
def _ends(method: str, wrong: str, **change: Any) -> tuple[Tensor, ...]:
    with torch.random.fork_rng(devices=[]):
        return tuple(oracle(method, wrong, **change).play(SCHEDULE))
