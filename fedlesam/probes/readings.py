"""RUN/probes.jsonl: a line for every measurement."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedlesam.core.disk import write_text

OLD_KEY = "about"
"""The key of the metadata in older files."""


@dataclass(frozen=True)
class Reading:
    round: int
    """Rounds done when it was taken."""
    probe: str
    values: dict[str, float]
    metadata: dict[str, Any]
    seconds: float
    missing: str = ""
    """What could not be read, and why; empty where all could."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: nothing is said of what is missing where nothing is."""
        return {name: value for name, value in asdict(self).items() if name != "missing" or value}


def read(path: Path) -> list[Reading]:
    """Empty where nothing was measured."""
    if not path.exists():
        return []
    readings = []
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            if OLD_KEY in entry:
                entry["metadata"] = entry.pop(OLD_KEY)
            readings.append(Reading(**entry))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {i}: is not a measurement of a probe: {error}") from error
    return readings


def put(path: Path, new: Reading) -> None:
    """Add a line, or replace the one of the same probe, round and settings; the file is whole at every moment.

    One that could not be read at all is replaced by any later one of the probe and round.
    """

    def goes(old: Reading) -> bool:
        same = (old.round, old.probe) == (new.round, new.probe)
        return same and (old.metadata == new.metadata or bool(old.missing and not old.values))

    kept = [r for r in read(path) if not goes(r)]
    ordered = sorted([*kept, new], key=lambda reading: (reading.round, reading.probe))
    write_text(path, "".join(json.dumps(r.as_dict(), allow_nan=False) + "\n" for r in ordered))
