"""Refuse a value that cannot be meant, naming its owner, its name and the value.

The range of a setting is declared once, beside it: `rho: float = param(0.1, at_least=0)`. `check_params` holds a
dataclass to what it declares; a `Literal` type declares its choices by itself.
"""

import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable
from numbers import Integral
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, Unpack, get_args, get_origin, get_type_hints

LARGEST = 1e30
"""Of a setting: its products with others must still be numbers in single precision."""


class Range(TypedDict, total=False):
    """What a number may be."""

    above: float
    """It must be larger than this."""
    at_least: float
    """It must not be smaller than this."""
    at_most: float
    """It must not be larger than this."""
    below: float
    """It must be smaller than this."""
    whole: bool
    """Whether it must be a whole number."""


def param(default: Any, **bounds: Unpack[Range]) -> Any:
    """A field of a dataclass with its range.

    Args:
        default: its default; None stands for "not set" and is not checked.
        **bounds: it is `above`, `at_least`, `at_most` or `below` a number; `whole`: it is a whole number.
    """
    return dataclasses.field(default=default, metadata={"range": bounds})


def check_params(owner: Any, name: str = "") -> None:
    """A ValueError for the first field of a dataclass that is not what the class declares.

    Args:
        owner: The dataclass.
        name: What messages call it, if not by its class.
    """
    name = name or type(owner).__name__
    kind: Any = type(owner)
    for field, hint in _declared(kind):
        value, bounds = getattr(owner, field.name), field.metadata.get("range")
        if bounds is not None and value is not None:
            check_range(name, field.name, value, bounds)
        elif get_origin(hint) is Literal:
            check_choice(name, field.name, value, get_args(hint))


def check_kind(name: str, value: Any, kind: type) -> None:
    """A ValueError unless an argument is None, or an object of a public class.

    Args:
        name: Of the argument.
        value: What was given.
        kind: The class.
    """
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} must be an object fl.{kind.__name__}(...), got {value!r}")


P = ParamSpec("P")
R = TypeVar("R")


def belongs_to(**owners: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for `__init__`: where an unknown argument is a field of one of these objects, the error says so.

    Args:
        **owners: The dataclass that each of these arguments takes.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in (name for name in kwargs if name not in known):
                for argument, owner in owners.items():
                    if any(field.name == name for field in dataclasses.fields(owner)):
                        what, taken = function.__qualname__.partition(".")[0], f"{owner.__name__}({name}=...)"
                        raise TypeError(f"{what} has no argument {name}; give {argument}=fl.{taken}")
            return function(*args, **kwargs)

        return checked

    return decorate


@functools.cache
def _declared(kind: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(kind)
    return [(field, hints[field.name]) for field in dataclasses.fields(kind)]


def check_range(owner: str, name: str, value: Any, bounds: Range) -> None:
    """A ValueError unless `value` is a finite number in its range.

    Args:
        owner: What has the setting, for the message.
        name: The setting's.
        value: What was given.
        bounds: What it may be.
    """
    if bounds.get("whole"):
        check_count(owner, name, value, int(bounds.get("at_least", 0)))
    else:
        check_number(owner, name, value, above=bounds.get("above"), at_least=bounds.get("at_least"))
    if value > bounds.get("at_most", math.inf):
        raise ValueError(f"{owner}: {name} must be at most {bounds['at_most']:g}, got {_shown(value)}")
    if value >= bounds.get("below", math.inf):
        raise ValueError(f"{owner}: {name} must be below {bounds['below']:g}, got {_shown(value)}")


def is_number(value: object) -> bool:
    """A finite one that a float can hold.

    Args:
        value: Anything.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check_number(
    owner: str, name: str, value: float, *, above: float | None = None, at_least: float | None = None
) -> None:
    """A ValueError unless `value` is a finite number in its range.

    Args:
        owner: What has the setting, for the message.
        name: The setting's.
        value: What was given.
        above: It must be larger than this; None for no such bound.
        at_least: It must not be smaller than this; None for no such bound.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        remedy = f"; give {value.item()!r}" if hasattr(value, "item") and getattr(value, "size", 2) == 1 else ""
        raise ValueError(f"{owner}: {name} must be a number, got {value!r}{remedy}")
    bound = f"above {above:g}" if above is not None else f"at least {at_least:g}" if at_least is not None else "finite"
    inside = (above is None or value > above) and (at_least is None or value >= at_least)
    if value == math.inf:
        raise ValueError(f"{owner}: {name} must be a finite number, got {value}")
    if not (is_number(value) and inside):
        raise ValueError(f"{owner}: {name} must be {bound}, got {_shown(value)}")
    if abs(value) > LARGEST:
        raise ValueError(f"{owner}: {name} must be at most {LARGEST:g}, got {_shown(value)}")


def _shown(value: object) -> str:
    """Python does not write a number of very many digits."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a whole number of {value.bit_length():,} bits"
    return str(value) if isinstance(value, float) else repr(value)


def check_count(owner: str, name: str, value: object, at_least: int = 1) -> None:
    """A ValueError unless `value` is a whole number from `at_least` that fits into 64 bits.

    Args:
        owner: What has the setting, for the message.
        name: The setting's.
        value: What was given.
        at_least: The smallest allowed.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not at_least <= int(value) < 2**63:
        raise ValueError(f"{owner}: {name} must be a whole number from {at_least}, got {_shown(value)}")


def check_choice(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """A ValueError unless `value` is one of `choices`.

    Args:
        owner: What has the setting, for the message.
        name: The setting's.
        value: What was given.
        choices: All that is allowed.
    """
    if value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


LOWER = "lower the learning rate or rho, or clip at a smaller norm"


class NotFinite(ArithmeticError):
    """A client's numbers have exploded; says how and whose, so that it can be dropped or the run can stop.

    Args:
        what: What is not finite, as the message begins.
        round: In which round, from 0.
        client: Of which client.
        remedy: What to do about it; by default a smaller learning rate.
    """

    def __init__(self, what: str, round: int, client: int, remedy: str = LOWER) -> None:
        super().__init__(f"round {round}, client {client}: {what}; {remedy}")
        self.what, self.round, self.client, self.remedy = what, round, client, remedy
