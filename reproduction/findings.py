"""The results of a condition by arm, rho and seed."""

from dataclasses import dataclass, field
from statistics import fmean

from fedlesam.runs.stats import SeedMean, seed_mean
from reproduction.studies import Condition

MEASURES = {
    "sharpness": ("sharpness", "ascent", True),
    "relative_sharpness": ("sharpness", "relative_ascent", True),
    "weight_norm": ("sharpness", "weight_norm", True),
    "drift": ("drift", "drift", False),
    "cosine": ("drift", "cosine", False),
    "cosine_last_step": ("estimate", "cosine_previous", False),
}
"""Name: the probe, its value, and whether that of the last model counts or the mean over the rounds after the first."""

By = dict[tuple[str, float | None], dict[int, "Result"]]
"""(arm, rho): by seed."""


@dataclass(frozen=True)
class Result:
    values: dict[str, float]
    """accuracy (percent), seconds (the median round's), dropped (client-rounds), and what was probed."""


@dataclass
class Findings:
    condition: Condition
    tuning: By = field(default_factory=dict)
    results: By = field(default_factory=dict)
    chosen: dict[str, float | None] = field(default_factory=dict)
    """rho of each arm that has one; None if none of its rho has all tuning runs."""

    def choose(self) -> None:
        """The best mean on the held-out images; of equal ones the smaller rho."""
        for arm in self.condition.tuned if self.condition.tuning_seeds else ():
            scores = {rho: self.validation(arm, rho) for rho in sorted(self.condition.rhos)}
            whole = {rho: round(score.mean, 9) for rho, score in scores.items() if score is not None}
            self.chosen[arm] = max(whole, key=lambda rho: (whole[rho], -rho)) if whole else None

    def validation(self, arm: str, rho: float) -> SeedMean | None:
        found = self.tuning.get((arm, rho), {})
        if len(found) < self.condition.tuning_seeds:
            return None
        return seed_mean([of.values["accuracy"] for of in found.values()])

    def at(self, arm: str, rho: float | None) -> dict[int, Result]:
        """The results by seed at a rho."""
        return self.results.get((arm, rho), {})

    def of(self, arm: str, measure: str = "accuracy") -> dict[int, float]:
        """By seed, at the chosen rho."""
        found = self.results.get((arm, self.chosen.get(arm)), {})
        return {seed: of.values[measure] for seed, of in found.items() if measure in of.values}

    def test(self, arm: str, rho: float | None) -> SeedMean | None:
        return seed_mean([of.values["accuracy"] for of in self.results.get((arm, rho), {}).values()])

    def mean(self, arm: str, measure: str) -> float | None:
        values = self.of(arm, measure)
        return fmean(values.values()) if values else None
