"""Refuse a number that cannot be meant, naming its owner, its name and its value."""

import sys

LARGEST = 1e30
"""Of a setting: its products with others must still be numbers in single precision."""


def is_number(value: object) -> bool:
    """A finite one that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check_number(
    owner: str, name: str, value: float, *, above: float | None = None, at_least: float | None = None
) -> None:
    """A ValueError unless `value` is a finite number in its range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{owner}: {name} must be a number, got {value!r}")
    bound = f"above {above:g}" if above is not None else f"at least {at_least:g}" if at_least is not None else "finite"
    inside = (above is None or value > above) and (at_least is None or value >= at_least)
    if not (is_number(value) and inside):
        raise ValueError(f"{owner}: {name} must be {bound}, got {value}")
    if abs(value) > LARGEST:
        raise ValueError(f"{owner}: {name} must be at most {LARGEST:g}, got {value}")


def check_count(owner: str, name: str, value: object, at_least: int = 1) -> None:
    """A ValueError unless `value` is a whole number from `at_least` that fits into 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < 2**63:
        raise ValueError(f"{owner}: {name} must be a whole number from {at_least}, got {value!r}")


def check_choice(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """A ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


LOWER = "lower the learning rate or rho, or clip at a smaller norm"


class NotFinite(ArithmeticError):
    """A client's numbers have exploded; says how and whose, so that it can be left out or the run can stop."""

    def __init__(self, what: str, round: int, client: int, remedy: str = LOWER) -> None:
        super().__init__(f"round {round}, client {client}: {what}; {remedy}")
        self.what, self.round, self.client, self.remedy = what, round, client, remedy
