"""Perturbation drift: how far the clients' perturbations point away from the global one."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import torch

from fedlesam.algorithms import Algorithm
from fedlesam.federation import Federation
from fedlesam.probes.base import Look, SampledProbe, Tick, Values
from fedlesam.probes.loss import GlobalLoss
from fedlesam.probes.replay import answering, check_memories, heard, lockstep, named
from fedlesam.rules import LocalAscent, NoPerturbation


@dataclass(frozen=True)
class Drift:
    """The drift of one round: means over the client-steps with a perturbation, None if there is none.

    Args:
        drift: Mean of norm(u_g - u_i) / 2 for unit directions u: 0 is the global direction, 1 its opposite.
        cosine: Of u_g and u_i.
        norm: Of the perturbations: rho, unless a rule scales it.
        gradient_norm: Of the global gradient at the virtual global model, mean over steps.
        full_drift: SAM's drift with the gradient of all samples of a client instead of a batch: no batch noise.
        full_cosine: The cosine for `full_drift`.
        counted: Client-steps with a perturbation.
        without: Client-steps without one.
        clients_without: Clients without one in the whole round, such as FedLESAM's that were never active before.
    """

    drift: float | None = None
    cosine: float | None = None
    norm: float | None = None
    gradient_norm: float | None = None
    full_drift: float | None = None
    full_cosine: float | None = None
    counted: int = 0
    without: int = 0
    clients_without: int = 0


def perturbs(algorithm: Algorithm) -> bool:
    """Whether a method has a perturbation.

    Args:
        algorithm: The method.
    """
    return not isinstance(algorithm.perturbation, NoPerturbation)


def check_perturbs(algorithm: Algorithm) -> None:
    """A ValueError if a method has no perturbation.

    Args:
        algorithm: The method.
    """
    if not perturbs(algorithm):
        raise ValueError(
            f"drift: {algorithm!r} has no perturbation, so nothing can drift; "
            "remove the probe, or choose a method that perturbs, such as fedsam or fedlesam"
        )


def drift_of(
    federation: Federation,
    loss: GlobalLoss,
    active: Sequence[int] | None = None,
    full: GlobalLoss | None = None,
    tick: Tick = lambda done, of: None,
    dropped: dict[int, str] | None = None,
) -> Drift:
    """The drift of the coming round, simulated with its active clients in lockstep; the federation does not change.

    u_g is the direction of the gradient of `loss` at the virtual global model w + mean of (v_i - w): one gradient of
    all its samples for every local step.

    Args:
        federation: Between two rounds.
        loss: For the global gradient.
        active: The clients; by default those of the coming round that dropout does not silence.
        full: For SAM's full client gradients, if they are wanted.
        tick: Called after every step.
        dropped: Filled with the clients that will fail and the reason, if the federation drops them.
    """
    check_perturbs(federation.algorithm)
    check_memories("drift", federation)
    chosen, failing = answering(federation, heard(federation) if active is None else active)
    if dropped is not None:
        dropped |= failing
    ascends_alone = isinstance(federation.algorithm.perturbation, LocalAscent)
    found: dict[str, list[float]] = defaultdict(list)
    without, perturbed = 0, set()
    for step, places in enumerate(lockstep(federation, chosen), 1):
        virtual = torch.stack([place.v for place in places]).mean(0)
        g = loss.finite_gradient(virtual)[1]
        found["gradient_norm"].append(float(g.norm()))
        for place in places:
            if place.e is None or not place.e.norm() > 0 or not g.norm() > 0:
                without += place.moving
                continue
            perturbed.add(place.client)
            found["norm"].append(float(place.e.norm()))
            own = full.only(place.client).gradient(place.v)[1] if full is not None and ascends_alone else None
            for which, e in (("", place.e), ("full_", own)):
                if e is not None and e.norm() > 0:
                    u, v = (x.double() / x.double().norm() for x in (g, e))
                    found[f"{which}drift"].append(float((u - v).norm()) / 2)
                    found[f"{which}cosine"].append(float(u @ v))
        tick(step, step)
    means = {name: fmean(values) for name, values in found.items()}
    return Drift(**means, counted=len(found["norm"]), without=without, clients_without=len(set(chosen) - perturbed))


@dataclass(frozen=True)
class DriftProbe(SampledProbe):
    """Perturbation drift of the coming round, in [0, 1].

    Args:
        every: Rounds between two measurements.
        samples: Training samples for the global gradient; 0 takes all, which costs a pass over them per local step.
        full: For SAM also with full client gradients.
    """

    name: ClassVar[str] = "drift"
    at_end: ClassVar[bool] = False

    full: bool = True

    def check(self, federation: Federation) -> None:
        check_perturbs(federation.algorithm)
        check_memories("drift", federation)

    def measure(self, look: Look) -> tuple[Values, dict[str, Any]]:
        loss = self.loss(look.federation)
        full = GlobalLoss.of(look.federation) if self.full else None
        dropped: dict[int, str] = {}
        found = drift_of(look.federation, loss, None, full, look.tick, dropped)
        look.missing.extend(named(dropped))
        return {name: value for name, value in vars(found).items() if value is not None}, {"samples": loss.samples}
