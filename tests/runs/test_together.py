"""Runs of a sweep that share one computation: each folder as if it had been alone, and resumed like that."""

import dataclasses
import json
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import Call

from fedlesam.engines.signals import Interrupted
from fedlesam.engines.stack import Stack
from fedlesam.federation import Record
from fedlesam.runs.config import RunConfig, resolve
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.runner import execute
from fedlesam.runs.sweep import Event, Sweep
from fedlesam.runs.together import companies, per_stack, train_together

BASE = RunConfig(algorithm="fedlesam-s", rounds=4, epochs=1, samples=400, stack_runs=16)


def config(seed: int, **more: Any) -> RunConfig:
    return resolve(dataclasses.replace(BASE, seed=seed, hyper={"rho": 0.05 * (seed + 1)}, **more))


def numbers(folder: Path) -> tuple[list[dict[str, Any]], bytes]:
    """All that a run found out, without how long it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines], (
        folder / "model.safetensors"
    ).read_bytes()


def train(configs: list[RunConfig], out: Path, watch: Any = None) -> list[type[BaseException] | None]:
    """What became of each run."""
    ends: list[type[BaseException] | None] = [None] * len(configs)

    def one(i: int, stack: Stack | None) -> None:
        def see(record: Record) -> None:
            if watch is not None:
                watch(i, record, stack)

        try:
            execute(configs[i], out / str(configs[i].seed), watch=see, stack=stack)
        except (Interrupted, ValueError) as error:
            ends[i] = type(error)

    train_together(configs[0], [partial(one, i) for i in range(len(configs))])
    return ends


@pytest.mark.usefixtures("forked_jobs")
def test_a_sweep_has_the_runs_of_its_parts(tmp_path: Path) -> None:
    """By two processes, and one run by itself; the width of the stack is in the folder."""
    events: list[Event] = []
    with Sweep(tmp_path / "sweep").open() as sweep:
        tasks = [sweep.task(config(seed), f"seed {seed}") for seed in range(3)]
        sweep.run(tasks, jobs=2, watch=events.append)
        assert not sweep.failed
        assert all(sweep.is_done(task) for task in tasks)
    rounds = [event.round for event in events if event.what == "round" and event.task is tasks[1]]
    assert rounds == [1, 2, 3, 4]
    assert RunFolder(tasks[1].folder).read_config().stack_runs == 16
    assert train([config(1)], tmp_path) == [None]
    assert numbers(tasks[1].folder) == numbers(tmp_path / "1")
    plain = tmp_path / "plain"
    execute(config(1, stack_runs=None), plain)
    ours, theirs = numbers(tasks[1].folder)[0], numbers(plain)[0]
    for one, other in zip(ours, theirs, strict=True):
        assert one.pop("active") == other.pop("active")
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("all_of_them", [True, False])
def test_runs_resume_at_other_rounds_with_the_same_bits(tmp_path: Path, all_of_them: bool) -> None:
    """Ctrl-C stops all of them, an error one; the same call goes on where each was."""
    configs = [config(seed) for seed in range(3)]
    train(configs, tmp_path / "whole")

    def stop(i: int, record: Record, stack: Stack) -> None:
        if i == 1 and record.round == 1:
            if not all_of_them:
                raise Interrupted(signal.SIGTERM)
            stack.stop(signal.SIGTERM)

    out = tmp_path / "parts"
    ends = train(configs, out, stop)
    assert ends == ([Interrupted] * 3 if all_of_them else [None, Interrupted, None])
    done = [RunFolder(out / str(i)).is_finished() for i in range(3)]
    assert done == [not all_of_them, False, not all_of_them]
    assert train(configs, out) == [None] * 3
    for seed in range(3):
        assert numbers(out / str(seed)) == numbers(tmp_path / "whole" / str(seed))


SEVERAL = {
    "compare": (["fedavg", "fedlesam-s", "--seeds", "2"], 2),
    "tune": (["--algorithm", "fedsam", "--over", "rho=0.05,0.5", "--over", "lr=0.03,0.1"], 4),
}
"""Flags of a command, and how many of its runs share a computation."""


@pytest.mark.usefixtures("forked_jobs")
@pytest.mark.parametrize("command", SEVERAL)
def test_runs_of_a_command_are_those_of_the_same_run_alone(
    command: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line to the folders, each trained again by `fedlesam run` with its config."""
    flags, shared = SEVERAL[command]
    tiny = ["--clients", "6", "--active", "2", "--epochs", "1", "--rounds", "2", "--samples", "300"]
    widths, stacked = tmp_path / "widths", Stack.run

    def run(stack: Stack, jobs: Sequence[Callable[[], None]]) -> None:
        with widths.open("a") as file:  # tune's runs are in a process of their own
            file.write(f"{len(jobs)} ")
        stacked(stack, jobs)

    monkeypatch.setattr(Stack, "run", run)
    code, _, err = call(command, *flags, *tiny, "--stack-runs", "8", "--out", "all")
    assert code == 0, err
    folders = sorted(path.parent for path in (tmp_path / "all").rglob("summary.json"))
    assert len(folders) == 4
    assert set(map(int, widths.read_text().split())) == {shared}
    for folder in folders:
        code, _, err = call("run", "--config", str(folder / "config.toml"), "--out", f"alone/{folder.name}", "-q")
        assert code == 0, err
        alone = tmp_path / "alone" / folder.name
        assert numbers(folder) == numbers(alone)
        for name in ("config.toml", "split.safetensors"):
            assert (folder / name).read_bytes() == (alone / name).read_bytes()


def test_a_run_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    bad = config(5, split="no-such-split")
    assert train([config(0), bad, config(1)], tmp_path) == [None, ValueError, None]


def test_companies() -> None:
    """Runs of one method share stacks; several processes share the runs; the rest go one by one."""
    four = [config(seed) for seed in range(4)]
    other = resolve(dataclasses.replace(BASE, algorithm="fedavg"))
    plain = config(0, stack_runs=None)
    assert companies([*four, other, plain, plain]) == [[0, 1, 2, 3], [4], [5], [6]]
    assert companies(four, parts=2) == [[0, 1], [2, 3]]
    assert [len(some) for some in companies([config(seed) for seed in range(40)])] == [16, 16, 8]
    assert per_stack(config(0)) == 4, "sixteen runs fill four stacks, fourteen would leave half of one empty"
    assert [len(some) for some in companies([config(seed) for seed in range(6)], parts=3)] == [2, 2, 2]
