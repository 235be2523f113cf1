"""A method by the name a user types."""

import inspect
from collections.abc import Callable
from typing import Any

from fedlesam.algorithms import CATALOGUE, Algorithm
from fedlesam.names import imported, unknown


def find(name: str) -> Callable[..., Algorithm]:
    """The maker behind a name of the catalogue or `module:callable`."""
    if ":" in name:
        found = imported("algorithm", name)
        return (lambda: found) if isinstance(found, Algorithm) else found
    if name not in CATALOGUE:
        raise unknown("algorithm", name, CATALOGUE)
    return CATALOGUE[name]


def hyperparameters(name: str) -> dict[str, object]:
    """What the method takes, with its defaults."""
    return {key: p.default for key, p in inspect.signature(find(name)).parameters.items()}


def get(name: str, **hyper: Any) -> Algorithm:
    """The method called `name`, e.g. `get("fedlesam-s", rho=0.05)`."""
    takes = hyperparameters(name)
    for key in hyper:
        if key not in takes:
            raise ValueError(f"{name} has no {key}; it takes {', '.join(takes) or 'no hyper-parameters'}")
    algorithm = find(name)(**hyper)
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"algorithm {name!r} must make an Algorithm, got {algorithm!r}")
    return algorithm
