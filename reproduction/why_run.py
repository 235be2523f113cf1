"""Train arms on the frozen features, and measure at three instants what their perturbations do."""

import dataclasses
from collections import defaultdict
from math import isfinite
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlesam.core.client import drain
from fedlesam.core.slots import NoPerturbation
from fedlesam.federation import Federation
from fedlesam.probes.loss import GlobalLoss
from reproduction.heads import Trial
from reproduction.heads_run import Runner
from reproduction.why import cosine, steps, walk
from reproduction.why_features import MEASURES, NAME, OF_ROUND, OF_STEP

CLIENTS = 5
"""Of the active ones, the first so many are measured."""
Values = defaultdict[str, list[float]]
Sums = defaultdict[str, list[tuple[float, ...]]]


class WhyRunner(Runner):
    """Trains as `claim-features` does; a line also has the measures."""

    study: ClassVar[str] = NAME

    def line(self, trial: Trial) -> dict[str, Any]:
        federation, rounds = self.federation(trial), self.bench.rounds
        instants = {rounds // 4, rounds // 2, 3 * rounds // 4}
        values: Values = defaultdict(list)
        sums: Sums = defaultdict(list)
        previous: list[Tensor] = []

        def watch(number: int) -> None:
            if trial.rho is not None and number in instants:
                for client in federation.draw_active(number)[:CLIENTS]:
                    per_step(federation, client, previous[-1], values, sums)
                    per_round(federation, client, previous[-1], sums)
            previous[:] = [federation.weights]

        line = {**dataclasses.asdict(trial), **self.train(federation, watch)}
        norms = [values.pop(name, []) for name in ("norm of the change", "norm of the gradient")]
        if norms[0] and fmean(norms[1]):
            values["change / gradient"] = [fmean(norms[0]) / fmean(norms[1])]
        line["measures"] = {name: fmean(values[name]) for name in MEASURES if values[name]}
        line["predicted"] = {name: tuple(map(sum, zip(*some, strict=True))) for name, some in sums.items()}
        return {**line, "command": f"python -m reproduction {self.study}"}


def per_step(federation: Federation, client: int, previous: Tensor, values: Values, sums: Sums) -> None:
    """Measure every step of a client's coming round that has a perturbation; what is not finite is left out.

    Args:
        federation: Between two rounds.
        client: One of its clients.
        previous: The global model of the round before.
        values: By measure; it grows.
        sums: By prediction; it grows.
    """
    loss = GlobalLoss.of(federation)
    own, w = loss.only(client), federation.weights
    last: Tensor | None = None
    for v, e, g in steps(federation, client):
        moved = None if last is None else v - last
        last = v
        if e is None or not e.norm() > 0:
            continue
        (here, slope), (everywhere, whole) = ((value, at.clone()) for value, at in (own.gradient(v), loss.gradient(v)))
        there, after = own.gradient(v + e)
        change = after - slope
        others = (g, slope, whole, moved, w - previous)
        some = {name: cosine(e, other) for name, other in zip(MEASURES, others, strict=False) if other is not None}
        some |= {"change, e": cosine(change, e), "change, global gradient": cosine(change, whole)}
        some |= {"norm of the change": float(change.norm()), "norm of the gradient": float(slope.norm())}
        some |= {"rise of the client's loss": there - here}
        some |= {"rise of the global loss": loss.value(v + e) - everywhere}
        predicted = [own.product(v, along) for along in (e, taken_back(previous - w, e))]
        pooled = [products(change, p) for p in predicted]
        if all(map(isfinite, [*some.values(), *pooled[0], *pooled[1]])):
            for name, value in some.items():
                values[name].append(value)
            for name, three in zip(OF_STEP, pooled, strict=True):
                sums[name].append(three)


def per_round(federation: Federation, client: int, previous: Tensor, sums: Sums) -> None:
    """How a perturbation that is fixed for a round changes a client's update, and how well that is predicted.

    Args:
        federation: Between two rounds.
        client: One of its clients.
        previous: The global model of the round before.
        sums: By prediction; it grows, but for a rule that changes e from step to step, or has none yet. `size` has the
            squares of the change and of the update without a perturbation.
    """
    e = next(steps(federation, client))[1]
    if federation.algorithm.perturbation.gradient != "unused" or e is None or not e.norm() > 0:
        return
    plain, w = dataclasses.replace(federation.algorithm, perturbation=NoPerturbation()), federation.weights
    update, perturbed = (drain(walk(federation, client, some)).result.update for some in (plain, None))
    change, own = perturbed - update, GlobalLoss.of(federation).only(client)
    lr, visited = federation.local.lr_at(federation.state.round, plain), []
    for step in walk(federation, client, plain):
        visited.append(step.weights())
    for name, along in zip(OF_ROUND, (e, taken_back(previous - w, e)), strict=True):
        predicted = -lr * torch.stack([own.product(v, along) for v in visited]).sum(0)
        sums[name].append(products(change, predicted))
    sums["size"].append((products(change, change)[0], products(update, update)[0]))


def taken_back(step: Tensor, e: Tensor) -> Tensor:
    """A step with the norm of e."""
    return step.mul(e.norm() / step.norm().clamp_min(1e-12))


def products(d: Tensor, p: Tensor) -> tuple[float, float, float]:
    """(d, d), (d, p) and (p, p): what is needed to say how well p predicts d."""
    d, p = d.double(), p.double()
    return float(d @ d), float(d @ p), float(p @ p)
