"""The theorems of the FedLESAM paper beside what really happens, on quadratic losses where everything is known.

Theorem 2 bounds the bias of the estimate, unit(w_{t-1} - w_t) - unit(gradient of F at w_t), for one local step and
full participation, by 3 sigma_l'^2 + 3 sigma_g'^2 + 3 (L lr_g lr)^2. It states this of the norm; its proof is about the
squared norm (docs/errata.md, 12). Both are measured here, with the project's own rounds.

Of Theorem 1 its one difference between FedSAM and FedLESAM is measured: Delta, which comes from Lemma 2, the mean of
norm(e_k - e_0)^2 over clients, for the perturbations e_k of a round's local steps. It is 0 for whatever does not change
in a round, a random direction included (docs/errata.md, 13).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import Tensor, nn

from fedlesam.algorithms import Algorithm
from fedlesam.core import seeds
from fedlesam.core.checks import check_count, check_number
from fedlesam.core.local import LocalTraining
from fedlesam.core.slots import RoundResult, State
from fedlesam.federation import Federation
from fedlesam.probes.estimate import cosine
from fedlesam.probes.loss import GlobalLoss
from fedlesam.probes.replay import lockstep
from fedlesam.rules import Ascent, Average, GlobalAscent, LocalAscent, NoCorrection

STEPS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""L * lr_g * lr, from hardly moving to one Newton step along the steepest axis."""


@dataclass(frozen=True)
class Theory:
    """One step size, over all starts and rounds."""

    step: float
    """x = L lr_g lr"""
    bias_median: float
    bias_max: float
    """norm(unit(w_{t-1} - w_t) - unit(gradient of F at w_t))"""
    noise: float
    """sigma_l'^2: the mean squared distance of the batches' direction from that of the full gradient, measured."""
    bound: float
    """3 sigma_l'^2 + 3 x^2; sigma_g' is 0 by definition, since F is the mean of the clients' losses."""
    measured: int
    norms_within: int
    """How often the norm is within the bound, as the theorem says."""
    squares_within: int
    """How often its square is."""
    mean_square: float

    @property
    def holds_as_printed(self) -> bool:
        """For every measured norm."""
        return self.norms_within == self.measured

    @property
    def holds_squared(self) -> bool:
        """For the mean of the squares, which is what the proof bounds."""
        return self.mean_square <= self.bound


class Point(nn.Module):
    """w, seen from samples (c, a): the residuals sqrt(a) * (w - c), whose half square is the loss."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)

    def forward(self, x: Tensor) -> Tensor:
        centre, curvature = x.chunk(2, dim=1)
        return curvature.sqrt() * (self.w - centre)


def half_square(residuals: Tensor, _: Tensor) -> Tensor:
    return residuals.square().sum(1).mean() / 2


@dataclass
class Batchwise:
    """A client that shows another batch of its samples every time it is asked."""

    x: Tensor
    size: int
    rng: torch.Generator

    def __len__(self) -> int:
        return self.size

    def labels(self) -> Tensor:
        return torch.zeros(self.size)

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.x[torch.randperm(len(self.x), generator=self.rng)[: self.size]], self.labels()


def quadratics(dimensions: int, clients: int, samples: int, rng: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Clients' samples (centre, curvatures), each client's centres around one of its own."""
    spread = torch.linspace(0.1, 1.0, dimensions, dtype=torch.float64)
    shards = []
    for _ in range(clients):
        centre = torch.randn(dimensions, generator=rng) + torch.randn(samples, dimensions, generator=rng)
        curvature = spread * (0.5 + torch.rand(samples, dimensions, generator=rng, dtype=torch.float64))
        shards.append((torch.cat([centre.double(), curvature], 1), torch.zeros(samples)))
    return shards


def theorem_2(
    steps: Sequence[float] = STEPS,
    *,
    dimensions: int = 10,
    clients: int = 10,
    samples: int = 8,
    batch: int = 0,
    starts: int = 20,
    rounds: int = 5,
    rho: float = 0.0,
    seed: int = 0,
) -> list[Theory]:
    """Measure the bias for each step size x = L * lr.

    Every sample is a quadratic loss with its own centre and curvatures (.1 to 1 in the mean), so clients differ.
    `batch` samples give a client's one gradient, 0 all of them, exactly. `rho` is 0, as in the proof, which takes the
    gradients at w itself.
    """
    for name, value in (("dimensions", dimensions), ("clients", clients), ("samples", samples), ("starts", starts)):
        check_count("theory", name, value)
    check_count("theory", "rounds", rounds)
    check_count("theory", "batch", batch, at_least=0)
    if batch > samples:
        raise ValueError(f"theory: batch must be at most the {samples} samples of a client, got {batch}")
    check_number("theory", "rho", rho, at_least=0)
    for x in steps:
        check_number("theory", "step", x, above=0)
    rng = seeds.generator(seed, "probe")
    shards = quadratics(dimensions, clients, samples, rng)
    smoothness = float(torch.stack([x[:, dimensions:].mean(0) for x, _ in shards]).mean(0).max())
    begin = 3 * torch.randn(starts, dimensions, generator=rng, dtype=torch.float64)
    algorithm = Algorithm(GlobalAscent(rho), NoCorrection(), Average(), 1.0)
    found = []
    for x in steps:
        local = LocalTraining(
            lr=x / smoothness, epochs=1, batch_size=samples, weight_decay=0.0, clip=None, loss=half_square
        )
        biases, noises = [], []
        for start in range(starts):
            shown = [Batchwise(x, batch, rng) if batch else (x, y) for x, y in shards]
            federation = Federation(Point(begin[start]), shown, algorithm, local, seed=seed)
            loss = GlobalLoss(federation.model, shards, half_square)
            for _ in range(rounds):
                before = federation.weights
                federation.round()
                back, after = before - federation.weights, loss.gradient(federation.weights)[1]
                if not (back.norm() > 0 and after.norm() > 0):
                    continue
                biases.append(float((_unit(back) - _unit(after)).norm()))
                noises.append(float((_unit(back) - _unit(loss.gradient(before)[1])).norm()) ** 2)
        noise = fmean(noises) if batch else 0.0
        bound = 3 * noise + 3 * x**2
        found.append(
            Theory(
                step=x,
                bias_median=median(biases),
                bias_max=max(biases),
                noise=noise,
                bound=bound,
                measured=len(biases),
                norms_within=sum(bias <= bound for bias in biases),
                squares_within=sum(bias**2 <= bound for bias in biases),
                mean_square=fmean(bias**2 for bias in biases),
            )
        )
    return found


@dataclass(frozen=True)
class Variation:
    """How much a perturbation changes in a round, and whether it points where it should."""

    perturbation: str
    mean: float
    largest: float
    """Of the mean over clients of norm(e_k - e_0)^2, over steps k > 0 and rounds; norm(e) = rho."""
    bound: float
    """Lemma 2's for FedSAM, 2 E^2 L^2 lr^2 rho^2."""
    cosine: float
    """With the global gradient at the start of the round, mean over clients, steps and rounds."""
    measured: int
    """Rounds."""


@dataclass(frozen=True)
class RandomDirection(Ascent):
    """The same random direction for all clients and steps of a round: as constant as FedLESAM's, and about nothing."""

    rng: torch.Generator | None = None

    def initial(self, anchor: Tensor) -> State:
        return {"u": _unit(torch.randn(anchor.shape, generator=self.rng, dtype=anchor.dtype))}

    def round_perturbation(self, anchor: Tensor, client_state: State, server_state: State) -> Tensor | None:
        return self.rho * server_state["u"]

    def aggregate(self, server_state: State, result: RoundResult) -> State:
        return self.initial(result.anchor)


def theorem_1(
    *,
    step: float = 0.1,
    local_steps: int = 5,
    rho: float = 0.1,
    dimensions: int = 10,
    clients: int = 10,
    samples: int = 8,
    starts: int = 2,
    rounds: int = 4,
    seed: int = 0,
) -> list[Variation]:
    """Delta for FedSAM, FedLESAM and a random direction, on one quadratic problem: exact gradients, all clients active.

    `step` is L * lr with the largest L of a client. FedLESAM has no perturbation in the first round, which is left out.
    """
    rng = seeds.generator(seed, "probe")
    shards = quadratics(dimensions, clients, samples, rng)
    smoothness = max(float(x[:, dimensions:].mean(0).max()) for x, _ in shards)
    begin = 3 * torch.randn(starts, dimensions, generator=rng, dtype=torch.float64)
    local = LocalTraining(
        lr=step / smoothness, epochs=local_steps, batch_size=samples, weight_decay=0.0, clip=None, loss=half_square
    )
    rules: dict[str, Ascent] = {
        "fedsam": LocalAscent(rho),
        "fedlesam": GlobalAscent(rho),
        "random direction": RandomDirection(rho, rng),
    }
    found = []
    for name, rule in rules.items():
        algorithm, changes, cosines = Algorithm(rule, NoCorrection(), Average(), 1.0), [], []
        for start in range(starts):
            federation = Federation(Point(begin[start]), shards, algorithm, local, seed=seed)
            loss = GlobalLoss(federation.model, shards, half_square)
            for _ in range(rounds):
                federation.round()
                g = loss.gradient(federation.weights)[1]
                first: dict[int, Tensor] = {}
                for places in lockstep(federation, range(clients)):
                    now = {place.client: place.e.clone() for place in places if place.moving and place.e is not None}
                    cosines += [cosine(e, g) for e in now.values()]
                    if first:
                        changes.append(fmean(float((e - first[client]).norm()) ** 2 for client, e in now.items()))
                    first = first or now
        bound = 2 * (local_steps * step * rho) ** 2
        found.append(Variation(name, fmean(changes), max(changes), bound, fmean(cosines), starts * rounds))
    return found


def _unit(vector: Tensor) -> Tensor:
    return torch.div(vector, vector.norm())
