"""How much the loss can rise within a ball around the weights."""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.batches import size_of
from fedlesam.core.checks import check_count, check_number
from fedlesam.federation import Federation
from fedlesam.probes.base import Look, Probe, Values, every_or
from fedlesam.probes.loss import GlobalLoss
from fedlesam.probes.replay import check_memories, named, trained


@dataclass(frozen=True)
class Rise:
    """max over norm(e) <= radius of F(w + e) - F(w), from below."""

    loss: float
    """F(w)"""
    gradient_norm: float
    by_step: list[float]
    """The largest rise found after 1, 2, ... steps of projected gradient ascent."""

    @property
    def first_order(self) -> float:
        """At radius * unit(gradient of F at w)."""
        return self.by_step[0]

    @property
    def ascent(self) -> float:
        """At the best point found; 0 where nothing is above the centre, NaN where the centre is no number."""
        return max(0.0, *self.by_step) if math.isfinite(self.loss) else math.nan


def rise(loss: GlobalLoss, weights: Tensor, radius: float, steps: int, scale: Tensor | None = None) -> Rise:
    """Projected gradient ascent from e = 0: e = project(e + radius * unit(gradient at w + e)), the best e kept.

    The first step from 0 is the first-order perturbation of SAM, so the ascent is never below it; and with the step as
    long as the radius, e soon follows the gradient on the sphere. With `scale` = |w| the ball is that of e / |w|, as
    in ASAM (Kwon et al., ICML 2021): rescaling the weights of a ReLU network without changing its function then
    changes nothing. Where the gradient is 0, or too large to be a number, e goes in a fixed random direction. A loss
    that is no number counts as infinite, but at w itself nothing is known then: NaN. Costs `steps` gradients and one
    evaluation.
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
        if step < steps:
            value, g = loss.gradient(there)
        else:
            value = loss.value(there)
        best = max(best, math.inf if math.isnan(value) else value - start)
        by_step.append(best)
    return Rise(start, norm, by_step)


@dataclass(frozen=True)
class Sharpness(Probe):
    """Global sharpness, raw and scale-invariant, with the clients' own beside it."""

    name: ClassVar[str] = "sharpness"

    radius: float = 0.1
    """Of the raw ball, the same for every method compared."""
    relative: float = 0.5
    """Radius of the scale-invariant ball, of e / |w|."""
    steps: int = 10
    samples: int = 1000
    """About so many training samples, as many of each client; 0 takes all."""
    local: bool = True
    """Also each client's sharpness of its own loss at w."""
    trained: bool = True
    """Also that of the round's active clients at the end of their local training: costs a round."""
    each: bool = False
    """Also every client's number, not only their mean, least and largest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "radius", self.radius, above=0)
        check_number(self.name, "relative", self.relative, above=0)
        check_count(self.name, "steps", self.steps)
        check_count(self.name, "samples", self.samples, at_least=0)

    @property
    def reads_memories(self) -> bool:
        return self.trained

    def check(self, federation: Federation) -> None:
        if self.trained:
            check_memories("sharpness of the trained clients", federation, ", or leave it out with trained=no")

    def measure(self, look: Look) -> tuple[Values, dict[str, Any]]:
        federation, w = look.federation, look.federation.state.weights
        loss = GlobalLoss.of(federation, every_or(self.samples))
        active = look.active if self.trained and look.trains_on else []
        clients = range(len(federation.clients)) if self.local else range(0)
        total = 2 + len(clients) + len(active)
        raw = rise(loss, w, self.radius, self.steps)
        if not math.isfinite(raw.loss):
            loss.finite_gradient(w)  # says why
        look.tick(1, total)
        invariant = rise(loss, w, self.relative, self.steps, scale=w.abs())
        look.tick(2, total)
        values: Values = {
            "loss": raw.loss,
            "gradient_norm": raw.gradient_norm,
            "weight_norm": float(w.norm()),
            "first_order": raw.first_order,
            "ascent": raw.ascent,
            "relative_first_order": invariant.first_order,
            "relative_ascent": invariant.ascent,
        }
        local: dict[int, float] = {}
        ends: dict[int, float] = {}
        dropped: dict[int, str] = {}
        for done, client in enumerate(clients, 3):
            local[client] = rise(loss.only(client), w, self.radius, self.steps).ascent
            look.tick(done, total)
        for done, (client, v) in enumerate(trained(federation, active, dropped), 3 + len(clients)):
            ends[client] = rise(loss.only(client), v, self.radius, self.steps).ascent
            look.tick(done, total)
        look.missing.extend(named(dropped))
        for name, found in (("local", local), ("trained", ends)):
            if found:
                all_finite = all(map(math.isfinite, found.values()))
                known = list(found.values()) if all_finite else [math.nan]
                values |= {f"{name}_mean": fmean(known), f"{name}_min": min(known), f"{name}_max": max(known)}
                values |= {f"{name}_{client}": value for client, value in found.items() if self.each}
        return values, {"samples": loss.samples, "of": sum(map(size_of, federation.clients))}
