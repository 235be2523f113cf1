"""Every method of the catalogue on the first problem of `claim-features`: grids, seeds and lines. Imports no PyTorch.

docs/results/leaderboard/protocol.md says what is compared, and how.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from fedlesam import algorithms
from reproduction.heads import Bench, benches
from reproduction.studies import TUNING_SEED

NAME = "leaderboard"
SHOWS = "every method on frozen features of CIFAR-10: accuracy, sharpness and costs, six trials each"
DYNAMIC = ("feddyn", "fedsmoo", "fedlesam-d", "freesam-d", "fedspeed", "fedgloss", "fedgmt")
"""FedDyn's family, whose learning rate falls slowly."""
LR, DYNAMIC_LR = 0.03, 0.1
"""What `claim-features` chose for FedAvg and SCAFFOLD, and for FedDyn."""
SEEDS = 5
TRIALS = 6

SIX, THREE = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5), (0.03, 0.1, 0.3)
STEPS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
ADAPTIVE: dict[str, tuple[float, ...]] = {"lr_g": (0.01, 0.03, 0.1), "eps": (0.001, 0.01)}
DUAL: dict[str, tuple[float, ...]] = {"rho": THREE, "lam": (0.03, 0.1)}
MIXED: dict[str, tuple[float, ...]] = {"rho": THREE, "alpha": (0.1, 0.3)}

GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "fedavg": {"lr_g": STEPS},
    "fedadam": ADAPTIVE,
    "fedyogi": ADAPTIVE,
    "fedadagrad": ADAPTIVE,
    "fedavgm": {"lr_g": (0.1, 0.3, 1.0), "beta": (0.5, 0.9)},
    "fedprox": {"prox": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)},
    "scaffold": {"lr_g": STEPS},
    "fedcm": {"alpha": (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)},
    "feddyn": {"lam": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)},
    "fedsam": {"rho": SIX},
    "mofedsam": MIXED,
    "fedgamma": {"rho": SIX},
    "fedsmoo": DUAL,
    "fedlesam": {"rho": SIX},
    "fedlesam-s": {"rho": SIX},
    "fedlesam-d": DUAL,
    "fedlesam-m": MIXED,
    "freesam": {"rho": SIX},
    "freesam-s": {"rho": SIX},
    "freesam-d": DUAL,
    "fedspeed": DUAL,
    "fedasam": {"rho": (0.1, 0.3, 0.7), "eta": (0.01, 0.2)},
    "fedgf": {"rho": THREE, "threshold": (0.3, 1.0)},
    "fedgloss": {"rho": THREE, "rho_s": (0.03, 0.15)},
    "fednsam": {"rho": THREE, "gamma": (0.5, 0.85)},
    "fedswa": {"lr_g": (1.0, 1.5, 2.0), "floor": (0.1, 0.5)},
    "fedmoswa": {"lr_g": (1.0, 1.5, 2.0), "gamma": (0.2, 0.5)},
    "fedgmt": {"strength": (0.3, 1.0, 3.0), "lam": (0.03, 0.1)},
    "fedsol": {"rho": (0.1, 0.3, 1.0, 2.0, 3.0, 5.0)},
    "fedwmsam": MIXED,
    "dp-fedsam": {"rho": THREE, "clip": (0.2, 1.0)},
    "msam": {"rho": THREE, "beta": (0.5, 0.9)},
}
"""Six trials a method: rho and the main parameter, or six values of the only one."""

CLAIMS = (
    ("fedsam", "fedavg"),
    ("mofedsam", "fedsam"),
    ("fedgamma", "scaffold"),
    ("fedsmoo", "feddyn"),
    ("fedlesam", "fedavg"),
    ("fedlesam-s", "scaffold"),
    ("fedlesam-d", "feddyn"),
    ("fedspeed", "fedsam"),
    ("fedasam", "fedsam"),
    ("fedgf", "fedsam"),
    ("fedgloss", "feddyn"),
    ("fednsam", "fedsam"),
    ("fedswa", "fedavg"),
    ("fedmoswa", "fedswa"),
    ("fedgmt", "feddyn"),
    ("fedsol", "fedavg"),
    ("fedwmsam", "mofedsam"),
    ("msam", "fedavg"),
)
"""What every paper claims at least: its method is more accurate than the one that it extends."""


@dataclass(frozen=True)
class Entry:
    """A run."""

    method: str
    settings: tuple[tuple[str, float], ...]
    seed: int
    tuning: bool

    @property
    def lr(self) -> float:
        return DYNAMIC_LR if self.method in DYNAMIC else LR

    @property
    def hyper(self) -> dict[str, Any]:
        return dict(self.settings)

    @property
    def key(self) -> str:
        values = "".join(f"-{name}{value:g}" for name, value in self.settings)
        return f"{self.method}{values}-{'held-out-' if self.tuning else ''}seed{self.seed}"


def bench(scale: str) -> Bench:
    """The problem: the first of `claim-features` whose gate passed, without what is tuned there."""
    every = benches(scale)
    return every[0] if scale == "smoke" else every[2]


@dataclass
class Board:
    """Finished runs, a line each in a file."""

    last: int
    seeds: int = SEEDS
    methods: tuple[str, ...] = tuple(GRIDS)
    found: dict[Entry, dict[str, Any]] = field(default_factory=dict)

    def read(self, path: Path) -> "Board":
        """The same with the lines of a file; one that was cut off is left out, and made again."""
        self.found = {}
        for text in path.read_text("utf-8").splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            settings = tuple(line["settings"].items())
            self.found[Entry(line["method"], settings, line["seed"], line["tuning"])] = line
        return self

    def pending(self, path: Path) -> list[Entry]:
        """The trials that are missing; then the seeds of every method's best."""
        self.read(path)
        tuning = [entry for method in self.methods for entry in trials(method)]
        left = [entry for entry in tuning if entry not in self.found]
        return left or [e for method in self.methods for e in self.results(method) if e not in self.found]

    def accuracy(self, entry: Entry) -> float | None:
        """The mean of the last evaluations in percent; None if it was not run."""
        line = self.found.get(entry)
        return None if line is None else fmean(line["evaluations"][-self.last :])

    def best(self, method: str) -> Entry | None:
        """The trial with the best accuracy on the held-out images, of equal ones the first; None until all are run."""
        values = {entry: self.accuracy(entry) for entry in trials(method)}
        whole = {entry: value for entry, value in values.items() if value is not None}
        return max(whole, key=lambda entry: whole[entry]) if len(whole) == len(values) else None

    def results(self, method: str) -> Iterator[Entry]:
        best = self.best(method)
        for seed in range(self.seeds if best is not None else 0):
            assert best is not None
            yield Entry(method, best.settings, seed, False)

    def tests(self, method: str) -> dict[int, float]:
        """Test accuracy by seed."""
        entries = [(entry, self.accuracy(entry)) for entry in self.results(method)]
        return {entry.seed: value for entry, value in entries if value is not None}


def trials(method: str) -> list[Entry]:
    """The runs from which a method's hyper-parameters are chosen: one seed, held-out images."""
    grid = GRIDS[method]
    return [
        Entry(method, tuple(zip(grid, values, strict=True)), TUNING_SEED, True) for values in product(*grid.values())
    ]


def methods() -> list[str]:
    """The catalogue without its controls."""
    controls = {make.__name__.replace("_", "-") for make in algorithms.CONTROLS}
    return [name for name in algorithms.CATALOGUE if name not in controls]


def count(scale: str) -> tuple[int, int]:
    """Runs and rounds."""
    board = make_board(scale)
    runs = len(board.methods) * (TRIALS + board.seeds)
    return runs, runs * bench(scale).rounds


def make_board(scale: str, seeds: int | None = None) -> Board:
    """Without its lines; at smoke scale three methods and two seeds."""
    small = scale == "smoke"
    some = ("fedavg", "fedsam", "fedlesam") if small else tuple(GRIDS)
    return Board(bench(scale).last, seeds or (2 if small else SEEDS), some)
