"""Probes while a run trains: they look between rounds, and their seconds are nobody's but theirs."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlesam.federation import Federation, Record
from fedlesam.probes import readings
from fedlesam.probes.base import Look, Probe
from fedlesam.probes.readings import Reading


def watched(federation: Federation, probes: list[Probe], path: Path, rounds: int) -> Iterator[Record]:
    """Train up to `rounds` rounds, with a look before each of them and after the last, which is always evaluated.

    Of a run that goes on from a checkpoint, what was measured there already stays: the model before is not known now.
    """
    previous: Tensor | None = None
    known = {(reading.round, reading.probe) for reading in readings.read(path)} if federation.state.round else set()

    def look() -> None:
        done = federation.state.round
        last = done >= rounds
        for probe in probes:
            if (probe.at_end if last else done % probe.every == 0) and (done, probe.name) not in known:
                take(probe, Look(federation, previous, trains_on=not last), path)

    look()
    known.clear()
    while federation.state.round < rounds:
        anchor = federation.state.weights
        yield federation.round(evaluate=True if federation.state.round + 1 == rounds else None)
        previous = anchor
        look()


def take(probe: Probe, look: Look, path: Path, more: Mapping[str, Any] | None = None) -> Reading:
    """Measure, and write the line; `more` is what else a reader must know of it."""
    began = time.perf_counter()
    values, about = probe.reading(look)
    seconds = time.perf_counter() - began
    reading = Reading(look.federation.state.round, probe.name, values, {**about, **(more or {})}, round(seconds, 3))
    readings.put(path, reading)
    return reading
