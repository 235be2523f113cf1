"""Probes while a run trains: they look between rounds, and their seconds are nobody's but theirs."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from fedlesam.federation import Federation, Record
from fedlesam.probes import readings
from fedlesam.probes.base import Look, Probe
from fedlesam.probes.readings import Reading


def watched(
    federation: Federation, records: Iterable[Record], probes: list[Probe], path: Path, rounds: int
) -> Iterator[Record]:
    """`records` of the rounds as they are trained, with a look before each of them and after the last of `rounds`."""
    previous: Tensor | None = None

    def look() -> None:
        done = federation.state.round
        last = done >= rounds
        for probe in probes:
            if probe.at_end if last else done % probe.every == 0:
                take(probe, Look(federation, previous, trains_on=not last), path)

    look()
    anchor = federation.state.weights
    for record in records:
        yield record
        previous, anchor = anchor, federation.state.weights
        look()


def take(probe: Probe, look: Look, path: Path) -> Reading:
    """Measure, and write the line."""
    began = time.perf_counter()
    values, about = probe.reading(look)
    seconds = time.perf_counter() - began
    reading = Reading(look.federation.state.round, probe.name, values, about, round(seconds, 3))
    readings.put(path, reading)
    return reading
