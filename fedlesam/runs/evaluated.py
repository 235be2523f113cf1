"""On which samples a run is evaluated, and by what it is ranked: so files, tables and trackers call its numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlesam.core.checks import is_number
from fedlesam.runs.config import RunConfig

TEST, HELD_OUT = "test", "held-out"

LAST = 10
"""How many of the last evaluations are averaged."""

RENAMED = {
    "test_loss": "held_out_loss",
    "test_accuracy": "held_out_accuracy",
    "accuracy": "held_out_accuracy",
    "score": "held_out_score",
    "metrics": "held_out_metrics",
    "per_client": "held_out_per_client",
}
"""What the numbers of records and summaries are called where they are of training samples held out."""

PLAIN = {RENAMED[name]: name for name in ("test_loss", "test_accuracy", "per_client", "metrics")} | {
    "left_out": "dropped"
}
"""And back, to the names of a Record; `left_out` is what older folders call the dropped clients."""


@dataclass(frozen=True)
class Measure:
    """What runs are ranked by: the first metric of their task, or the loss where it has none."""

    name: str = "accuracy"
    """Of the metric, or loss."""
    smaller: bool = False
    """Whether a smaller value is better."""

    @property
    def key(self) -> str:
        """Its name in a record."""
        return {"accuracy": "test_accuracy", "loss": "test_loss"}.get(self.name, self.name)

    @property
    def percent(self) -> bool:
        """Whether it is shown in percent."""
        return self.name.endswith("accuracy")

    @property
    def scale(self) -> float:
        """What a value is multiplied by to be shown."""
        return 100.0 if self.percent else 1.0

    @property
    def unit(self) -> str:
        """Behind a number."""
        return " %" if self.percent else ""

    @property
    def title(self) -> str:
        """Its name in a text."""
        return self.name.replace("_", " ")

    def show(self, value: float | None, digits: int = 2) -> str:
        """A value without its unit.

        Args:
            value: None where it is not known.
            digits: Behind the point of a percentage.
        """
        if value is None:
            return "-"
        return f"{100 * value:.{digits}f}" if self.percent else f"{value:.{digits + 2}g}"

    def best(self, values: Iterable[float]) -> float | None:
        """The best of some values; None of none.

        Args:
            values: Of this measure.
        """
        return (min if self.smaller else max)(values, default=None)

    def target(self, value: float) -> float:
        """A target as it was typed: of an accuracy 0.8 and 80 are the same.

        Args:
            value: What was typed.
        """
        if not self.percent:
            return value
        share = value / 100 if value > 1 else value
        if not 0 < share <= 1:
            raise ValueError(f"target {value:g}: an accuracy is above 0 and at most 100%")
        return share

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is as good as a target.

        Args:
            value: Of this measure.
            target: Another one.
        """
        return value <= target if self.smaller else value >= target


def measure_of(records: Iterable[Mapping[str, Any]]) -> Measure:
    """What the records of a run are ranked by; accuracy as long as none was evaluated.

    Args:
        records: By the names of a Record.
    """
    for record in records:
        if record.get("metrics"):
            name = next(iter(record["metrics"]))
            return Measure(name, name in record.get("smaller", ()))
        if record.get("test_accuracy") is not None:
            return Measure()
        if record.get("test_loss") is not None:
            return Measure("loss", smaller=True)
    return Measure()


def value_of(record: Mapping[str, Any], name: str) -> float | None:
    """A number of a record, or a metric of it.

    Args:
        record: By the names of a Record.
        name: Of the number.
    """
    if name.startswith(OVER_CLIENTS):
        _, part, metric = name.split("/", 2)
        own: float | None = (record.get("test_clients") or {}).get(metric, {}).get(part)
        return own
    found: float | None = record.get(name)
    return (record.get("metrics") or {}).get(name) if found is None else found


OVER_CLIENTS = "test_clients/"
"""Before the part and the metric of a number over clients: test_clients/worst_tenth/accuracy."""
PARTS = {"mean": "mean", "worst_tenth": "worst tenth", "spread": "spread"}
"""What is known of a metric over clients, and its names for readers."""


def is_over_clients(value: Any) -> bool:
    """Whether it is what a record or a summary has of clients' own test samples.

    Args:
        value: What a file has in its place.
    """
    tables = [value, *value.values()] if isinstance(value, dict) else [None]
    numbers = [number for table in tables[1:] if isinstance(table, dict) for number in table.values()]
    return all(isinstance(table, dict) for table in tables) and all(n is None or is_number(n) for n in numbers)


def over_clients(record: Mapping[str, Any], measure: Measure) -> dict[str, float]:
    """Of clients' own test samples: the parts that are known of a metric.

    Args:
        record: A record, or a summary.
        measure: The metric.
    """
    found = {part: value_of(record, f"{OVER_CLIENTS}{part}/{measure.name}") for part in PARTS}
    return {part: value for part, value in found.items() if value is not None}


def evaluated_on(config: RunConfig) -> str:
    """test, or held-out.

    Args:
        config: Settings of a run.
    """
    return TEST if config.held_out is None else HELD_OUT


def named(values: Mapping[str, Any], on: str) -> dict[str, Any]:
    """A record or a summary with names that say on what it was measured.

    Args:
        values: By the names of a Record or a summary.
        on: test, or held-out.
    """
    return {RENAMED.get(name, name) if on == HELD_OUT else name: value for name, value in values.items()}


def plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl by the names of a Record.

    Args:
        record: The line.
    """
    return {PLAIN.get(name, name): value for name, value in record.items()}


def scores_of(summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """A summary's scores. `last` is the last round's or is missing: older folders have another round's there.

    Args:
        summary: As it is in the folder.
        records: Those of all rounds so far.
    """
    found = next((dict(summary[name]) for name in SCORES if summary.get(name)), {})
    tested = [record["round"] for record in records if "test_loss" in record or "test_accuracy" in record]
    if tested and tested[-1] != records[-1]["round"]:
        found.pop("last", None)
    return {name: value for name, value in found.items() if name not in NAMES}


NAMES = ("metric", "better")
"""Of a table of scores: what they are of."""
SCORES = ("accuracy", "held_out_accuracy", "score", "held_out_score")
"""Tables of a summary, of which it has one."""


def summary_measure(summary: Mapping[str, Any]) -> Measure:
    """What a summary's scores are of.

    Args:
        summary: As it is in the folder.
    """
    found = summary.get("score") or summary.get("held_out_score")
    return Measure(found["metric"], found["better"] == "smaller") if found else Measure()


def scores(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The last round's, the mean of the last evaluations' and the best round's score, each by its name.

    They are called accuracy where they are. A run that stopped after a round without evaluation has none of its last
    round.

    Args:
        records: Those of all rounds so far.
    """
    measure = measure_of(records)
    tested = [(value, r["round"]) for r in records if (value := value_of(r, measure.key)) is not None]
    if not tested:
        return {}
    last = [value for value, _ in tested[-LAST:]]
    sign = -1 if measure.smaller else 1
    best, at = max(tested, key=lambda pair: (sign * pair[0], -pair[1]))
    final = records[-1]
    found: dict[str, Any] = {} if measure.name == "accuracy" else _named_measure(measure)
    if (value := value_of(final, measure.key)) is not None:
        found["last"] = value
    found |= {"mean_of_last": sum(last) / len(last), "evaluations_in_mean": len(last), "best": best, "best_round": at}
    others = {"metrics": final["metrics"]} if final.get("metrics") else {}
    clients: dict[str, Any] = {name: final[name] for name in ("per_client", "test_clients") if name in final}
    return {"accuracy" if measure.name == "accuracy" else "score": found, **others, **clients}


def _named_measure(measure: Measure) -> dict[str, str]:
    return {"metric": measure.name, "better": "smaller" if measure.smaller else "larger"}
