"""On which samples a run is evaluated. Its files, tables and trackers call the numbers by them."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedlesam.runs.config import RunConfig

TEST, HELD_OUT = "test", "held-out"

LAST = 10
"""How many of the last evaluations are averaged."""

RENAMED = {
    "test_loss": "held_out_loss",
    "test_accuracy": "held_out_accuracy",
    "accuracy": "held_out_accuracy",
    "per_client": "held_out_per_client",
}
"""What the numbers of records and summaries are called where they are of training samples held out."""

PLAIN = {RENAMED[name]: name for name in ("test_loss", "test_accuracy", "per_client")} | {"left_out": "dropped"}
"""And back, to the names of a Record; `left_out` is what older folders call the dropped clients."""


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


def accuracy_of(summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """A summary's accuracies. `last` is the last round's or is missing: older folders have another round's there.

    Args:
        summary: As it is in the folder.
        records: Those of all rounds so far.
    """
    found = dict(summary.get("accuracy") or summary.get("held_out_accuracy") or {})
    tested = [record["round"] for record in records if "test_accuracy" in record]
    if tested and tested[-1] != records[-1]["round"]:
        found.pop("last", None)
    return found


def accuracies(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The last round's, the mean of the last evaluations' and the best round's accuracy, each by its name.

    A run that stopped after a round without evaluation has no accuracy of its last round.

    Args:
        records: Those of all rounds so far.
    """
    tested = [(r["test_accuracy"], r["round"]) for r in records if r.get("test_accuracy") is not None]
    if not tested:
        return {}
    last = [accuracy for accuracy, _ in tested[-LAST:]]
    best, at = max(tested, key=lambda pair: (pair[0], -pair[1]))
    final = records[-1]
    found = {"last": final["test_accuracy"]} if final.get("test_accuracy") is not None else {}
    found |= {"mean_of_last": sum(last) / len(last), "evaluations_in_mean": len(last), "best": best, "best_round": at}
    return {"accuracy": found, **({"per_client": final["per_client"]} if "per_client" in final else {})}
