"""Why, on the frozen features: every arm at every rho, what its perturbations do step by step and to a whole round.

The runs are those of the tuning seeds of `claim-features` again, on its first problem whose gate passed. Imports no
PyTorch; why_run.py measures.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduction import leaderboard
from reproduction.heads import HEADS, Bench, Trial, known, seeds_of

NAME = "claim-why-features"
SHOWS = "where perturbations point on frozen features, and which of it goes with the gain over arms and rho"
ARMS = (
    *("fedsam", "freesam", "fedlesam"),
    *("fedgamma", "freesam-s", "fedlesam-s", "fedlesam-ahead-s", "shuffled-s"),
    *("fedsmoo", "freesam-d", "fedlesam-d"),
)
COSINES = (
    "e, gradient of the batch",
    "e, gradient of the client",
    "e, global gradient",
    "e, the client's last step",
    "e, last global step",
    "change, e",
    "change, global gradient",
    "change / gradient",
)
"""The last is a ratio of norms; change: the gradient of the client's samples at v + e less that at v."""
MEASURES = (*COSINES, "rise of the client's loss", "rise of the global loss")
"""Means over steps. Cosines, but for the last three; change: the gradient of the client's samples at v + e less that at
v; change / gradient: of the means of their norms."""
OF_STEP = ("step: H e", "step: H rho u(w_before - w)")
"""Predictions of what e changes in a step's gradient, on the client's samples."""
OF_ROUND = ("round: - lr sum H e", "round: - lr sum H rho u(w_before - w)")
"""Of what an e that is fixed for a round changes in a client's update; the Hessians are those on the way without it."""
DIVERGED = 20.0
"""Points below its base: such cells are in no correlation."""


def bench(scale: str) -> Bench:
    return leaderboard.bench(scale)


def trials(bench: Bench, small: bool = False) -> list[Trial]:
    """Bases and arms, every rho, the tuning seeds; learning rates are those that `claim-features` chose."""
    arms = ("fedsam", "fedlesam") if small else tuple(known(ARMS))
    bases = tuple(dict.fromkeys(HEADS[arm].base for arm in arms))
    cells = [(base, None) for base in bases] + [(arm, rho) for arm in arms for rho in bench.rhos]
    return [trial for arm, rho in cells for trial in seeds_of(bench, True, arm, rho, _lr(arm))]


def _lr(arm: str) -> float:
    return leaderboard.DYNAMIC_LR if (HEADS[arm].base or arm) == "feddyn" else leaderboard.LR


@dataclass
class Found:
    """Finished runs, a line each in a file."""

    bench: Bench
    lines: dict[Trial, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, bench: Bench, path: Path) -> "Found":
        found = cls(bench)
        for text in path.read_text("utf-8").splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:  # cut off by a crash: that run is made again
                continue
            if (line["rounds"], line["images"]) == (bench.rounds, bench.images):
                found.lines[Trial(**{name: line[name] for name in Trial.__dataclass_fields__})] = line
        return found

    def cells(self) -> list[tuple[str, float]]:
        """Arms and rho whose seeds, and whose bases', are all there."""
        cells = dict.fromkeys((t.arm, t.rho) for t in self.lines if t.rho is not None)
        whole = [(arm, rho) for arm, rho in cells if len(self.of(arm, rho)) == self.bench.tuning_seeds]
        return [cell for cell in whole if len(self.of(HEADS[cell[0]].base, None)) == self.bench.tuning_seeds]

    def of(self, arm: str, rho: float | None) -> dict[int, dict[str, Any]]:
        """Lines by seed."""
        return {trial.seed: line for trial, line in self.lines.items() if (trial.arm, trial.rho) == (arm, rho)}

    def gain(self, arm: str, rho: float) -> float:
        """Points over the base on the held-out images, mean over the seeds."""
        ours, base = self.of(arm, rho), self.of(HEADS[arm].base, None)
        return fmean(_accuracy(self.bench, ours[seed]) - _accuracy(self.bench, base[seed]) for seed in ours)

    def measure(self, arm: str, rho: float, name: str) -> float | None:
        values = [line["measures"][name] for line in self.of(arm, rho).values() if name in line["measures"]]
        return fmean(values) if values else None

    def sums(self, arm: str, rho: float, name: str) -> tuple[float, ...]:
        """Of a prediction, or of `size`, over the seeds."""
        every = [line["predicted"][name] for line in self.of(arm, rho).values() if name in line["predicted"]]
        return tuple(map(sum, zip(*every, strict=True)))


def _accuracy(bench: Bench, line: dict[str, Any]) -> float:
    return fmean(line["evaluations"][-bench.last :])


def pending(bench: Bench, path: Path, small: bool = False) -> list[Trial]:
    """The runs that are missing."""
    found = Found.read(bench, path).lines
    return [trial for trial in trials(bench, small) if trial not in found]


def count(scale: str) -> tuple[int, int]:
    """Runs and rounds."""
    problem = bench(scale)
    runs = len(trials(problem, scale == "smoke"))
    return runs, runs * problem.rounds
