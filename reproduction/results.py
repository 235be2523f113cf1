"""The results of the runs: means over seeds, and why a run is missing."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedlesam.runs.read import Run
from fedlesam.runs.stats import SeedMean, seed_mean
from reproduction.items import RunSpec
from reproduction.scales import Scale

MEASURES = {"last": "last round", "mean_of_last": "mean of the last evaluations", "best": "best round"}


@dataclass(frozen=True)
class Results:
    scale: Scale
    runs: Mapping[RunSpec, list[Run]]
    """By the run without probes: a finished run per seed."""
    missing: Mapping[RunSpec, str]
    """Why there is none."""
    seeds: int

    def of(self, spec: RunSpec) -> list[Run]:
        return self.runs.get(spec.plain, [])

    def why_missing(self, spec: RunSpec) -> str:
        return self.missing.get(spec.plain, "" if self.of(spec) else "not run")

    def accuracy(self, spec: RunSpec, measure: str = "last") -> SeedMean | None:
        """In percent."""
        return seed_mean([100 * run.accuracy[measure] for run in self.of(spec) if measure in run.accuracy])
