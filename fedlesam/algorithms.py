"""The catalogue: a method is one line, where to look x how to turn x how to land."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

from fedlesam.core.names import imported, unknown
from fedlesam.core.slots import Algorithm as Algorithm
from fedlesam.core.slots import Average, NoPerturbation
from fedlesam.rules.controls import RandomRoundAscent, RandomStepAscent, ReleasedAscent, ShuffledAscent
from fedlesam.rules.correction import ClientMomentum, ControlVariates, DynamicRegulariser, Proximal
from fedlesam.rules.perturbation import CorrectedAscent, GlobalAscent, LocalAscent, PreviousStepAscent
from fedlesam.rules.server import Adam, Dynamic

Reference = Literal["received", "previous-round"]
Direction = Literal["back", "ahead"]

SLOW_DECAY = 0.9995
"""The paper's learning-rate decay per round for methods with the dynamic regulariser; .998 for the others."""


def fedavg(lr_g: float = 1.0) -> Algorithm:
    return Algorithm(server=Average(lr_g))


def fedadam(lr_g: float = 0.1, b1: float = 0.9, b2: float = 0.99, eps: float = 0.01) -> Algorithm:
    return Algorithm(server=Adam(lr_g, b1, b2, eps))


def fedprox(prox: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(correction=Proximal(prox), server=Average(lr_g))


def scaffold(lr_g: float = 1.0) -> Algorithm:
    return Algorithm(correction=ControlVariates(), server=Average(lr_g))


def fedcm(alpha: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(correction=ClientMomentum(alpha), server=Average(lr_g))


def feddyn(lam: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(NoPerturbation(), DynamicRegulariser(lam), Dynamic(lr_g), SLOW_DECAY)


def fedsam(rho: float = 0.01, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(LocalAscent(rho), server=Average(lr_g))


def mofedsam(rho: float = 0.1, alpha: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(LocalAscent(rho), ClientMomentum(alpha), Average(lr_g))


def fedgamma(rho: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(LocalAscent(rho), ControlVariates(), Average(lr_g))


def fedsmoo(rho: float = 0.1, lam: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(CorrectedAscent(rho), DynamicRegulariser(lam), Dynamic(lr_g), SLOW_DECAY)


def fedlesam(
    rho: float = 0.01, lr_g: float = 1.0, reference: Reference = "received", direction: Direction = "back"
) -> Algorithm:
    return Algorithm(GlobalAscent(rho, reference=reference, direction=direction), server=Average(lr_g))


def fedlesam_s(
    rho: float = 0.1, lr_g: float = 1.0, reference: Reference = "received", direction: Direction = "back"
) -> Algorithm:
    ascent = GlobalAscent(rho, reference=reference, direction=direction)
    return Algorithm(ascent, ControlVariates(), Average(lr_g))


def fedlesam_d(
    rho: float = 0.1,
    lam: float = 0.1,
    lr_g: float = 1.0,
    reference: Reference = "received",
    direction: Direction = "back",
) -> Algorithm:
    ascent = GlobalAscent(rho, reference=reference, direction=direction)
    return Algorithm(ascent, DynamicRegulariser(lam), Dynamic(lr_g), SLOW_DECAY)


def fedlesam_m(rho: float = 0.1, alpha: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(GlobalAscent(rho), ClientMomentum(alpha), Average(lr_g))


def freesam(rho: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(PreviousStepAscent(rho), server=Average(lr_g))


def freesam_s(rho: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(PreviousStepAscent(rho), ControlVariates(), Average(lr_g))


def freesam_d(rho: float = 0.1, lam: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(PreviousStepAscent(rho), DynamicRegulariser(lam), Dynamic(lr_g), SLOW_DECAY)


def fedlesam_released(rho: float = 0.01, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(ReleasedAscent(rho), server=Average(lr_g))


def fedlesam_released_s(rho: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(ReleasedAscent(rho), ControlVariates(scale=0.1), Average(lr_g))


def fedlesam_released_d(rho: float = 0.1, lam: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(ReleasedAscent(rho), DynamicRegulariser(lam), Dynamic(lr_g), SLOW_DECAY)


def random_round(rho: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(RandomRoundAscent(rho), server=Average(lr_g))


def random_step(rho: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(RandomStepAscent(rho), server=Average(lr_g))


def shuffled_s(rho: float = 0.1, lr_g: float = 1.0, pool: int = 10) -> Algorithm:
    return Algorithm(ShuffledAscent(rho, pool), ControlVariates(), Average(lr_g))


def scaffold_damped(scale: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    return Algorithm(correction=ControlVariates(scale), server=Average(lr_g))


PAPER = (
    fedavg,
    fedadam,
    scaffold,
    fedcm,
    feddyn,
    fedsam,
    mofedsam,
    fedgamma,
    fedsmoo,
    fedlesam,
    fedlesam_s,
    fedlesam_d,
)
"""The twelve methods of the paper, in the order of its tables."""

OTHERS = (fedprox, fedlesam_m, freesam, freesam_s, freesam_d)

CONTROLS = (
    fedlesam_released,
    fedlesam_released_s,
    fedlesam_released_d,
    random_round,
    random_step,
    shuffled_s,
    scaffold_damped,
)
"""What FedLESAM has to be compared with: the perturbation its authors released, directions that know nothing, and the
weaker correction that was released with FedLESAM-S."""

CATALOGUE: dict[str, Callable[..., Algorithm]] = {
    make.__name__.replace("_", "-"): make for make in (*PAPER, *OTHERS, *CONTROLS)
}


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
