"""What probes measured, in files of a run folder: probes.jsonl and surface-*.safetensors. Imports no PyTorch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedlesam.core.disk import replacing, write_text

OLD_KEY = "about"
"""The key of the metadata in older files."""


@dataclass(frozen=True)
class Reading:
    """One measurement: a line of probes.jsonl.

    Args:
        round: Rounds done when it was taken.
        probe: The name of the probe.
        values: Numbers by name.
        metadata: How it was measured: radius, samples and so on.
        seconds: How long it took.
        missing: What could not be read, and why; empty if nothing is missing.
    """

    round: int
    probe: str
    values: dict[str, float]
    metadata: dict[str, Any]
    seconds: float = 0.0
    missing: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without an empty `missing`."""
        return {name: value for name, value in asdict(self).items() if name != "missing" or value}


def read(path: Path) -> list[Reading]:
    """All readings of a file; none if there is no file. A last line that was cut off by a crash is dropped.

    Args:
        path: RUN/probes.jsonl.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for i, line in enumerate(lines, 1):
        try:
            found.append(_reading(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            if i == len(lines) and not line.endswith("}"):
                break
            raise ValueError(f"{path}, line {i}: is not a measurement of a probe: {error!r}") from error
    return found


def _reading(entry: dict[str, Any]) -> Reading:
    values = {name: value for name, value in entry["values"].items() if isinstance(value, int | float)}
    metadata = dict(entry.get("metadata") or entry.get(OLD_KEY) or {})
    seconds, missing = float(entry.get("seconds") or 0), str(entry.get("missing") or "")
    return Reading(int(entry["round"]), str(entry["probe"]), values, metadata, seconds, missing)


def put(path: Path, new: Reading) -> None:
    """Add a line, or replace the one of the same probe, round and settings; the file is whole at every moment.

    A reading without any value is replaced by any later one of its probe and round.

    Args:
        path: RUN/probes.jsonl.
        new: The reading.
    """

    def is_replaced(old: Reading) -> bool:
        same = (old.round, old.probe) == (new.round, new.probe)
        return same and (old.metadata == new.metadata or bool(old.missing and not old.values))

    kept = [reading for reading in read(path) if not is_replaced(reading)]
    ordered = sorted([*kept, new], key=lambda reading: (reading.round, reading.probe))
    write_text(path, "".join(json.dumps(r.as_dict(), allow_nan=False) + "\n" for r in ordered))


@dataclass(frozen=True)
class Surface:
    """Loss and accuracy on a grid around the weights, along one or two directions.

    Args:
        x: Steps along each direction.
        loss: One value per step, or [y, x].
        accuracy: On the same samples, a share; NaN if the targets are not classes.
        metadata: How it was measured: samples, seeds and so on.
    """

    x: NDArray[np.float64]
    loss: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    metadata: dict[str, Any]

    @property
    def dims(self) -> int:
        """1 or 2."""
        return self.loss.ndim


def write_surface(found: Surface, path: Path) -> None:
    """Write a surface; the file is whole at every moment.

    Args:
        found: The surface.
        path: RUN/surface-1d.safetensors or RUN/surface-2d.safetensors.
    """
    axes = {"x": found.x} if found.dims == 1 else {"x": found.x, "y": found.x.copy()}
    tensors = {**axes, "loss": found.loss, "accuracy": found.accuracy}
    with replacing(path) as beside:
        save_file(tensors, str(beside), metadata={"metadata": json.dumps(found.metadata)})


def read_surface(path: Path) -> Surface:
    """Read a surface; a ValueError if the file is something else.

    Args:
        path: The file.
    """
    try:
        with safe_open(path, framework="np") as file:
            x, loss, accuracy = (np.asarray(file.get_tensor(k), np.float64) for k in ("x", "loss", "accuracy"))
            header = file.metadata() or {}
            metadata = dict(json.loads(header.get("metadata") or header.get(OLD_KEY) or "{}"))
        if loss.ndim not in (1, 2) or not loss.shape == accuracy.shape == x.shape * loss.ndim:
            raise ValueError(f"loss has the shape {loss.shape}, not {x.shape * min(loss.ndim, 2)}")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is not a loss surface: {error}; delete it and measure again") from error
    return Surface(x, loss, accuracy, metadata)
