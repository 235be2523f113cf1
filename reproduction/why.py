"""Why a perturbation helps or not: where e points, step by step, and what it adds to a step; on the digits of `claim`.

The gradient at v + e is g + H e to first order. FedLESAM's e is -rho / norm(w - old) times the last global step,
so that its step is FedAvg's plus curvature times that step. All arms have the same rho here.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from scipy.stats import spearmanr
from torch import Tensor

from fedlesam.core import disk, seeds
from fedlesam.core.client import LocalStep, local_update
from fedlesam.core.messages import ClientResult, Memory
from fedlesam.core.slots import Algorithm
from fedlesam.federation import Federation
from fedlesam.probes.loss import GlobalLoss
from fedlesam.runs.build import build
from reproduction.result_table import Block, Cell, ResultTable
from reproduction.studies import ARMS, Where, studies
from reproduction.why_features import COSINES as MEASURES
from reproduction.writing import markdown

NAME = "claim-why"
SHOWS = "where perturbations point, and which of it goes with the gain"
SHOWN = ("fedsam", "fedgamma", "freesam", "freesam-s", "freesam-d", "fedlesam", "fedlesam-s", "fedlesam-d")
RHO = 0.3


def cosine(a: Tensor, b: Tensor) -> float:
    """Of two vectors; 0 where one of them is 0.

    Args:
        a: A vector.
        b: Another.
    """
    product = float(a.double().norm() * b.double().norm())
    return float(a.double() @ b.double()) / product if product else 0.0


def walk(
    federation: Federation, client: int, algorithm: Algorithm | None = None
) -> Generator[LocalStep, None, ClientResult]:
    """The client's coming round, which changes nothing in the federation.

    Args:
        federation: Between two rounds.
        client: One of its clients.
        algorithm: In place of the federation's.
    """
    memory, sent = federation.memories.get(client, Memory()), federation.state.sent(federation.algorithm)
    with seeds.preserve_rng(sent.weights.device):
        return (
            yield from local_update(
                federation.replica(),
                federation.clients[client],
                federation.algorithm if algorithm is None else algorithm,
                federation.local,
                sent,
                memory,
                client=client,
                seed=federation.seed,
                task=federation.task,
            )
        )


def steps(federation: Federation, client: int) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """v, e and the batch gradient at v + e of every local step of the coming round; the federation does not change.

    Args:
        federation: Between two rounds.
        client: One of its clients.
    """
    for step in walk(federation, client):
        yield step.weights(), None if step.e is None else step.e.clone(), step.round.g.clone()


def measure(federation: Federation, previous: Tensor) -> dict[str, list[float]]:
    """The measures of every step of the coming round that has a perturbation.

    Args:
        federation: Between two rounds.
        previous: The global model of the round before.
    """
    loss, found = GlobalLoss.of(federation), defaultdict(list)
    w = federation.weights
    for client in federation.draw_active(federation.state.round):
        own = loss.only(client)
        last: Tensor | None = None
        for v, e, g in steps(federation, client):
            moved = None if last is None else v - last
            last = v
            if e is None or not e.norm() > 0:
                continue
            here, everywhere = own.gradient(v)[1].clone(), loss.gradient(v)[1].clone()
            change = own.gradient(v + e)[1] - here
            others = (g, here, everywhere, moved, w - previous)
            for name, other in zip(MEASURES, others, strict=False):
                if other is not None:
                    found[name].append(cosine(e, other))
            found["change, e"].append(cosine(change, e))
            found["change, global gradient"].append(cosine(change, everywhere))
            found["change / gradient"].append(float(change.norm() / here.norm().clamp_min(1e-12)))
    return found


def run(where: Where, out: Path, log: Callable[[str], None]) -> ResultTable:
    """Train every arm and its base, measure at three instants, and write the table."""
    condition = studies(where.scale)["claim"].conditions[0]
    small = where.scale.name == "smoke"
    rounds, seeds_ = (3, 1) if small else (condition.config("fedavg", None, 0, where).rounds, 3)
    instants = {rounds // 4, rounds // 2, 3 * rounds // 4}
    gains, means = {}, {}
    scores: dict[tuple[str, int], float] = {}
    for arm in [*dict.fromkeys(ARMS[arm].base for arm in SHOWN), *SHOWN]:
        found: dict[str, list[float]] = defaultdict(list)
        for seed in range(seeds_):
            config = condition.config(arm, RHO if ARMS[arm].base else None, seed, where)
            federation = build(replace(config, probe=None)).federation
            tested, previous = [], federation.weights
            for number in range(rounds):
                if ARMS[arm].base and number in instants:
                    for name, values in measure(federation, previous).items():
                        found[name] += values
                previous = federation.weights
                tested.append(100 * (federation.round(evaluate=True).test_accuracy or 0.0))
            scores[arm, seed] = fmean(tested[-condition.last :])
        if ARMS[arm].base:
            gains[arm] = fmean(scores[arm, seed] - scores[ARMS[arm].base, seed] for seed in range(seeds_))
            means[arm] = {name: fmean(values) for name, values in found.items()}
            log(f"{arm}: {gains[arm]:+.2f}")
    table = tabulate(gains, means, seeds_)
    disk.write_text(out / f"{NAME}.md", markdown(table))
    return table


def tabulate(gains: dict[str, float], means: dict[str, dict[str, float]], count: int) -> ResultTable:
    """A row per arm; the last one is Spearman's rank correlation of each measure with the gain, over the arms."""
    rows: dict[str, tuple[Cell, ...]] = {}
    for arm, gain in gains.items():
        values = (means[arm].get(name) for name in MEASURES)
        rows[arm] = (Cell(gain), *(Cell("-") if value is None else Cell(value) for value in values))
    arms = list(gains)
    ranks = []
    for name in MEASURES:
        both = [(means[arm][name], gains[arm]) for arm in arms if name in means[arm]]
        ranks.append(Cell(float(spearmanr(*zip(*both, strict=True)).statistic)) if len(both) > 2 else Cell("-"))
    rows["rank correlation with the gain"] = (Cell("-"), *ranks)
    notes = (
        f"rho {RHO:g} for every arm; {count} seeds; steps of three rounds, at a quarter, a half and three quarters",
        "gain: points over the base on the test images, mean of the last 20 rounds",
        "with so few arms a rank correlation is a description, not a test",
    )
    return ResultTable(NAME, SHOWS, (Block("", ("gain", *MEASURES), rows),), notes)
