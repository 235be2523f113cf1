"""The catalogue: a method is one line, where to look x how to turn x how to land."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

from fedlesam.core.names import imported, unknown
from fedlesam.core.privacy import Privacy
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
    DualBias,
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
    ProximalAscent,
    RampedAscent,
    TaughtDescent,
    TrajectoryAscent,
)
from fedlesam.rules.server import Adagrad, Adam, DualMean, Dynamic, Nesterov, ServerMomentum, ShiftedDynamic, Yogi

Reference = Literal["received", "previous-round"]
Direction = Literal["back", "ahead"]

SLOW_DECAY = 0.9995
"""The paper's learning-rate decay per round for methods with the dynamic regulariser; .998 for the others."""


def fedavg(lr_g: float = 1.0) -> Algorithm:
    """McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017."""
    return Algorithm(server=Average(lr_g))


def fedadam(lr_g: float = 0.1, b1: float = 0.9, b2: float = 0.99, eps: float = 0.01) -> Algorithm:
    """Reddi et al., Adaptive Federated Optimization, ICLR 2021."""
    return Algorithm(server=Adam(lr_g, b1, b2, eps))


def fedprox(prox: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020."""
    return Algorithm(correction=Proximal(prox), server=Average(lr_g))


def scaffold(lr_g: float = 1.0) -> Algorithm:
    """Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020."""
    return Algorithm(correction=ControlVariates(), server=Average(lr_g))


def fedcm(alpha: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021."""
    return Algorithm(correction=ClientMomentum(alpha), server=Average(lr_g))


def feddyn(lam: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021."""
    return Algorithm(NoPerturbation(), DynamicRegulariser(lam), Dynamic(lr_g), SLOW_DECAY)


def fedsam(rho: float = 0.01, lr_g: float = 1.0) -> Algorithm:
    """Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022."""
    return Algorithm(LocalAscent(rho), server=Average(lr_g))


def mofedsam(rho: float = 0.1, alpha: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """Qu et al., ICML 2022: FedSAM with FedCM's momentum."""
    return Algorithm(LocalAscent(rho), ClientMomentum(alpha), Average(lr_g))


def fedgamma(rho: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """Dai et al., FedGAMMA: Federated Learning with Global Sharpness-Aware Minimization, 2023: SAM with SCAFFOLD."""
    return Algorithm(LocalAscent(rho), ControlVariates(), Average(lr_g))


def fedsmoo(rho: float = 0.1, lam: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """Sun et al., Dynamic Regularized Sharpness Aware Minimization in Federated Learning, ICML 2023."""
    return Algorithm(CorrectedAscent(rho), DynamicRegulariser(lam), Dynamic(lr_g), SLOW_DECAY)


def fedlesam(
    rho: float = 0.01, lr_g: float = 1.0, reference: Reference = "received", direction: Direction = "back"
) -> Algorithm:
    """Fan et al., Locally Estimated Global Perturbations are Better than Local Perturbations, ICML 2024."""
    return Algorithm(GlobalAscent(rho, reference=reference, direction=direction), server=Average(lr_g))


def fedlesam_s(
    rho: float = 0.1, lr_g: float = 1.0, reference: Reference = "received", direction: Direction = "back"
) -> Algorithm:
    """Fan et al., ICML 2024: FedLESAM with SCAFFOLD."""
    ascent = GlobalAscent(rho, reference=reference, direction=direction)
    return Algorithm(ascent, ControlVariates(), Average(lr_g))


def fedlesam_d(
    rho: float = 0.1,
    lam: float = 0.1,
    lr_g: float = 1.0,
    reference: Reference = "received",
    direction: Direction = "back",
) -> Algorithm:
    """Fan et al., ICML 2024: FedLESAM with FedDyn."""
    ascent = GlobalAscent(rho, reference=reference, direction=direction)
    return Algorithm(ascent, DynamicRegulariser(lam), Dynamic(lr_g), SLOW_DECAY)


def fedlesam_m(rho: float = 0.1, alpha: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """FedLESAM's perturbation with FedCM's momentum; in no paper."""
    return Algorithm(GlobalAscent(rho), ClientMomentum(alpha), Average(lr_g))


def freesam(rho: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """Ji et al. (S2-SAM), NeurIPS 2024, inside a federated round: SAM along the previous step's gradient."""
    return Algorithm(PreviousStepAscent(rho), server=Average(lr_g))


def freesam_s(rho: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """Ji et al. (S2-SAM), NeurIPS 2024, inside a federated round, with SCAFFOLD."""
    return Algorithm(PreviousStepAscent(rho), ControlVariates(), Average(lr_g))


def freesam_d(rho: float = 0.1, lam: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """Ji et al. (S2-SAM), NeurIPS 2024, inside a federated round, with FedDyn."""
    return Algorithm(PreviousStepAscent(rho), DynamicRegulariser(lam), Dynamic(lr_g), SLOW_DECAY)


def fedavgm(lr_g: float = 1.0, beta: float = 0.9) -> Algorithm:
    """Hsu et al., Measuring the Effects of Non-Identical Data Distribution, arXiv 1909.06335, 2019."""
    return Algorithm(server=ServerMomentum(lr_g, beta))


def fedyogi(lr_g: float = 0.1, b1: float = 0.9, b2: float = 0.99, eps: float = 0.01) -> Algorithm:
    """Reddi et al., Adaptive Federated Optimization, ICLR 2021."""
    return Algorithm(server=Yogi(lr_g, b1, b2, eps))


def fedadagrad(lr_g: float = 0.1, eps: float = 0.01) -> Algorithm:
    """Reddi et al., Adaptive Federated Optimization, ICLR 2021."""
    return Algorithm(server=Adagrad(lr_g, eps))


def msam(rho: float = 0.1, beta: float = 0.9) -> Algorithm:
    """Becker et al., Momentum-SAM, arXiv 2401.12033, inside a federated round."""
    return Algorithm(MomentumAscent(rho, beta))


def fedspeed(rho: float = 0.1, lam: float = 0.1, alpha: float = 1.0) -> Algorithm:
    """Sun et al., FedSpeed, ICLR 2023, arXiv 2302.10429."""
    return Algorithm(MixedAscent(rho, alpha), SentDual(lam), DualMean(), SLOW_DECAY)


def fedasam(rho: float = 0.7, eta: float = 0.2) -> Algorithm:
    """Caldarola et al., Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022."""
    return Algorithm(AdaptiveAscent(rho, eta))


def fedgf(rho: float = 0.05, rho_g: float = 0.05, window: int = 30, *, threshold: float) -> Algorithm:
    """Lee and Yoon, Rethinking the Flat Minima Searching in Federated Learning, ICML 2024."""
    return Algorithm(InterpolatedAscent(rho, rho_g, window, threshold))


def fedgloss(rho: float = 0.15, rho_s: float = 0.15, lam: float = 0.1, warmup: int = 0) -> Algorithm:
    """Caldarola et al., Beyond Local Sharpness, CVPR 2025, arXiv 2412.03752."""
    ascent = RampedAscent(rho, warmup) if rho else NoPerturbation()
    return Algorithm(ascent, DynamicRegulariser(lam), ShiftedDynamic(rho_s=rho_s, warmup=warmup), SLOW_DECAY)


def fednsam(rho: float = 0.05, gamma: float = 0.85) -> Algorithm:
    """Liu et al., FedNSAM: Consistency of Local and Global Flatness for Federated Learning, arXiv 2602.23827."""
    return Algorithm(LocalAscent(rho), server=Nesterov(gamma))


def fedswa(floor: float = 0.1, lr_g: float = 1.5) -> Algorithm:
    """Liu et al., Momentum-Based Stochastic Controlled Weight Averaging, ICML 2025, arXiv 2507.20016."""
    return Algorithm(server=Average(lr_g), lr_floor=floor)


def fedmoswa(floor: float = 0.1, gamma: float = 0.2, lr_g: float = 1.5) -> Algorithm:
    """Liu et al., ICML 2025, arXiv 2507.20016: FedSWA with momentum-based control variates."""
    return Algorithm(correction=MomentumVariates(gamma), server=Average(lr_g), lr_floor=floor)


def fedgmt(beta: float = 0.95, strength: float = 1.0, tau: float = 3.0, lam: float = 0.1) -> Algorithm:
    """Li et al., FedGMT, ICML 2025: the average of past models teaches; FedDyn's dual variables without its pull."""
    return Algorithm(TaughtDescent(beta, strength, tau), DualBias(lam), Dynamic(), SLOW_DECAY)


def fedsol(rho: float = 1.0, adaptive: bool = True) -> Algorithm:
    """Lee et al., FedSOL, CVPR 2024: ascend the distance to the global model's predictions, descend the loss there."""
    return Algorithm(ProximalAscent(rho, adaptive))


def dp_fedsam(rho: float = 0.1, clip: float = 0.2, noise: float = 0.95, delta: float = 0.0) -> Algorithm:
    """Shi et al., Make Landscape Flatter in Differentially Private Federated Learning, CVPR 2023, arXiv 2303.11242."""
    return Algorithm(LocalAscent(rho), privacy=Privacy(clip, noise, delta))


def fedwmsam(rho: float = 0.01, alpha: float = 0.1) -> Algorithm:
    """Li et al., A Fast and Flat Federated Learning Method via Weighted Momentum and SAM, NeurIPS 2025."""
    return Algorithm(TrajectoryAscent(rho), WeightedMomentum(alpha))


def fedlesam_released(rho: float = 0.01, lr_g: float = 1.0) -> Algorithm:
    """A control: the perturbation that FedLESAM's authors released, which is not their paper's."""
    return Algorithm(ReleasedAscent(rho), server=Average(lr_g))


def fedlesam_released_s(rho: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """A control: the released FedLESAM-S, whose correction is damped to a tenth."""
    return Algorithm(ReleasedAscent(rho), ControlVariates(scale=0.1), Average(lr_g))


def fedlesam_released_d(rho: float = 0.1, lam: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """A control: the released FedLESAM-D."""
    return Algorithm(ReleasedAscent(rho), DynamicRegulariser(lam), Dynamic(lr_g), SLOW_DECAY)


def random_round(rho: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """A placebo: one random direction for each client and round."""
    return Algorithm(RandomRoundAscent(rho), server=Average(lr_g))


def random_step(rho: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """A placebo: a random direction at every step."""
    return Algorithm(RandomStepAscent(rho), server=Average(lr_g))


def shuffled_s(rho: float = 0.1, lr_g: float = 1.0, pool: int = 10) -> Algorithm:
    """A placebo: SCAFFOLD with the difference of two earlier global models, drawn at random."""
    return Algorithm(ShuffledAscent(rho, pool), ControlVariates(), Average(lr_g))


def scaffold_damped(scale: float = 0.1, lr_g: float = 1.0) -> Algorithm:
    """A control: SCAFFOLD with c - c_i scaled to a tenth."""
    return Algorithm(correction=ControlVariates(scale), server=Average(lr_g))


def fedspeed_released(rho: float = 0.1, lam: float = 0.1) -> Algorithm:
    """A control: FedSpeed as FL-Simulator computes it, with FedDyn's server."""
    return Algorithm(LocalAscent(rho), DynamicRegulariser(lam), Dynamic(), SLOW_DECAY)


def fedsmoo_released(rho: float = 0.1, lam: float = 0.1) -> Algorithm:
    """A control: FedSMOO as FL-Simulator computed it until October 2024."""
    return Algorithm(ReleasedCorrectedAscent(rho), DynamicRegulariser(lam), Dynamic(), SLOW_DECAY)


def fednsam_released(rho: float = 0.05, gamma: float = 0.85) -> Algorithm:
    """A control: FedNSAM as its released code computes it, which loses the momentum."""
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
    fedgmt,
    fedsol,
    fedwmsam,
    dp_fedsam,
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
    """The maker behind a name of the catalogue or `module:callable`.

    Args:
        name: As typed.
    """
    if ":" in name:
        found = imported("algorithm", name)
        if not callable(found) and not isinstance(found, Algorithm):
            raise ValueError(f"algorithm {name!r} must be an Algorithm or make one, got {found!r}")
        return (lambda: found) if isinstance(found, Algorithm) else found
    if name not in CATALOGUE:
        raise unknown("algorithm", name, CATALOGUE)
    return CATALOGUE[name]


def hyperparameters(name: str) -> dict[str, object]:
    """What the method called `name` takes, with its defaults; `fedlesam explain` prints what they mean.

    Args:
        name: Of the catalogue, or `module:callable`.
    """
    takes = inspect.signature(find(name)).parameters.items()
    return {key: p.default for key, p in takes if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


EXAMPLES: dict[str, Any] = {"threshold": 0.1}
"""Values to show a method with, for hyper-parameters that have no default."""


def examples(name: str) -> dict[str, Any]:
    """Those of `EXAMPLES` that the method has no default for.

    Args:
        name: Of the catalogue, or `module:callable`.
    """
    needed = {key for key, default in hyperparameters(name).items() if default is inspect.Parameter.empty}
    return {key: value for key, value in EXAMPLES.items() if key in needed}


def example(name: str) -> Algorithm:
    """The method called `name` with its defaults, and with `EXAMPLES` where it has none.

    Args:
        name: Of the catalogue, or `module:callable`.
    """
    return get(name, **examples(name))


def get(name: str, **hyper: Any) -> Algorithm:
    """The method called `name`, e.g. `get("fedlesam-s", rho=0.05)`.

    Args:
        name: Of the catalogue, or `module:callable`.
        hyper: Hyper-parameters that differ from their defaults.
    """
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
