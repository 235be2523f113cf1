"""When a run ends early: a metric that is good enough, or that has not improved for a while. Imports no PyTorch."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fedlesam.federation import Record

SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
OWN = {"accuracy": "test_accuracy", "loss": "test_loss", "train_loss": "train_loss"}
"""Names of a rule, and of a record."""


def first_metric(record: "Record") -> tuple[str, float] | None:
    """The metric that ranks and its value; None where the round was not evaluated.

    Args:
        record: Of a round.
    """
    return None if record.test_loss is None else next(iter(record.metrics.items()), ("loss", record.test_loss))


class Rule(NamedTuple):
    """`accuracy>=0.9`, in parts."""

    name: str
    """Of the metric, or loss."""
    sign: str
    """One of `SIGNS`."""
    value: float
    """With which the metric is compared."""


def parse(text: str) -> Rule:
    """A rule such as `accuracy>=0.9`, or a ValueError.

    Args:
        text: What was typed.
    """
    found = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(>=|<=|>|<)\s*([-+.\deE]+)\s*", text)
    try:
        return Rule(found[1], found[2], float(found[3])) if found else _refuse(text)
    except ValueError:
        return _refuse(text)


def _refuse(text: str) -> Rule:
    raise ValueError(f"stop-when {text!r}: expected a metric, a sign and a number, e.g. accuracy>=0.9 or loss<0.5")


def first_of(metrics: Any) -> tuple[str, bool]:
    """The name of the metric that ranks, and whether less of it is better; without any the loss ranks.

    Args:
        metrics: Of a task, by name.
    """
    name, metric = next(iter(metrics.items()), ("loss", None))
    return name, metric is None or metric.better == "smaller"


def check(stop_when: str | None, patience: int | None, metrics: Sequence[str], tested: bool) -> None:
    """A ValueError for a rule about something that is not measured.

    Args:
        stop_when: A rule.
        patience: Evaluations without a better first metric.
        metrics: What the task measures.
        tested: Whether there are test data.
    """
    known = ["train_loss", *(["loss", *metrics] if tested else [])]
    if stop_when is not None and (name := parse(stop_when).name) not in known:
        raise ValueError(f"stop-when {stop_when!r}: there is no {name!r} in this run; it measures {', '.join(known)}")
    if patience is not None and not tested:
        raise ValueError("patience needs test data, on which the first metric is measured")


def why_end(
    records: Sequence[Mapping[str, Any]], stop_when: str | None, patience: int | None, first: str, smaller: bool
) -> str:
    """Why a run ends after these rounds; empty if it continues. The same for the same records, so also after a resume.

    Args:
        records: Of all rounds so far, as dicts.
        stop_when: A rule.
        patience: Evaluations without a better first metric.
        first: The name of the first metric.
        smaller: Whether less of it is better.
    """
    if not records:
        return ""
    if stop_when is not None:
        name, sign, target = parse(stop_when)
        value = value_of(records[-1], name)
        if value is not None and SIGNS[sign](value, target):
            return f"{name} {value:.4g} {sign} {target:g}"
    if patience is not None and value_of(records[-1], first) is not None:
        values = [value for record in records if (value := value_of(record, first)) is not None]
        signed = [-value for value in values] if smaller else values
        since = len(signed) - 1 - signed.index(max(signed))
        if since >= patience:
            return f"no better {first} in {since} evaluations"
    return ""


def value_of(record: Mapping[str, Any], name: str) -> float | None:
    """A number of a record by its name in a rule; None where the round has none.

    Args:
        record: As a dict, by the names of a Record.
        name: Of a metric, or loss or train_loss.
    """
    found = record.get("metrics", {}).get(name)
    return record.get(OWN.get(name, name)) if found is None else found
