"""The catalogue: a method is one line, where to look x how to turn x how to land."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

from fedlesam.core.names import imported, unknown
from fedlesam.core.slots import Algorithm as Algorithm
from fedlesam.core.slots import Average, NoPerturbation
from fedlesam.rules.controls import (
    RandomRoundAscent,
    RandomStepAscent,
    ReleasedAscent,
    ReleasedCorrectedAscent,
    ReleasedNesterov,
    ShuffledAscent,
)
from fedlesam.rules.correction import (
    ClientMomentum,
    ControlVariates,
    DynamicRegulariser,
    MomentumVariates,
    Proximal,
    SentDual,
    WeightedMomentum,
)
from fedlesam.rules.perturbation import (
    AdaptiveAscent,
    CorrectedAscent,
    GlobalAscent,
    InterpolatedAscent,
    LocalAscent,
    MixedAscent,
    MomentumAscent,
    PreviousStepAscent,
    RampedAscent,
    TrajectoryAscent,
)
from fedlesam.rules.server import (
    Adagrad,
    Adam,
    DualMean,
    Dynamic,
    Nesterov,
    ServerMomentum,
    ShiftedDynamic,
    Yogi,
)

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


def fedavgm(lr_g: float = 1.0, beta: float = 0.9) -> Algorithm:
    return Algorithm(server=ServerMomentum(lr_g, beta))


def fedyogi(lr_g: float = 0.1, b1: float = 0.9, b2: float = 0.99, eps: float = 0.01) -> Algorithm:
    return Algorithm(server=Yogi(lr_g, b1, b2, eps))


def fedadagrad(lr_g: float = 0.1, eps: float = 0.01) -> Algorithm:
    return Algorithm(server=Adagrad(lr_g, eps))


def msam(rho: float = 0.1, beta: float = 0.9) -> Algorithm:
    return Algorithm(MomentumAscent(rho, beta))


def fedspeed(rho: float = 0.1, lam: float = 0.1, alpha: float = 1.0) -> Algorithm:
    return Algorithm(MixedAscent(rho, alpha), SentDual(lam), DualMean(), SLOW_DECAY)


def fedasam(rho: float = 0.7, eta: float = 0.2) -> Algorithm:
    return Algorithm(AdaptiveAscent(rho, eta))


def fedgf(rho: float = 0.05, rho_g: float = 0.05, window: int = 30, *, threshold: float) -> Algorithm:
    return Algorithm(InterpolatedAscent(rho, rho_g, window, threshold))


def fedgloss(rho: float = 0.15, rho_s: float = 0.15, lam: float = 0.1, warmup: int = 0) -> Algorithm:
    ascent = RampedAscent(rho, warmup) if rho else NoPerturbation()
    return Algorithm(ascent, DynamicRegulariser(lam), ShiftedDynamic(rho_s=rho_s, warmup=warmup), SLOW_DECAY)


def fednsam(rho: float = 0.05, gamma: float = 0.85) -> Algorithm:
    return Algorithm(LocalAscent(rho), server=Nesterov(gamma))


def fedswa(floor: float = 0.1, lr_g: float = 1.5) -> Algorithm:
    return Algorithm(server=Average(lr_g), lr_floor=floor)


def fedmoswa(floor: float = 0.1, gamma: float = 0.2, lr_g: float = 1.5) -> Algorithm:
    return Algorithm(correction=MomentumVariates(gamma), server=Average(lr_g), lr_floor=floor)


def fedwmsam(rho: float = 0.01, alpha: float = 0.1) -> Algorithm:
    return Algorithm(TrajectoryAscent(rho), WeightedMomentum(alpha))


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


def fedspeed_released(rho: float = 0.1, lam: float = 0.1) -> Algorithm:
    return Algorithm(LocalAscent(rho), DynamicRegulariser(lam), Dynamic(), SLOW_DECAY)


def fedsmoo_released(rho: float = 0.1, lam: float = 0.1) -> Algorithm:
    return Algorithm(ReleasedCorrectedAscent(rho), DynamicRegulariser(lam), Dynamic(), SLOW_DECAY)


def fednsam_released(rho: float = 0.05, gamma: float = 0.85) -> Algorithm:
    return Algorithm(LocalAscent(rho), server=ReleasedNesterov(gamma))


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

FAMILY = (
    fedspeed,
    fedasam,
    fedgf,
    fedgloss,
    fednsam,
    fedswa,
    fedmoswa,
    fedwmsam,
    msam,
    fedavgm,
    fedyogi,
    fedadagrad,
)
"""The federated sharpness-aware methods beyond the paper's, and the servers that they are compared with."""

CONTROLS = (
    fedlesam_released,
    fedlesam_released_s,
    fedlesam_released_d,
    random_round,
    random_step,
    shuffled_s,
    scaffold_damped,
    fedspeed_released,
    fedsmoo_released,
    fednsam_released,
)
"""What methods have to be compared with: what their authors released, directions that know nothing, and the weaker
correction that was released with FedLESAM-S."""

CATALOGUE: dict[str, Callable[..., Algorithm]] = {
    make.__name__.replace("_", "-"): make for make in (*PAPER, *OTHERS, *FAMILY, *CONTROLS)
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


EXAMPLES: dict[str, Any] = {"threshold": 0.1}
"""Values to show a method with, for hyper-parameters that have no default."""


def examples(name: str) -> dict[str, Any]:
    """Those of `EXAMPLES` that the method has no default for."""
    needed = {key for key, default in hyperparameters(name).items() if default is inspect.Parameter.empty}
    return {key: value for key, value in EXAMPLES.items() if key in needed}


def example(name: str) -> Algorithm:
    """The method called `name` with its defaults, and with `EXAMPLES` where it has none."""
    return get(name, **examples(name))


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
