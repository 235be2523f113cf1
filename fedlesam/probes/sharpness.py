"""How much the loss can rise within a ball around the weights."""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.batches import size_of
from fedlesam.core.checks import check_count, check_number, param
from fedlesam.federation import Federation
from fedlesam.probes.base import Look, SampledProbe, Values
from fedlesam.probes.loss import GlobalLoss
from fedlesam.probes.replay import check_memories, heard, named, trained


@dataclass(frozen=True)
class Rise:
    """A lower bound of the maximum of F(w + e) - F(w) over norm(e) <= radius.

    Args:
        loss: F(w)
        gradient_norm: Of the gradient of F at w.
        by_step: The largest rise found after 1, 2, ... steps of projected gradient ascent.
    """

    loss: float
    gradient_norm: float
    by_step: list[float]

    @property
    def first_order(self) -> float:
        """At radius * unit(gradient of F at w)."""
        return self.by_step[0]

    @property
    def ascent(self) -> float:
        """At the best point found; 0 if no loss is above that at w, NaN if the loss at w is not finite."""
        return max(0.0, *self.by_step) if math.isfinite(self.loss) else math.nan


def rise(loss: GlobalLoss, weights: Tensor, radius: float, steps: int, scale: Tensor | None = None) -> Rise:
    """How much the loss rises within a ball, by projected gradient ascent; the best point is kept.

    From e = 0, e = project(e + radius * unit(gradient at w + e)). The first step is the first-order perturbation of
    SAM, so the result is never below it. If the gradient is 0 or not finite, e goes in a fixed random direction. A loss
    that is NaN counts as infinite; if the loss at w is not finite, the result is NaN. Costs `steps` gradients and one
    evaluation.

    Args:
        loss: The loss.
        weights: The centre w, flat.
        radius: Of the ball.
        steps: Of the ascent.
        scale: |w| for the ball of e / |w|, as in ASAM (Kwon et al., ICML 2021): the result is then the same for a ReLU
            network whose weights are rescaled without changing its function.
    """
    check_number("sharpness", "radius", radius, above=0)
    check_count("sharpness", "steps", steps)
    start, g = loss.gradient(weights)
    norm = float(g.norm())
    if not math.isfinite(start):
        return Rise(start, norm, [math.nan] * steps)
    u, by_step, best = torch.zeros_like(weights), [], -torch.inf
    for step in range(1, steps + 1):
        uphill = g if scale is None else g.mul_(scale)
        length = uphill.norm()
        if not 0 < length < torch.inf:
            uphill = torch.randn(weights.shape, generator=seeds.generator(0, "probe", step)).to(weights)
            length = uphill.norm()
        u.add_(uphill, alpha=float(radius / length))
        u.mul_((radius / u.norm()).clamp(max=1.0))
        there = weights + (u if scale is None else u * scale)
        value, g = loss.gradient(there) if step < steps else (loss.value(there), g)
        best = max(best, math.inf if math.isnan(value) else value - start)
        by_step.append(best)
    return Rise(start, norm, by_step)


@dataclass(frozen=True)
class Sharpness(SampledProbe):
    """Global sharpness, raw and scale-invariant, and the sharpness of each client's loss.

    Args:
        every: Rounds between two measurements.
        samples: About how many training samples to use, the same number of each client; 0 takes all.
        radius: Of the raw ball, the same for every method compared.
        relative: Radius of the scale-invariant ball, of e / |w|.
        steps: Of the ascent.
        local: Also the sharpness of each client's loss at w.
        trained: Also that of the active clients at the end of their local training: costs a round.
        each: Also the number of every client, not only mean, minimum and maximum.
    """

    name: ClassVar[str] = "sharpness"

    radius: float = param(0.1, above=0)
    relative: float = param(0.5, above=0)
    steps: int = param(10, at_least=1, whole=True)
    local: bool = True
    trained: bool = True
    each: bool = False

    @property
    def reads_memories(self) -> bool:
        return self.trained

    def check(self, federation: Federation) -> None:
        if self.trained:
            check_memories("sharpness of the trained clients", federation, ", or switch it off with trained=no")

    def measure(self, look: Look) -> tuple[Values, dict[str, Any]]:
        federation, w = look.federation, look.federation.state.weights
        loss = self.loss(federation)
        active = heard(federation) if self.trained and look.trains_on else []
        clients = range(len(federation.clients)) if self.local else range(0)
        total = 2 + len(clients) + len(active)
        raw = rise(loss, w, self.radius, self.steps)
        if not math.isfinite(raw.loss):
            loss.finite_gradient(w)  # raises, with the reason
        look.tick(1, total)
        invariant = rise(loss, w, self.relative, self.steps, scale=w.abs())
        look.tick(2, total)
        values: Values = {"loss": raw.loss, "gradient_norm": raw.gradient_norm, "weight_norm": float(w.norm())}
        values |= {"first_order": raw.first_order, "ascent": raw.ascent}
        values |= {"relative_first_order": invariant.first_order, "relative_ascent": invariant.ascent}
        local, ends, dropped = {}, {}, dict[int, str]()
        for done, client in enumerate(clients, 3):
            local[client] = rise(loss.only(client), w, self.radius, self.steps).ascent
            look.tick(done, total)
        for done, (client, v) in enumerate(trained(federation, active, dropped), 3 + len(clients)):
            ends[client] = rise(loss.only(client), v, self.radius, self.steps).ascent
            look.tick(done, total)
        look.missing.extend(named(dropped))
        for name, found in (("local", local), ("trained", ends)):
            if found:
                known = list(found.values()) if all(map(math.isfinite, found.values())) else [math.nan]
                values |= {f"{name}_mean": fmean(known), f"{name}_min": min(known), f"{name}_max": max(known)}
                values |= {f"{name}_{client}": value for client, value in found.items() if self.each}
        return values, {"samples": loss.samples, "of": sum(map(size_of, federation.clients))}
