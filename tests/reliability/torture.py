"""Runs killed at random instants, resumed and compared bit for bit: `make torture`.

KILLS is how many (1000), SEED which ones (0), JOBS how many runs at a time (2), CASE the number of a single one to see
again what a failure said; its folder then stays.
"""

import json
import logging
import os
import random
import selectors
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from harness import Case, References, result, small
from instrument import Plan
from power_loss import Loss
from processes import fork

METHODS = ("fedlesam-s", "fedsmoo", "fedadam")
MEMORY = (4 * 10**9, 0, 8_000)
"""Bytes: all of it in RAM, none, some."""
LOSSES: tuple[Loss, ...] = ("nothing", "all", "some")
LOST = {"nothing": "kill -9", "all": "and all that was not synced lost", "some": "and some of what was not synced lost"}
PATTERNS = ("", "step", "save_file", "write_parts", "fsync", "replace", "pwrite", "write_text", "unlink")
WORKERS = ("", "step", "save_file", "write_parts", "replace")
"""What the calls are chosen from, in the leader and in a worker."""
MOST = 4
"""Kills of one run."""


@dataclass(frozen=True)
class Kill:
    kind: str
    label: str
    role: str
    loss: Loss
    inside: bool
    """The run was training and not finished."""


@dataclass
class Story:
    """One run and all that was done to it."""

    number: int
    settings: dict[str, Any]
    kills: list[Kill] = field(default_factory=list)
    wrong: str = ""


def kind_of(label: str) -> str:
    """What a process was doing when it was killed."""
    if label == "step":
        return "in local training or evaluation"
    if label.startswith("committed"):
        return "at another call"
    phase, call, place = label.split(" ", 2)
    if call == "save_file" and ("client0" in place or "anchor" in place):
        return "writing a client's memory"
    if call == "write_parts":
        return "writing a segment of memories"
    if call in ("save_file", "write_text", "pwrite"):
        return "writing another file"
    if call == "replace":
        return "before a rename" if phase == "before" else "between a rename and its sync"
    kinds = {
        "fsync": "at a sync",
        "link": "linking a client's memory",
        "unlink": "deleting what is old",
        "rmdir": "deleting what is old",
    }
    return kinds.get(call, "at another call")


def happen(seed: int, number: int, place: Path, references: References) -> Story:
    """Begin a run, kill it up to a few times, let it end, and look."""
    rng = random.Random(f"{seed}/{number}")
    settings: dict[str, Any] = {
        "algorithm": METHODS[number % len(METHODS)],
        "workers": 1 + number // len(METHODS) % 2,
        "store": rng.choice(("shared", "pinned")),
        "memory": rng.choice(MEMORY),
        "checkpoint_every": rng.choice((1, 2)),
        "keep": rng.choice((1, 2)),
    }
    story = Story(number, settings)
    case = Case(place / f"case{number}", small(**settings), rng=rng)
    try:
        expected = references(case.config)
        for _ in range(rng.randint(1, MOST)):
            if not assault(case, story, rng):
                break
        workers = rng.choice((1, 2, 3)) if rng.random() < 0.2 else settings["workers"]
        if not case.finished:
            ended = case.attempt(config=small(**{**settings, "workers": workers}))
            assert ended.code == 0, f"does not resume: {case.error}"
        assert case.attempt().code == 0, "a finished run cannot be repeated"
        found = result(case.run)
        assert found.model == expected.model, "another model"
        assert found.metrics == expected.metrics, "other metrics"
        assert found == expected, f"another summary, or other files: {found.summary}, {found.files}"
        if "CASE" not in os.environ:
            shutil.rmtree(case.path)
    except Exception:
        story.wrong = traceback.format_exc()
    return story


def assault(case: Case, story: Story, rng: random.Random) -> bool:
    """One process and its end; whether it was killed and not just done."""
    role = rng.choice(("leader", "leader", "worker")) if case.config.workers > 1 else "leader"
    pattern = rng.choice(PATTERNS if role == "leader" else WORKERS)
    left = case.config.rounds - case.committed
    each = {"leader": 12 if pattern else 90, "worker": 4 if pattern else 10}[role]
    plan = Plan(pattern, rng.randint(1, max(1, left * each)), role)
    ended = case.attempt(plan)
    if not ended.killed:
        assert ended.code == 0, f"ended by itself: {case.error}"
        return False
    label, loss = case.labels(role)[-1], rng.choice(LOSSES)
    begun = "step" in case.labels()
    kind = kind_of(label) if begun else "before the first step"
    story.kills.append(Kill(kind, label, role, loss, begun and not case.finished))
    case.lose_power(loss)
    return True


def work(pipe: int, seed: int, first: int, jobs: int, kills: int, place: Path) -> None:
    torch.set_num_threads(1)
    logging.getLogger("fedlesam").setLevel(logging.ERROR)  # that rounds are trained again is the point
    references = References(place / f"references{first}")
    number = first
    while kills > 0:
        story = happen(seed, number, place, references)
        os.write(pipe, json.dumps(asdict(story)).encode() + b"\n")
        kills -= sum(kill.inside for kill in story.kills)
        number += jobs


def stories(seed: int, jobs: int, kills: int, place: Path) -> Iterator[Story]:
    """As they come, from several processes."""
    reading = selectors.DefaultSelector()
    children = []
    for first in range(jobs):
        hear, tell = os.pipe()
        share = kills // jobs + (first < kills % jobs)
        children.append(fork(lambda tell=tell, first=first, share=share: work(tell, seed, first, jobs, share, place)))
        os.close(tell)
        reading.register(hear, selectors.EVENT_READ, bytearray())
    try:
        while reading.get_map():
            for key, _ in reading.select():
                said = os.read(key.fd, 1 << 16)
                if not said:
                    reading.unregister(key.fd)
                key.data.extend(said)
                *lines, rest = bytes(key.data).split(b"\n")
                key.data[:] = rest
                for line in lines:
                    content = json.loads(line)
                    yield Story(**{**content, "kills": [Kill(**kill) for kill in content["kills"]]})
    finally:
        for child in children:
            child.end()


def main() -> int:
    kills, seed, jobs = (
        int(os.environ.get(name, default)) for name, default in (("KILLS", 1000), ("SEED", 0), ("JOBS", 2))
    )
    console, began = Console(stderr=True), time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="fedlesam-torture-"))
    if "CASE" in os.environ:
        torch.set_num_threads(1)
        story = happen(seed, int(os.environ["CASE"]), place, References(place / "references"))
        print(json.dumps(asdict(story), indent=2), place, story.wrong, sep="\n")
        return int(bool(story.wrong))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("kills inside a run"))
    told: list[Story] = []
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task(f"seed {seed}", total=kills)
        for story in stories(seed, jobs, kills, place):
            told.append(story)
            progress.advance(bar, sum(kill.inside for kill in story.kills))
            if not console.is_terminal and len(told) % 50 == 0:
                done = sum(kill.inside for one in told for kill in one.kills)
                console.print(f"{done:,} of {kills:,} kills, {time.monotonic() - began:,.0f} s", highlight=False)
            if story.wrong:
                again = f"SEED={seed} CASE={story.number} python tests/reliability/torture.py"
                console.print(f"FAILED, see it again with: {again}\n{story.settings}\n{story.wrong}", markup=False)
    failed = report(told, time.monotonic() - began, seed)
    if not failed:
        shutil.rmtree(place)
    return int(failed > 0)


def report(told: list[Story], seconds: float, seed: int) -> int:
    """Print the figures; how many runs failed."""
    every = [kill for story in told for kill in story.kills]
    inside = [kill for kill in every if kill.inside]
    failed = sum(bool(story.wrong) for story in told)
    print(f"runs                {len(told):>6,}  (seed {seed}, {seconds:,.0f} s)")
    print(f"kills               {len(every):>6,}")
    print(f"  inside a run      {len(inside):>6,}")
    print(f"failures            {failed:>6,}")
    tables = {
        "when": Counter(kill.kind for kill in inside),
        "what was lost": Counter(LOST[kill.loss] for kill in inside),
        "who was at it": Counter(kill.role for kill in inside),
        "method": Counter(s.settings["algorithm"] for s in told for kill in s.kills if kill.inside),
        "workers": Counter(
            f"{s.settings['workers']}{', ' + s.settings['store'] if s.settings['workers'] > 1 else ''}"
            for s in told
            for kill in s.kills
            if kill.inside
        ),
    }
    for title, table in tables.items():
        print(f"\n{title}")
        for name, count in sorted(table.items(), key=lambda pair: -pair[1]):
            print(f"  {name:<38}{count:>6,}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
