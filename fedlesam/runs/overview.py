"""What state the runs of a folder are in."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
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
    """The run folder."""
    algorithm: str
    """The method's name."""
    state: str
    """running, finished, interrupted, stopped; or damaged, where the folder cannot be read."""
    why: str
    """Why a run was stopped early; empty in other states."""
    round: int = 0
    """Rounds done."""
    rounds: int = 0
    """In total, as its settings say."""
    accuracy: float | None = None
    """Of the last evaluation; None of a run that is ranked by something else."""
    accuracy_round: int | None = None
    """Rounds done at the last evaluation."""
    evaluated_on: str = ""
    """test, or held-out; empty where the folder cannot be read."""
    seconds_left: float | None = None
    """Estimated from the rounds done; None where that is not known."""
    checkpoint_bytes: int = 0
    """Of all checkpoints together."""
    measure: str = "accuracy"
    """What it is ranked by."""
    score: float | None = None
    """The measure, of the last evaluation."""
    smaller: bool = False
    """Whether a smaller measure is better."""
    changed: float = 0.0
    """When something was written there, in seconds since 1970."""


@dataclass(frozen=True)
class Folded:
    """Runs of a comparison or a sweep in a line."""

    path: Path
    """The folder that holds them."""
    runs: list[Overview]
    """One for each."""

    @property
    def methods(self) -> list[str]:
        """Their names, each once."""
        return list(dict.fromkeys(run.algorithm for run in self.runs))

    @property
    def state(self) -> str:
        """How many are in which state."""
        counts = Counter(run.state for run in self.runs)
        return ", ".join(f"{count} {state}" for state, count in counts.most_common())

    @property
    def best(self) -> Overview | None:
        """Of the last evaluations; None where there is none, or where they are of different measures."""
        scored = [run for run in self.runs if run.score is not None]
        if len({(run.measure, run.evaluated_on) for run in scored}) != 1:
            return None
        return max(scored, key=lambda run: (run.score or 0.0) * (-1 if run.smaller else 1))

    @property
    def changed(self) -> float:
        """When something was written to one of them."""
        return max(run.changed for run in self.runs)


def fold(runs: Iterable[Overview], root: Path) -> list[Overview | Folded]:
    """Runs that are together in a folder below the root as one; each by itself where all are in one such folder.

    Args:
        runs: In their order.
        root: The folder they were looked for in.
    """
    runs, together = list(runs), dict[Path, list[Overview]]()
    for run in runs:
        below = run.path.relative_to(root).parts
        together.setdefault(root / below[0] if len(below) > 1 else run.path, []).append(run)
    if len(together) == 1:
        return [*runs]
    return [
        found[0] if len(found) == 1 and found[0].path == path else Folded(path, found)
        for path, found in together.items()
    ]


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
        smaller=run.measure.smaller,
        changed=_changed(folder),
    )


def _changed(folder: RunFolder) -> float:
    known = (folder.summary, folder.metrics, folder.config)
    return max((path.stat().st_mtime for path in known if path.exists()), default=0.0)


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
