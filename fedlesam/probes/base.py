"""What a probe is: settings a user can type, and a measurement that reads a federation and changes nothing."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fedlesam.core.checks import check_params, param
from fedlesam.core.computing import compute_context
from fedlesam.federation import Federation
from fedlesam.probes.loss import GlobalLoss

Values = dict[str, float]
Tick = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


@dataclass(frozen=True)
class Look:
    """What a probe is shown: a federation between two rounds.

    Args:
        federation: The federation.
        previous: The global model of one round before, if it is known.
        trains_on: A round will be trained from here, and the clients' memories are those it begins with.
        tick: Called with how much is done, and of how much.
        missing: What a probe could not read, and why; filled by the probe.
    """

    federation: Federation
    previous: Tensor | None = None
    trains_on: bool = True
    tick: Tick = lambda done, of: None
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Probe:
    """Abstract. Its fields are the settings that a user can type; their ranges are declared with `param`.

    Args:
        every: Rounds between two measurements.
    """

    name: ClassVar[str]
    """By which the probe is asked for."""
    at_end: ClassVar[bool] = True
    """Also measured of the last model, from which no round is trained."""
    reads_previous: ClassVar[bool] = False
    """Needs the global model of one round before."""

    every: int = param(10, at_least=1, whole=True)

    @property
    def reads_memories(self) -> bool:
        """Whether it needs the memories of the clients."""
        return not self.at_end

    @property
    def settings(self) -> dict[str, Any]:
        """All fields but `every`; `samples` is the last."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "every"]
        return {name: getattr(self, name) for name in sorted(names, key=lambda name: name == "samples")}

    def __post_init__(self) -> None:
        check_params(self, self.name)

    def check(self, federation: Federation) -> None:
        """A ValueError if this probe cannot work on that federation; called before anything is trained.

        Args:
            federation: What will be measured.
        """

    def measure(self, look: Look) -> tuple[Values, dict[str, Any]]:
        """Measure.

        Args:
            look: The federation, and where to report progress and what is missing.

        Returns:
            Numbers by name, and metadata beyond the settings, such as the number of samples used.
        """
        raise NotImplementedError

    def reading(self, look: Look) -> tuple[Values, dict[str, Any]]:
        """`measure` with the threads of the federation; only finite numbers, and the settings in the metadata.

        Args:
            look: As for `measure`.
        """
        with run_context(look.federation):
            values, metadata = self.measure(look)
        if wrong := [name for name, value in values.items() if not math.isfinite(value)]:
            look.missing.append(f"not a finite number: {', '.join(wrong)}")
        return {name: values[name] for name in values if name not in wrong}, {**self.settings, **metadata}


@dataclass(frozen=True)
class SampledProbe(Probe):
    """Abstract. A probe of the global loss.

    Args:
        samples: About how many training samples to use, the same number of each client; 0 takes all.
    """

    samples: int = param(1000, at_least=0, whole=True)

    def loss(self, federation: Federation) -> GlobalLoss:
        """The global loss on these samples.

        Args:
            federation: Between two rounds.
        """
        return GlobalLoss.of(federation, self.samples or None)


def run_context(federation: Federation) -> AbstractContextManager[None]:
    """The threads of the run, so that the same bits come out while it trains and later; random numbers are kept.

    Args:
        federation: The run.
    """
    return compute_context(federation.threads, federation.state.weights.device, federation.execution.precision)
