"""How a metric is distributed over clients, and the metrics beside the one that ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fedlesam.report.groups import Comparison
from fedlesam.report.tables import Cell, Column, Table, digits, two
from fedlesam.runs.evaluated import HELD_OUT, Measure
from fedlesam.runs.read import Run
from fedlesam.runs.stats import seed_mean

NUMBERS = {"worst_tenth": "worst tenth of the clients", "mean": "mean over clients", "spread": "spread over clients"}
"""Of a distribution over clients, and their names for readers."""

OWN, MIXTURE = "test_clients", "per_client"
"""Where a record has them: of clients' own test samples by metric, and of their mixture of classes."""

CAPTIONS = {
    OWN: "On the clients' own test samples.",
    MIXTURE: "The accuracy by class, weighted by each client's class proportions.",
}
WORDS = "Worst tenth: the mean over the tenth of the clients with the worst values. Spread: their standard deviation."


@dataclass(frozen=True)
class Distribution:
    """A metric over clients."""

    where: str
    """Its entry of a record."""
    measure: Measure
    """The metric, and whether smaller is better."""

    @property
    def key(self) -> str:
        """The first part of its charts' names."""
        return "clients-mixture" if self.where == MIXTURE else f"clients-{self.measure.name}"

    @property
    def title(self) -> str:
        """For readers."""
        return f"{self.measure.title.capitalize()} {'by mixture of classes' if self.where == MIXTURE else 'of clients'}"

    @property
    def caption(self) -> str:
        """What it is measured on, and what its numbers are."""
        return f"{CAPTIONS[self.where]} {WORDS}"


def distributions(runs: Iterable[Run]) -> list[Distribution]:
    """Those that any run has.

    Args:
        runs: The runs.
    """
    found: dict[Distribution, None] = {}
    for record in (record for run in runs for record in run.records):
        if isinstance(own := record.get(OWN), dict):
            found |= dict.fromkeys(Distribution(OWN, Measure(name)) for name in own)
        if isinstance(record.get(MIXTURE), dict):
            found[Distribution(MIXTURE, Measure())] = None
    return list(found)


def curve(run: Run, of: Distribution, number: str) -> tuple[list[int], list[float]]:
    """Rounds done and values.

    Args:
        run: The run.
        of: The metric over clients.
        number: One of `NUMBERS`.
    """
    points = [(r["round"] + 1, value) for r in run.records if (value := _value(r, of, number)) is not None]
    return [x for x, _ in points], [y for _, y in points]


def _value(record: dict[str, Any], of: Distribution, number: str) -> float | None:
    found = record.get(of.where) or {}
    found = found if of.where == MIXTURE else found.get(of.measure.name) or {}
    value: float | None = found.get(number)
    return value


def over_clients(comparison: Comparison) -> Table:
    """The last evaluation of every metric over clients, in the order of the methods.

    Args:
        comparison: The groups of runs that are compared.
    """
    found = distributions(comparison.runs)
    several, rows = any(len(group.runs) > 1 for group in comparison.groups), list[list[Cell]]()
    for one in found:
        for group in comparison.groups:
            cells: list[Cell] = [f"{one.title}{one.measure.unit and ', %'}", group.label]
            for number in NUMBERS:
                ends = [values[-1] for run in group.runs if (values := curve(run, one, number)[1])]
                cells += _mean_and_spread(ends, one.measure.scale, several)
            if any(cell is not None for cell in cells[2:]):
                rows.append(cells)
    columns = [Column("metric"), Column("method")]
    for words in NUMBERS.values():
        columns += [Column(words, digits), *([Column(f"± {words}", digits)] if several else [])]
    caption = f"Values of the last evaluation. {WORDS}{_over_seeds(several)}"
    return Table("clients", "Over clients", columns, rows, caption)


def other_metrics(comparison: Comparison) -> Table:
    """The last evaluation of the metrics that do not rank, the loss among them.

    Args:
        comparison: The groups of runs that are compared.
    """
    known = dict.fromkeys(
        name for run in comparison.runs for record in run.records for name in record.get("metrics") or ()
    )
    measures = [Measure(name) for name in (*known, "loss") if name != comparison.measure.name]
    several, rows = any(len(group.runs) > 1 for group in comparison.groups), list[list[Cell]]()
    for group in comparison.groups:
        cells: list[Cell] = [group.label]
        for measure in measures:
            ends = [values[-1] for run in group.runs if (values := run.curve(measure.key)[1])]
            cells += _mean_and_spread(ends, measure.scale, several)
        if any(cell is not None for cell in cells[1:]):
            rows.append(cells)
    on = HELD_OUT if comparison.evaluated_on == HELD_OUT else "test"
    columns = [Column("method")]
    for measure in measures:
        show = two if measure.percent else digits
        title = f"{on} {measure.title}"
        columns += [Column(f"{title}{measure.unit}", show), *([Column(f"± {title}", show)] if several else [])]
    return Table("metrics", "Other metrics", columns, rows, f"Values of the last evaluation.{_over_seeds(several)}")


def _mean_and_spread(ends: list[float], scale: float, several: bool) -> list[Cell]:
    found = seed_mean([scale * end for end in ends])
    cells: list[Cell] = [None, None] if found is None else [found.mean, found.spread]
    return cells if several else cells[:1]


def _over_seeds(several: bool) -> str:
    return " Means over seeds; ± is their standard deviation." if several else ""
