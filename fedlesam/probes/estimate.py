"""FedLESAM's estimate against what it estimates: the direction of the global gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.messages import Memory
from fedlesam.engines.base import is_client_error, reason
from fedlesam.federation import Federation
from fedlesam.probes.base import Look, SampledProbe, Values
from fedlesam.probes.replay import check_memories, heard, named


def cosine(one: Tensor, other: Tensor) -> float:
    """The cosine of the angle between two vectors; NaN if one of them is 0.

    Args:
        one: A flat vector.
        other: Another one.
    """
    x, y = one.double(), other.double()
    return float(x @ y / (x.norm() * y.norm()))


def constant_perturbations(
    federation: Federation, active: Sequence[int], dropped: dict[int, str] | None = None
) -> dict[int, Tensor]:
    """The perturbations of clients in the coming round, for rules whose perturbation is constant in a round.

    Args:
        federation: Between two rounds.
        active: The clients.
        dropped: Filled with the clients that fail and the reason, if the federation drops them; else they raise.

    Returns:
        Perturbations by client, without those that are 0.
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
                began = rule.begin(state.weights, memory)
                found[client] = rule.round_perturbation(state.weights, began, state.perturbation)
            except Exception as error:
                if not federation.failures.drops or not is_client_error(error):
                    raise
                (dropped if dropped is not None else {})[client] = reason(error)
    return {client: e for client, e in found.items() if e is not None and e.norm() > 0}


@dataclass(frozen=True)
class Estimate(SampledProbe):
    """The cosine of FedLESAM's estimate and the global gradient, at the model that the round begins with.

    Args:
        every: Rounds between two measurements.
        samples: About how many training samples to use, the same number of each client; 0 takes all.
    """

    name: ClassVar[str] = "estimate"
    at_end: ClassVar[bool] = False
    reads_previous: ClassVar[bool] = True

    def check(self, federation: Federation) -> None:
        if federation.algorithm.perturbation.gradient == "unused":
            check_memories("estimate", federation)

    def measure(self, look: Look) -> tuple[Values, dict[str, Any]]:
        federation, w = look.federation, look.federation.state.weights
        loss = self.loss(federation)
        g = loss.finite_gradient(w)[1]
        values: Values = {"gradient_norm": float(g.norm())}
        if look.previous is not None:
            values["cosine_previous"] = cosine(look.previous - w, g)
            values["step_norm"] = float((look.previous - w).norm())
        dropped: dict[int, str] = {}
        cosines = [cosine(e, g) for e in constant_perturbations(federation, heard(federation), dropped).values()]
        look.missing.extend(named(dropped))
        if cosines:
            values |= {"cosine": fmean(cosines), "cosine_min": min(cosines), "cosine_max": max(cosines)}
        return {**values, "clients": len(cosines)}, {"samples": loss.samples}
