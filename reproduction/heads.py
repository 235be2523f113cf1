"""Federated heads on frozen features, an experiment: arms, grids, seeds, gate and rule of decision, fixed beforehand.

docs/results/features/protocol.md says why. Imports no PyTorch.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedlesam import algorithms
from reproduction.paper import paper_tables
from reproduction.studies import ARMS, TUNING_SEED, Arm

NAME = "claim-features"
SHOWS = "the claims on frozen features, with a positive control, judged by a rule fixed beforehand"

MORE = (
    Arm("fedlesam-ahead-s", "scaffold", "fedlesam-s", {"direction": "ahead"}),
    Arm("shuffled-s", "scaffold"),
    Arm("scaffold-damped"),
)
HEADS = ARMS | {arm.name: arm for arm in MORE}
BASES = ("scaffold", "fedavg", "feddyn")
FAMILIES = (("scaffold", ("fedlesam-s", "fedgamma")), ("fedavg", ("fedlesam", "fedsam")), ("feddyn", ("fedlesam-d",)))
"""A base and its arms of the primary family, in the order of work: a family that is complete can be judged."""
PRIMARY = ("fedsam", "fedgamma", "fedlesam", "fedlesam-s", "fedlesam-d")
OTHERS = ("fedsmoo", "freesam", "freesam-s", "freesam-d", "fedlesam-released-s", "fedlesam-ahead-s", "shuffled-s")
DAMPED = ("scaffold-damped",)
"""Its learning rate is tuned like a base's."""
AT_PAPERS = ("fedlesam", "fedlesam-s", "fedlesam-d", "fedsam", "fedgamma", "fedsmoo")
"""Also trained at the rho that the paper prints, where another one was chosen."""

CLAIMS = (
    ("fedlesam", "fedavg"),
    ("fedlesam-s", "scaffold"),
    ("fedlesam-d", "feddyn"),
    ("fedlesam", "fedsam"),
    ("fedlesam-s", "fedgamma"),
)
"""The primary family. The paper does not claim FedLESAM-D over FedSMOO."""

SHARE = 0.25
"""Of the gain that the paper prints: what is surely smaller speaks against the claim."""
TESTABLE = 0.5
"""Points that the paper must print for a claim that this bench can test."""


@dataclass(frozen=True)
class Bench:
    """The problem."""

    split: str = "pathological-3"
    data: str = "cifar10"
    """Whose features."""
    rounds: int = 300
    every: int = 10
    """Rounds between two evaluations."""
    last: int = 5
    """Evaluations whose mean is the accuracy."""
    images: int = 10_000
    """Drawn anew for every seed, the same number of each class; all of them where there are no more."""
    held_out: int = 5_000
    """Training images on which learning rates and rho are chosen. No client has them, but where `images` are all: then
    those of the results do."""
    clients: int = 100
    active: int = 10
    epochs: int = 5
    batch_size: int = 20
    hidden: int = 128
    lrs: tuple[float, ...] = (0.03, 0.1, 0.3)
    rhos: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    tuning_seeds: int = 2
    seeds: int = 10
    gate: float | None = 1.0
    """Points by which SAM must help where a free SAM is to be judged: FedGAMMA over SCAFFOLD, held-out images."""
    stops: bool = True
    """Whether a gate that fails ends the work; if not, nothing speaks against a claim there."""
    families: tuple[tuple[str, tuple[str, ...]], ...] = FAMILIES
    damped: tuple[str, ...] = DAMPED
    others: tuple[str, ...] = OTHERS
    at_papers: tuple[str, ...] = AT_PAPERS

    @property
    def model(self) -> str:
        return f"head:hidden={self.hidden}"

    @property
    def cell(self) -> str:
        """Of the paper's tables: where its gains are printed."""
        return "this cell"

    @property
    def bases(self) -> tuple[str, ...]:
        """Whose learning rate is tuned."""
        return (*(base for base, _ in self.families), *known(self.damped))

    @property
    def tuned(self) -> tuple[str, ...]:
        """The arms with a rho, in the order of the tables."""
        some = [arm for _, arms in self.families for arm in arms]
        return (*sorted(some, key=(*PRIMARY, *OTHERS).index), *known(self.others))

    def has(self, *arms: str) -> bool:
        return set(arms) <= {*self.bases, *self.tuned}

    def grid(self, lr: float) -> tuple[float, ...]:
        """The values of rho to choose from."""
        return self.rhos

    def papers_rho(self, arm: str, lr: float) -> float:
        """The catalogue's default, which is the paper's."""
        return float(str(algorithms.hyperparameters(HEADS[arm].method)["rho"]))

    @property
    def name(self) -> str:
        data = "" if self.data == "cifar10" else f"{self.data}-"
        clients = "" if self.clients == 100 else f"{self.clients}-clients-"
        return f"{data}{self.split}-{clients}{self.images // self.clients}-images"

    def printed(self, left: str, right: str) -> float:
        """The gain in the paper's table 2."""
        rows = paper_tables()["table2"]
        part = "200 clients, 5% active" if self.clients == 200 else "100 clients, 10% active"
        both = [rows.figure(part, arm, f"{self.data}/{self.split}") for arm in (left, right)]
        assert both[0] is not None and both[1] is not None
        return round(float(both[0][0]) - float(both[1][0]), 2)


@dataclass(frozen=True)
class Trial:
    """A run."""

    split: str
    tuning: bool
    arm: str
    rho: float | None
    lr: float
    seed: int

    @property
    def method(self) -> str:
        return HEADS[self.arm].method

    @property
    def hyper(self) -> dict[str, Any]:
        return dict(HEADS[self.arm].hyper) | ({} if self.rho is None else {"rho": self.rho})

    @property
    def key(self) -> str:
        rho = "" if self.rho is None else f"-rho{self.rho:g}"
        return f"{self.split}-{self.arm}{rho}-lr{self.lr:g}-{'held-out-' if self.tuning else ''}seed{self.seed}"


@dataclass
class Lines:
    """Finished runs, a line each in a file."""

    bench: Bench
    found: dict[Trial, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, bench: Bench, path: Path) -> "Lines":
        lines = cls(bench)
        for text in path.read_text("utf-8").splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:  # cut off by a crash: that run is made again
                continue
            trial = Trial(**{name: line[name] for name in Trial.__dataclass_fields__})
            problem = (line["rounds"], line["images"], trial.split, line.get("clients", 100), line.get("of", "cifar10"))
            if problem == (bench.rounds, bench.images, bench.split, bench.clients, bench.data):
                lines.found[trial] = line
        return lines

    def accuracy(self, trial: Trial) -> float | None:
        """The mean of the last evaluations, in percent; None if it was not run."""
        line = self.found.get(trial)
        return None if line is None else fmean(line["evaluations"][-self.bench.last :])

    def held_out(self, arm: str, rho: float | None, lr: float) -> float | None:
        """The mean over the tuning seeds; None until all of them are there."""
        values = [self.accuracy(trial) for trial in seeds_of(self.bench, True, arm, rho, lr)]
        whole = [value for value in values if value is not None]
        return fmean(whole) if len(whole) == len(values) else None

    def lr(self, arm: str) -> float | None:
        """That of an arm's base: the best on the held-out images, of equal ones the smaller."""
        base = HEADS[arm].base or arm
        return _best({lr: self.held_out(base, None, lr) for lr in self.bench.lrs})

    def rho(self, arm: str) -> float | None:
        lr = self.lr(arm)
        if lr is None or not HEADS[arm].base:
            return None
        return _best({rho: self.held_out(arm, rho, lr) for rho in self.bench.grid(lr)})

    def tests(self, arm: str, rho: float | None = None) -> dict[int, float]:
        """Test accuracy by seed, at the chosen rho or at another."""
        rho, lr = self.rho(arm) if rho is None else rho, self.lr(arm)
        if lr is None or (HEADS[arm].base and rho is None):
            return {}
        trials = seeds_of(self.bench, False, arm, rho, lr)
        return {trial.seed: value for trial in trials if (value := self.accuracy(trial)) is not None}

    def gate(self) -> float | None:
        """FedGAMMA over SCAFFOLD on the held-out images, each at its best; None until both are tuned."""
        lr, rho = self.lr("scaffold"), self.rho("fedgamma")
        if lr is None or rho is None:
            return None
        ours, base = self.held_out("fedgamma", rho, lr), self.held_out("scaffold", None, lr)
        return None if ours is None or base is None else ours - base


def _best(values: dict[float, float | None]) -> float | None:
    """The key with the largest value, of equal ones the smallest; None unless all have one."""
    whole = {key: round(value, 6) for key, value in values.items() if value is not None}  # equal but for the last bits
    return max(whole, key=lambda key: (whole[key], -key)) if len(whole) == len(values) else None


def seeds_of(bench: Bench, tuning: bool, arm: str, rho: float | None, lr: float) -> list[Trial]:
    first, count = (TUNING_SEED, bench.tuning_seeds) if tuning else (0, bench.seeds)
    return [Trial(bench.split, tuning, arm, rho, lr, seed) for seed in range(first, first + count)]


def known(arms: Sequence[str]) -> list[str]:
    """Those that the catalogue has."""
    return [arm for arm in arms if HEADS[arm].method in algorithms.CATALOGUE]


def pending(bench: Bench, path: Path) -> list[Trial]:
    """The runs that are missing of the first stage that is not finished; none at the protocol's end."""
    lines = Lines.read(bench, path)
    return next((left for stage in stages(bench, lines) if (left := [t for t in stage if t not in lines.found])), [])


def stages(bench: Bench, lines: Lines) -> Iterator[list[Trial]]:
    """The order of work. A stage can be listed when those before it are finished; a gate that fails ends it."""
    if bench.gate is not None:
        yield _lr_trials(bench, ["scaffold"])
        yield _rho_trials(bench, lines, ["fedgamma"])
        gate = lines.gate()
        if gate is None or (bench.stops and gate < bench.gate):
            return
    for base, arms in bench.families:
        yield _lr_trials(bench, [base])
        yield _rho_trials(bench, lines, arms)
        yield _result_trials(bench, lines, [base, *arms])
    yield _lr_trials(bench, known(bench.damped))
    yield _rho_trials(bench, lines, known(bench.others))
    yield _result_trials(bench, lines, known((*bench.damped, *bench.others)))
    papers = {arm: bench.papers_rho(arm, lines.lr(arm) or 0.0) for arm in bench.at_papers}
    yield [
        trial
        for arm, rho in papers.items()
        for trial in seeds_of(bench, False, arm, rho, lines.lr(arm) or 0.0)
        if lines.rho(arm) != rho
    ]


def _lr_trials(bench: Bench, arms: Sequence[str]) -> list[Trial]:
    return [trial for arm in arms for lr in bench.lrs for trial in seeds_of(bench, True, arm, None, lr)]


def _rho_trials(bench: Bench, lines: Lines, arms: Sequence[str]) -> list[Trial]:
    lrs = {arm: lines.lr(arm) or 0.0 for arm in arms}
    return [t for arm, lr in lrs.items() for rho in bench.grid(lr) for t in seeds_of(bench, True, arm, rho, lr)]


def _result_trials(bench: Bench, lines: Lines, arms: Sequence[str]) -> list[Trial]:
    return [t for arm in arms for t in seeds_of(bench, False, arm, lines.rho(arm), lines.lr(arm) or 0.0)]


def benches(scale: str, seeds: int | None = None) -> list[Bench]:
    """The problems, in the order of work. Full scale has the paper's number of rounds.

    The gate failed with 100 and with 30 images a client, so that the third has 15 (the protocol's amendments). Then
    other cells of the paper's table 2; the last one has the paper's number of images a client.
    """
    if scale == "smoke":
        small = Bench(rounds=4, every=1, last=2, images=200, held_out=100, clients=10, active=4, hidden=8, gate=-100)
        return [replace(small, lrs=(0.1,), rhos=(0.1,), tuning_seeds=1, seeds=seeds or 2)]
    first = Bench(rounds=300 if scale == "cpu" else 800, seeds=seeds or 10)
    small = replace(first, images=3_000, batch_size=10)
    smaller = replace(first, images=1_500, batch_size=5)
    return [
        *(first, small, smaller, replace(smaller, split="dirichlet-0.1")),
        replace(smaller, split="pathological-6"),
        replace(smaller, clients=200, images=3_000),
        replace(smaller, data="cifar100", split="pathological-10", images=5_000, epochs=2, batch_size=10),
        replace(
            first,
            images=50_000,
            batch_size=50,
            seeds=seeds or 5,
            stops=False,
            families=FAMILIES[:2],
            damped=(),
            others=("freesam", "freesam-s"),
            at_papers=("fedlesam", "fedlesam-s", "fedsam", "fedgamma"),
        ),
    ]


def count(every: Sequence[Bench]) -> tuple[int, int]:
    """Runs and rounds, if the gates are open and no chosen rho is the paper's."""
    runs = rounds = 0
    for bench in every:
        tuned = len(bench.lrs) * len(bench.bases) + len(bench.grid(1.0)) * len(bench.tuned)
        arms = len(bench.bases) + len(bench.tuned) + len(bench.at_papers)
        some = tuned * bench.tuning_seeds + arms * bench.seeds
        runs, rounds = runs + some, rounds + some * bench.rounds
    return runs, rounds
