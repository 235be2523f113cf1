"""The claims with one domain left out, on frozen features of PACS: what is run, fixed beforehand. Imports no PyTorch.

docs/results/domains/protocol.md says why. Bench, lines and stages are those of `claim-features`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

from reproduction.heads import AT_PAPERS, Bench, Lines, Trial, stages
from reproduction.paper import paper_tables

NAME = "claim-domains"
SHOWS = "the claims on frozen features of PACS, one domain left out in turn, judged by a rule fixed beforehand"
TARGETS = ("art_painting", "cartoon", "photo", "sketch")
RATIOS = (0.1, 1.0, 3.0, 10.0, 30.0)
"""rho / lr to choose from."""
PAPERS = 10.0
"""rho / lr that the paper recommends for pretrained networks."""
PART = "10 clients per domain, 20% active"
"""Of the paper's table 3: in the other part FedLESAM's rows are copies of these (docs/errata.md, 6)."""
FAMILIES = (
    ("scaffold", ("fedlesam-s", "fedgamma")),
    ("fedavg", ("fedlesam", "fedsam")),
    ("feddyn", ("fedlesam-d", "fedsmoo")),
)


@dataclass(frozen=True)
class DomainBench(Bench):
    """One domain left out; `split` is its name, `clients` those of each other domain."""

    split: str = TARGETS[0]
    data: str = "pacs"
    images: int = 9_991
    """Of all domains."""
    share: float = 0.1
    """Of each class of a source domain: held out for tuning, drawn anew for every seed."""
    ratios: tuple[float, ...] = RATIOS

    @property
    def name(self) -> str:
        return f"{self.split}-{self.clients}-clients"

    def grid(self, lr: float) -> tuple[float, ...]:
        return tuple(float(f"{ratio * lr:.6g}") for ratio in self.ratios)

    def papers_rho(self, arm: str, lr: float) -> float:
        return float(f"{PAPERS * lr:.6g}")

    def printed(self, left: str, right: str) -> float:
        """The mean gain over the ten targets of the paper's table 3, lower part."""
        rows = paper_tables()["table3"].parts[PART]
        means = [fmean(float(value) for value, _ in rows[arm]) for arm in (left, right)]
        return round(means[0] - means[1], 2)


def federations(scale: str, seeds: int | None = None) -> list[list[DomainBench]]:
    """One bench a target, of each of the paper's two ways to make clients of domains, in the order of work.

    Full scale has the paper's number of rounds.
    """
    full = scale == "full"
    first = DomainBench(
        rounds=400 if full else 30,
        every=2,
        clients=1,
        active=3,
        batch_size=32,
        lrs=(0.01, 0.03, 0.1),
        seeds=seeds or 10,
        gate=None,
        families=FAMILIES,
        damped=(),
        others=(),
        at_papers=AT_PAPERS,
    )
    if scale == "smoke":
        some = replace(first, rounds=3, every=1, last=2, epochs=1, hidden=8, lrs=(0.1,), ratios=(1.0,), tuning_seeds=1)
        return [[replace(some, split=target, seeds=seeds or 2) for target in TARGETS]]
    many = replace(first, clients=10, active=6, rounds=400 if full else 100, every=5)
    return [[replace(bench, split=target) for target in TARGETS] for bench in (first, many)]


def pending(benches: Sequence[Bench], path: Path) -> list[Trial]:
    """The runs that are missing of the first stage that is not finished on all targets; none at the end."""
    every = [(bench, Lines.read(bench, path)) for bench in benches]
    for several in zip_longest(*(stages(bench, lines) for bench, lines in every), fillvalue=[]):
        left = [t for (_, lines), stage in zip(every, several, strict=True) for t in stage if t not in lines.found]
        if left:
            return left
    return []
