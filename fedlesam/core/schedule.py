"""The learning rate of a round by name: `0.05,warmup:5,cosine:100`. Imports no PyTorch.

A schedule is a start and factors, separated by commas: lr(t) = start * the product of the factors of round t, t from 0.
"""

import functools
import math
from collections.abc import Callable

from fedlesam.core.names import unknown

START = 0.1
"""Where a schedule begins that names no number."""

GRAMMAR = (
    "a schedule is a start and factors, separated by commas, e.g. 0.05,warmup:5,cosine:100; factors are "
    "cosine:ROUNDS[:END], step:ROUNDS[:FACTOR], decay:FACTOR and warmup:ROUNDS"
)

Factor = Callable[[int], float]


def number_or_schedule(text: str) -> float | str:
    """What a learning rate in a string is: a plain number, which the method's decay goes with, or a schedule.

    Args:
        text: As it was typed; a ValueError says what is wrong.
    """
    try:
        number = float(text)
    except ValueError:
        parse(text)
        return text
    if not math.isfinite(number):
        raise ValueError(f"lr {text!r}: must be a finite number")
    return number


def _cosine(rounds: float, end: float = 0.0) -> Factor:
    """Half a cosine from 1 to `end` over the rounds."""

    def at(t: int) -> float:
        return end + (1 - end) * (1 + math.cos(math.pi * t / rounds)) / 2 if t < rounds else end

    return at


def _step(rounds: float, factor: float = 0.1) -> Factor:
    """Times a factor after every so many rounds."""
    return lambda t: factor ** (t // int(rounds))


def _decay(factor: float) -> Factor:
    """Times a factor after every round, as `lr_decay`."""
    return lambda t: factor**t


def _warmup(rounds: float) -> Factor:
    """From 1 / rounds up to 1 in equal steps."""
    return lambda t: min(1.0, (t + 1) / rounds)


KINDS: dict[str, tuple[Callable[..., Factor], int, int, int]] = {
    "cosine": (_cosine, 1, 2, 1),
    "step": (_step, 1, 2, 1),
    "decay": (_decay, 1, 1, 0),
    "warmup": (_warmup, 1, 1, 1),
}
"""By name: its maker, how few and how many numbers it takes, and how many of them are rounds."""


@functools.cache
def parse(text: str) -> Factor:
    """The learning rate as a function of the round; a ValueError that says what is wrong.

    Args:
        text: A schedule.
    """
    first, *rest = (part.strip() for part in text.split(","))
    start, factors = START, [_factor(part, text) for part in rest]
    try:
        start = float(first)
    except ValueError:
        factors.insert(0, _factor(first, text))
    if not 0 < start < math.inf:
        raise ValueError(f"lr {text!r}: must start above 0, got {first}")
    return lambda t: math.prod((start, *(factor(t) for factor in factors)))


def _factor(part: str, text: str) -> Factor:
    name, *words = part.split(":")
    if name not in KINDS:
        raise ValueError(f"lr {text!r}: {unknown('schedule', name, KINDS)}; {GRAMMAR}")
    make, least, most, rounds = KINDS[name]
    if not least <= len(words) <= most:
        raise ValueError(f"lr {text!r}: {name} takes {least}{f' or {most}' if most > least else ''} numbers; {GRAMMAR}")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise ValueError(f"lr {text!r}: expected numbers after {name}, got {part!r}; {GRAMMAR}") from None
    for place, number in enumerate(numbers):
        if place < rounds and not (number >= 1 and number == int(number)):
            raise ValueError(f"lr {text!r}: {name} takes a whole number of rounds from 1, got {words[place]}")
        if place >= rounds and not 0 < number < math.inf:
            raise ValueError(f"lr {text!r}: {name} takes a factor above 0, got {words[place]}")
    return make(*numbers)
