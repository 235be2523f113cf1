"""What a setting can be: how its text is read, what it is called in errors, and its flag."""

import math
import re
from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any, Literal, get_args, get_origin

from fedlesam.core import schedule

Value = int | float | str | bool


def number(text: str) -> float:
    """A finite number.

    Args:
        text: What was typed.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {text!r}")
    return value


def switch(value: str) -> bool:
    """true, yes and on, or false, no and off.

    Args:
        value: What was typed.
    """
    if value.lower() not in ("true", "false", "yes", "no", "on", "off"):
        raise ValueError(f"expected true or false, got {value!r}")
    return value.lower() in ("true", "yes", "on")


def byte_size(value: str) -> int:
    """`4GB`, `500MB`, `2e9` or a number of bytes.

    Args:
        value: What was typed.
    """
    match = re.fullmatch(r"([\d.eE+]+)\s*([kKmMgGtT]?)[bB]?", value.strip())
    if not match:
        raise ValueError(value)
    return int(float(match[1]) * 1000 ** " kmgt".index(match[2].lower() or " "))


def active_clients(value: str) -> int | float:
    """`10` is a count, `0.1` or `10%` a share.

    Args:
        value: What was typed.
    """
    if value.endswith("%"):
        return share(value)
    return int(value) if re.fullmatch(r"[+-]?\d+", value) else number(value)


def share(value: str) -> float:
    """`0.2` or `20%`.

    Args:
        value: What was typed.
    """
    return number(value[:-1]) / 100 if value.endswith("%") else number(value)


def rate(value: str) -> float | str:
    """A number, or a schedule such as `0.05,warmup:5,cosine:100`.

    Args:
        value: What was typed.
    """
    return schedule.number_or_schedule(value)


def epoch_range(value: str) -> int | float | str:
    """`5`, `0.5`, or `1-5` to draw from for each client and round.

    Args:
        value: What was typed.
    """
    if re.fullmatch(r"\d+-\d+", value):
        return value
    return int(value) if re.fullmatch(r"\d+", value) else number(value)


def interval(value: str) -> int | str:
    """`10` rounds, or a time such as `300s`, `5min` or `1h`.

    Args:
        value: What was typed.
    """
    if re.fullmatch(r"\d+", value):
        return int(value)
    seconds_of(value)
    return value


def seconds_of(interval: int | str) -> float | None:
    """An interval's seconds; None if it is a number of rounds.

    Args:
        interval: Rounds or a time, as of `interval`.
    """
    if isinstance(interval, int):
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h)", interval.strip())
    if not match:
        raise ValueError(interval)
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2][0]]


KINDS: dict[Callable[[str], Value], tuple[str, tuple[type, ...]]] = {
    int: ("a whole number", (int,)),
    number: ("a number", (int, float)),
    str: ("text", (str,)),
    switch: ("true or false", (bool,)),
    byte_size: ("a size such as 4GB or 500MB", (int,)),
    active_clients: ("a count such as 10, or a share such as 0.1 or 10%", (int, float, str)),
    share: ("a share such as 0.2 or 20%", (int, float, str)),
    epoch_range: ("a number such as 5 or 0.5, or a range such as 1-5", (int, float, str)),
    rate: (f"a number, or a schedule ({schedule.GRAMMAR})", (int, float, str)),
    interval: ("rounds such as 10, or a time such as 300s, 5min or 1h", (int, str)),
}
BY_TYPE: dict[type, Callable[[str], Value]] = {int: int, float: number, bool: switch, str: str}
"""How the text of a field of this type is read, if the field does not say."""


@dataclass(frozen=True)
class Option:
    """What a field is to a user."""

    group: str
    """The heading of the help under which its flag stands."""
    help: str
    """What the setting is, in a line."""
    kind: Callable[[str], Value] = number
    """Reads its text; raises a ValueError for one that is none."""
    metavar: str = ""
    """What stands for the value in the help; empty for the default."""
    choices: tuple[str, ...] = ()
    """Those of the field's type, if it is a Literal."""


def option(
    default: Value | None, group: str, help: str, kind: Callable[[str], Value] | None = None, metavar: str = ""
) -> Any:
    """A field of RunConfig with what flags, files and help need of it.

    Args:
        default: None where `resolve` settles it.
        group: Of the help.
        help: A line for the help.
        kind: Parses what a user types; None is that of the field's type.
        metavar: What stands for the value in the help.
    """
    return field(default=default, metadata={"group": group, "help": help, "kind": kind, "metavar": metavar})


def option_of(declared: Field[Any]) -> Option:
    """What a field of `option` is to a user, with what its type says of it.

    Args:
        declared: The field.
    """
    given, literal = dict(declared.metadata), get_origin(declared.type) is Literal
    kind = given.pop("kind") or BY_TYPE[str if literal else (*get_args(declared.type), declared.type)[0]]
    return Option(**given, kind=kind, choices=get_args(declared.type) if literal else ())
