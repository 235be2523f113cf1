"""FedLESAM's estimate against what it estimates: the direction of the global gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.checks import check_count
from fedlesam.core.messages import Memory
from fedlesam.engines.base import is_client_error, reason
from fedlesam.federation import Federation
from fedlesam.probes.base import Look, Probe, Values, every_or
from fedlesam.probes.loss import GlobalLoss
from fedlesam.probes.replay import check_memories, named


def cosine(one: Tensor, other: Tensor) -> float:
    """NaN if one of them is 0."""
    x, y = one.double(), other.double()
    return float(x @ y / (x.norm() * y.norm()))


def constant_perturbations(
    federation: Federation, active: Sequence[int], dropped: dict[int, str] | None = None
) -> dict[int, Tensor]:
    """What each of these clients will add to its weights in the coming round, where that is fixed for the round.

    Who fails at it is left out where the round would do so; `dropped` is told why.
    """
    rule, state = federation.algorithm.perturbation, federation.state
    if rule.gradient != "unused":
        return {}
    found, device = {}, state.weights.device
    with seeds.preserve_rng(device):
        for client in active:
            seeds.reseed_torch(seeds.derive(federation.seed, "step", state.round, client), device)
            memory = federation.memories.get(client, Memory()).perturbation
            try:
                found[client] = rule.round_perturbation(
                    state.weights, rule.begin(state.weights, memory), state.perturbation
                )
            except Exception as error:
                if not federation.failures.drops or not is_client_error(error):
                    raise
                (dropped if dropped is not None else {})[client] = reason(error)
    return {client: e for client, e in found.items() if e is not None and e.norm() > 0}


@dataclass(frozen=True)
class Estimate(Probe):
    """Cosine between the last global progress taken back and the global gradient, at the anchor of the round."""

    name: ClassVar[str] = "estimate"
    at_end: ClassVar[bool] = False

    samples: int = 1000
    """About so many training samples, as many of each client; 0 takes all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.name, "samples", self.samples, at_least=0)

    @property
    def reads_previous(self) -> bool:
        return True

    def check(self, federation: Federation) -> None:
        if federation.algorithm.perturbation.gradient == "unused":
            check_memories("estimate", federation)

    def measure(self, look: Look) -> tuple[Values, dict[str, Any]]:
        federation, w = look.federation, look.federation.state.weights
        loss = GlobalLoss.of(federation, every_or(self.samples))
        g = loss.finite_gradient(w)[1]
        values: Values = {"gradient_norm": float(g.norm())}
        if look.previous is not None:
            values["cosine_previous"] = cosine(look.previous - w, g)
            values["step_norm"] = float((look.previous - w).norm())
        dropped: dict[int, str] = {}
        cosines = [cosine(e, g) for e in constant_perturbations(federation, look.active, dropped).values()]
        look.missing.extend(named(dropped))
        if cosines:
            values |= {"cosine": fmean(cosines), "cosine_min": min(cosines), "cosine_max": max(cosines)}
        return {**values, "clients": len(cosines)}, {"samples": loss.samples}
