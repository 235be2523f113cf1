"""What a probe is: settings a user can type, and a measurement that reads a federation and changes nothing."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fedlesam.core.checks import check_count
from fedlesam.core.computing import compute_context
from fedlesam.federation import Federation
from fedlesam.probes.replay import heard

Values = dict[str, float]
Tick = Callable[[int, int], None]
"""Told of progress: how much is done, of how much."""


@dataclass(frozen=True)
class Look:
    """What a probe is shown: a federation between two rounds."""

    federation: Federation
    previous: Tensor | None = None
    """The global model of one round before, where it is known."""
    trains_on: bool = True
    """A round will be trained from here, and the clients' memories are those it begins with."""
    tick: Tick = lambda done, of: None
    missing: list[str] = field(default_factory=list)
    """What a probe could not read there, and why; filled by the probe."""

    @property
    def active(self) -> list[int]:
        """Those of the coming round that are heard: who is silent by dropout trains nothing."""
        return heard(self.federation)


@dataclass(frozen=True)
class Probe:
    """Abstract. The fields are its settings; `every` is how many rounds lie between two measurements."""

    name: ClassVar[str]
    at_end: ClassVar[bool] = True
    """Also of the last model, from which no round is trained any more."""

    every: int = 10

    @property
    def reads_memories(self) -> bool:
        """Whether it looks at what the clients remember."""
        return not self.at_end

    @property
    def reads_previous(self) -> bool:
        """Whether it looks at the global model of one round before."""
        return False

    @property
    def settings(self) -> dict[str, Any]:
        """All but how often it looks."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "every"}

    def __post_init__(self) -> None:
        check_count(self.name, "every", self.every)

    def check(self, federation: Federation) -> None:
        """A ValueError if this probe cannot work on that federation, before anything is trained."""

    def measure(self, look: Look) -> tuple[Values, dict[str, Any]]:
        """Numbers by name, and what a reader must know of them beside the settings (the samples really used)."""
        raise NotImplementedError

    def reading(self, look: Look) -> tuple[Values, dict[str, Any]]:
        """`measure` with the federation's threads, numbers that JSON has, and the settings added."""
        with beside(look.federation):
            values, metadata = self.measure(look)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        wrong = [name for name in values if name not in finite]
        if wrong:
            look.missing.append(f"not a finite number: {', '.join(wrong)}")
        return finite, {**self.settings, **metadata}


def beside(federation: Federation) -> AbstractContextManager[None]:
    """The run's threads, so that the same bits come out while it trains and afterwards; random numbers left alone."""
    return compute_context(federation.threads, federation.state.weights.device)


def every_or(samples: int) -> int | None:
    """`samples` as GlobalLoss wants it; 0 is all of them."""
    return samples or None
