"""What state the runs of a folder are in."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlesam.core.checks import is_number
from fedlesam.runs import lock
from fedlesam.runs.folder import RunFolder, folders_in
from fedlesam.runs.read import read_run


@dataclass(frozen=True)
class Overview:
    """A run in a line."""

    path: Path
    algorithm: str
    state: str
    """running, finished, interrupted, stopped; or damaged, where the folder cannot be read."""
    why: str
    round: int = 0
    """Rounds done."""
    rounds: int = 0
    accuracy: float | None = None
    """Of the last evaluation; None of a run that is ranked by something else."""
    accuracy_round: int | None = None
    """Rounds done at the last evaluation."""
    evaluated_on: str = ""
    """test, or held-out; empty where the folder cannot be read."""
    seconds_left: float | None = None
    checkpoint_bytes: int = 0
    measure: str = "accuracy"
    """What it is ranked by."""
    score: float | None = None
    """The measure, of the last evaluation."""


def find_runs(folder: Path) -> Iterator[Overview]:
    """Every run folder in a folder, in the order of their paths.

    Args:
        folder: Where to look, at any depth.
    """
    return map(read_overview, folders_in(folder))


def read_overview(folder: RunFolder) -> Overview:
    """What state a run is in; a folder that cannot be read is damaged.

    Args:
        folder: A run folder.
    """
    try:
        run, holder = read_run(folder.path), lock.holder(folder.path)
    except (ValueError, OSError) as error:
        return Overview(folder.path, "?", "damaged", str(error), checkpoint_bytes=size_of(folder.checkpoints))
    state = "running" if holder is not None else str(run.summary.get("state", "interrupted"))
    rounds, values = run.curve(run.measure.key)
    score = values[-1] if values else None
    return Overview(
        path=folder.path,
        algorithm=run.algorithm,
        state=state,
        why=str(run.summary.get("why", "")) if state == "stopped" else "",
        round=len(run.records),
        rounds=run.config.rounds,
        accuracy=score if run.measure.name == "accuracy" else None,
        accuracy_round=rounds[-1] if rounds else None,
        evaluated_on=run.evaluated_on,
        seconds_left=None if holder is None else _seconds_left(holder, len(run.records), run.config.rounds),
        checkpoint_bytes=size_of(folder.checkpoints),
        measure=run.measure.name,
        score=score,
    )


def _seconds_left(holder: dict[str, Any], done: int, rounds: int) -> float | None:
    since, first = holder.get("since", ""), holder.get("round", "")
    if not (is_number(since) and is_number(first)) or not first < done < rounds:
        return None
    return float((rounds - done) * (time.time() - since) / (done - first))


def size_of(folder: Path) -> int:
    """Bytes on disk; a file with two names counts once.

    Args:
        folder: It need not be there.
    """
    sizes = {}
    for path in folder.rglob("*"):
        try:
            found = path.stat()
        except OSError:
            continue
        if path.is_file():
            sizes[found.st_ino] = found.st_size
    return sum(sizes.values())
