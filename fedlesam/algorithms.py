"""The catalogue: a method is one line, where to look x how to turn x how to land."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedlesam.core.checks import check_number
from fedlesam.rules.controls import RandomRoundAscent, RandomStepAscent, ReleasedAscent
from fedlesam.rules.correction import (
    ClientMomentum,
    ControlVariates,
    Correction,
    DynamicRegulariser,
    NoCorrection,
    Proximal,
)
from fedlesam.rules.perturbation import (
    CorrectedAscent,
    GlobalAscent,
    LocalAscent,
    NoPerturbation,
    Perturbation,
    PreviousStepAscent,
)
from fedlesam.rules.server import Adam, Average, Dynamic, ServerRule

Reference = Literal["received", "previous-round"]
Direction = Literal["back", "ahead"]

SLOW_DECAY = 0.9995
"""The paper's learning-rate decay per round for methods with the dynamic regulariser; .998 for the others."""


@dataclass(frozen=True)
class Algorithm:
    """A federated method. Any perturbation works with any correction and any server rule."""

    perturbation: Perturbation = NoPerturbation()
    correction: Correction = NoCorrection()
    server: ServerRule = Average()
    lr_decay: float = 0.998

    def __post_init__(self) -> None:
        for slot, kind in (("perturbation", Perturbation), ("correction", Correction), ("server", ServerRule)):
            rule = getattr(self, slot)
            if not isinstance(rule, kind):
                raise ValueError(f"Algorithm: {slot} must be a {kind.__name__}, got {rule!r}")
        self.perturbation.check()
        check_number("Algorithm", "lr_decay", self.lr_decay, above=0)

    def shaped(self, sizes: Sequence[int]) -> "Algorithm":
        """This method for a model whose tensors have so many entries."""
        return replace(self, perturbation=self.perturbation.shaped(sizes))

    @property
    def plain_mean_rules(self) -> list[str]:
        """The rules that forbid weighting clients by their examples."""
        return [type(r).__name__ for r in (self.perturbation, self.correction, self.server) if r.plain_mean]


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

CONTROLS = (fedlesam_released, fedlesam_released_s, fedlesam_released_d, random_round, random_step)
"""What FedLESAM has to be compared with: the perturbation its authors released, and directions that know nothing."""

CATALOGUE: dict[str, Callable[..., Algorithm]] = {
    make.__name__.replace("_", "-"): make for make in (*PAPER, *OTHERS, *CONTROLS)
}
