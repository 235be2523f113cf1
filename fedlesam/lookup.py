"""A method by the name a user types."""

import inspect
from collections.abc import Callable
from typing import Any

from fedlesam.algorithms import CATALOGUE, Algorithm
from fedlesam.core.names import imported, unknown


def find(name: str) -> Callable[..., Algorithm]:
    """The maker behind a name of the catalogue or `module:callable`."""
    if ":" in name:
        found = imported("algorithm", name)
        if not callable(found) and not isinstance(found, Algorithm):
            raise ValueError(f"algorithm {name!r} must be an Algorithm or make one, got {found!r}")
        return (lambda: found) if isinstance(found, Algorithm) else found
    if name not in CATALOGUE:
        raise unknown("algorithm", name, CATALOGUE)
    return CATALOGUE[name]


def hyperparameters(name: str) -> dict[str, object]:
    """What the method takes, with its defaults."""
    takes = inspect.signature(find(name)).parameters.items()
    return {key: p.default for key, p in takes if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def get(name: str, **hyper: Any) -> Algorithm:
    """The method called `name`, e.g. `get("fedlesam-s", rho=0.05)`."""
    takes = hyperparameters(name)
    for key in hyper:
        if key not in takes:
            raise ValueError(f"{name} has no {key}; it takes {', '.join(takes) or 'no hyper-parameters'}")
    missing = [key for key, default in takes.items() if default is inspect.Parameter.empty and key not in hyper]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}: give it with --set {missing[0]}=VALUE")
    algorithm = find(name)(**hyper)
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"algorithm {name!r} must make an Algorithm, got {algorithm!r}")
    return algorithm
