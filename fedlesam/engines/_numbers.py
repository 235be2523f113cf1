"""Hyper-parameters as tensors: runs that differ only in numbers are one computation."""

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from fedlesam.core.local import LocalTraining
from fedlesam.core.slots import Algorithm

T = TypeVar("T")

DECIDED = (0.0, 1.0)
"""Numbers that the local loop or a rule may decide by (no decay, no correction): they stay numbers."""

PER_ROUND = {"lr": 0.0, "lr_decay": None, "epochs": 1, "steps": None}
"""Settings of local training that are read once a round, outside the map."""


def numbers_of(algorithm: Algorithm, local: LocalTraining) -> dict[str, dict[str, float]]:
    """The hyper-parameters that are numbers, by whose they are."""
    parts: dict[str, Any] = {"perturbation": algorithm.perturbation, "correction": algorithm.correction, "local": local}
    return {
        name: {
            field.name: value
            for field in fields(part)
            if isinstance(value := getattr(part, field.name), float)
            and value not in DECIDED
            and not (name == "local" and field.name in PER_ROUND)
        }
        for name, part in parts.items()
    }


def with_numbers(
    algorithm: Algorithm, local: LocalTraining, numbers: Mapping[str, Mapping[str, Any]]
) -> tuple[Algorithm, LocalTraining]:
    """The same method with other numbers, such as tensors. Their ranges were checked when they were given."""
    rules = {slot: _with(getattr(algorithm, slot), numbers[slot]) for slot in ("perturbation", "correction")}
    return _with(algorithm, rules), _with(local, numbers["local"])


def without_numbers(algorithm: Algorithm, local: LocalTraining) -> tuple[Algorithm, LocalTraining]:
    """What must be the same for runs to share a computation: they are equal then. The server is not part of it."""
    marks = {whose: dict.fromkeys(found, 0.5) for whose, found in numbers_of(algorithm, local).items()}
    algorithm, local = with_numbers(algorithm, local, marks)
    return _with(algorithm, {"server": None, "lr_decay": 0.0}), _with(local, PER_ROUND)


def _with(part: T, values: Mapping[str, Any]) -> T:
    changed = copy.copy(part)
    for name, value in values.items():
        object.__setattr__(changed, name, value)
    return changed
