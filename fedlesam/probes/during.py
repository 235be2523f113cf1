"""Probes while a run trains: they measure between rounds, and their seconds do not count as training."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlesam.core.checks import NotFinite
from fedlesam.engines.base import is_client_error, reason
from fedlesam.federation import Federation, Record
from fedlesam.probes import readings
from fedlesam.probes.base import Look, Probe
from fedlesam.probes.loss import Unreadable
from fedlesam.probes.readings import Reading

log = logging.getLogger("fedlesam")


class Watch:
    """Trains a federation and measures before each round and after the last.

    A run that resumes from a checkpoint measures there again. It finds the same values, and a measurement that was
    interrupted is repeated.

    Args:
        federation: What is trained.
        probes: What is measured.
        path: RUN/probes.jsonl.
        previous: The global model that the last round began with, if it is known.
    """

    def __init__(self, federation: Federation, probes: list[Probe], path: Path, previous: Tensor | None = None) -> None:
        self.federation, self.probes, self.path, self.previous = federation, probes, path, previous
        self._logged: set[str] = set()

    @property
    def to_keep(self) -> Tensor | None:
        """What a checkpoint must hold for the probes, in addition to the state of the federation."""
        return self.previous if any(probe.reads_previous for probe in self.probes) else None

    def train(self, rounds: int, ended: Callable[[], object] = lambda: None) -> Iterator[Record]:
        """Train, and yield a record per round; the last is always evaluated.

        Args:
            rounds: Rounds in total, with those already done.
            ended: Asked before every round: whether the run ends early.
        """
        self._look(0 if ended() else rounds)
        while self.federation.state.round < rounds and not ended():
            anchor = self.federation.state.weights
            last = self.federation.state.round + 1 == rounds
            record = self.federation.round(evaluate=True if last else None)
            self.previous = anchor
            yield record
            self._look(0 if ended() else rounds)

    def _look(self, rounds: int) -> None:
        done = self.federation.state.round
        last = done >= rounds
        for probe in self.probes:
            if probe.at_end if last else done % probe.every == 0:
                reading = take(probe, Look(self.federation, self.previous, trains_on=not last), self.path)
                if reading.missing and not reading.values and probe.name not in self._logged:
                    self._logged.add(probe.name)  # once: all of them are in probes.jsonl
                    log.warning("round %d: the probe %s measured nothing: %s", done, probe.name, reading.missing)


def take(probe: Probe, look: Look, path: Path, more: Mapping[str, Any] | None = None) -> Reading:
    """Measure and write the line.

    If a probe fails, the reading has the reason and training continues. Errors of the machine, such as a full disk, are
    raised.

    Args:
        probe: What to measure.
        look: The federation.
        path: RUN/probes.jsonl.
        more: Metadata to add.
    """
    look, began = dataclasses.replace(look, missing=[]), time.perf_counter()
    try:
        values, metadata = probe.reading(look)
    except Exception as error:
        if not is_client_error(error):
            raise
        whose = f"client {error.client}: " if isinstance(error, NotFinite) else ""
        look.missing.append(str(error) if isinstance(error, Unreadable) else whose + reason(error))
        values, metadata = {}, probe.settings
    seconds, missing = round(time.perf_counter() - began, 3), "; ".join(look.missing)
    reading = Reading(look.federation.state.round, probe.name, values, {**metadata, **(more or {})}, seconds, missing)
    readings.put(path, reading)
    return reading
