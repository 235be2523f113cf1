"""Hyper-parameters chosen on training data that is held out: the test data is never looked at."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlesam.core import disk
from fedlesam.core.names import file_name
from fedlesam.runs import config as configs
from fedlesam.runs.config import OPTIONS, RunConfig
from fedlesam.runs.evaluated import Measure
from fedlesam.runs.kinds import Value
from fedlesam.runs.read import read_run
from fedlesam.runs.stats import SeedMean, seed_mean
from fedlesam.runs.sweep import Sweep, Task, Watch

HELD_OUT = 0.1
FIXED = (
    "task",
    "metric",
    "data",
    "data_dir",
    "held_out",
    "samples",
    "split",
    "seed",
    "clients",
    "active",
    "rounds",
    "threads",
    "device",
)
"""What makes the problem, and is not a choice of the method."""


@dataclass(frozen=True)
class Range:
    """From low to high; on a logarithmic scale where low is above 0."""

    low: float
    """The smallest value that is tried."""
    high: float
    """The largest value that is tried."""


Space = Mapping[str, tuple[Value, ...] | Range]


@dataclass(frozen=True)
class Trial:
    """Values of what is searched, and how well they did."""

    values: Mapping[str, Value]
    """By the names of what is searched."""
    score: SeedMean | None
    """Mean over seeds of the mean of the last evaluations on held-out samples, as it is shown; None if a run failed."""
    measure: Measure = Measure()
    """What the score is of."""

    @property
    def quality(self) -> float:
        """The score, with the sign by which larger is better."""
        mean = self.score.mean if self.score is not None else 0.0
        return -mean if self.measure.smaller else mean


def parse_space(texts: Sequence[str]) -> dict[str, tuple[Value, ...] | Range]:
    """`rho=0.01,0.1,1` are values, `rho=0.001..1` is a range.

    Args:
        texts: As typed behind `--over`.
    """
    space: dict[str, tuple[Value, ...] | Range] = {}
    for text in texts:
        name, equals, right = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name or not right.strip(" ,"):
            raise ValueError(
                f"--over {text}: expected NAME=VALUE,VALUE,... or NAME=LOW..HIGH, e.g. --over rho=0.01,0.1,1"
            )
        if name in FIXED:
            raise ValueError(f"--over {text}: {name} belongs to the problem, not to the method; give it as --{name}")
        if name in space:
            raise ValueError(f"--over {text}: {name} is named twice")
        low, dots, high = right.partition("..")
        if dots:
            ends = [float(configs.parse(name, end, f"--over {text}")) for end in (low, high)]
            if not ends[0] < ends[1]:
                raise ValueError(f"--over {text}: the range must run upwards")
            space[name] = Range(*ends)
        else:
            space[name] = tuple(configs.parse(name, value.strip(), f"--over {text}") for value in right.split(","))
    if not space:
        raise ValueError("nothing to tune: name at least one hyper-parameter, e.g. --over rho=0.01,0.1,1")
    return space


def grid(space: Space) -> list[Mapping[str, Value]]:
    """All combinations of values; a range is refused.

    Args:
        space: What is searched.
    """
    for name, values in space.items():
        if isinstance(values, Range):
            raise ValueError(
                f"--over {name}={values.low:g}..{values.high:g}: a range needs --trials; give values for a grid, "
                f"e.g. --over {name}={values.low:g},{values.high:g}"
            )
    choices: list[tuple[Value, ...]] = [values for values in space.values() if not isinstance(values, Range)]
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*choices)]


def prepared(base: RunConfig) -> RunConfig:
    """With training samples held out, always: whatever is chosen here, the test data had no part in it.

    Args:
        base: Settings of all runs, not resolved.
    """
    held_out, threads = HELD_OUT if base.held_out is None else base.held_out, base.threads or 1
    return dataclasses.replace(base, held_out=held_out, threads=threads)


def budget(base: RunConfig, trials: int, seeds: int) -> str:
    """What a search will cost, in a line.

    Args:
        base: Settings of all runs, not resolved.
        trials: How many.
        seeds: Runs per trial.
    """
    runs, held_out = trials * seeds, configs.resolve(prepared(base)).held_out
    part = f"{held_out:,} samples" if isinstance(held_out, int) else f"{100 * (held_out or 0):g} %"
    return (
        f"budget: {trials} trials x {seeds} seed{'s' if seeds > 1 else ''} = {runs} runs, "
        f"{runs * base.rounds:,} rounds; judged on {part} of the training data, held out"
    )


def default_folder(base: RunConfig, space: Sequence[str], trials: int | None, seeds: int) -> Path:
    """Made from the search, so that repeating a command finds its folder again.

    Args:
        base: Settings of all runs.
        space: What is searched, as typed.
        trials: How many are drawn; None for a grid.
        seeds: Runs per trial.
    """
    sign = json.dumps([configs.as_table(prepared(base)), sorted(space), trials, seeds], sort_keys=True)
    name = hashlib.sha256(sign.encode()).hexdigest()[:8]
    return Path("runs") / file_name(f"tune-{base.algorithm}-{base.data}-{name}")


def write_best(base: RunConfig, found: Sequence[Trial], out: Path) -> Path | None:
    """Write the settings of the best trial, with nothing held out; None where all trials failed.

    Args:
        base: Settings of all runs.
        found: The trials, the best first.
        out: The folder of the search.
    """
    best = next((trial for trial in found if trial.score is not None), None)
    if best is None:
        return None
    chosen = dataclasses.replace(configs.resolve(configs.update(base, best.values)), held_out=None)
    disk.write_text(out / "best.toml", configs.write(chosen))
    return out / "best.toml"


def tune(
    base: RunConfig,
    search: "list[Mapping[str, Value]] | Optuna",
    sweep: Sweep,
    seeds: int,
    jobs: int,
    begin: Callable[[Sequence[Task]], Watch],
) -> list[Trial]:
    """Do every trial; best first, those that failed last. What is in the sweep's folder is not done again.

    Args:
        base: Settings of all runs, not resolved.
        search: The values of every trial, or what draws them.
        sweep: An open one.
        seeds: Runs per trial.
        jobs: Runs at once.
        begin: Called with the runs that are left; returns what is called with their events.
    """
    found: list[Trial] = []
    for batch in search.batches() if isinstance(search, Optuna) else [search]:
        tasks = [_tasks(base, values, sweep, seeds) for values in batch]
        left = [task for some in tasks for task in some if not sweep.is_done(task)]
        if left:
            sweep.run(left, jobs, begin(left))
        done = [Trial(values, *_score(sweep, some)) for values, some in zip(batch, tasks, strict=True)]
        if isinstance(search, Optuna):
            search.tell(done)
        found += done
    return sorted(found, key=lambda trial: (trial.score is None, -trial.quality))


def _tasks(base: RunConfig, values: Mapping[str, Value], sweep: Sweep, seeds: int) -> list[Task]:
    label = ", ".join(f"{name} {value}" for name, value in values.items())
    config = configs.resolve(configs.update(prepared(base), values))
    each = range(base.seed, base.seed + seeds)
    return [sweep.task(dataclasses.replace(config, seed=seed), label) for seed in each]


def _score(sweep: Sweep, tasks: list[Task]) -> tuple[SeedMean | None, Measure]:
    runs = [read_run(task.folder) for task in tasks if sweep.is_done(task)]
    scores = [run.measure.scale * run.scores["mean_of_last"] for run in runs if run.scores]
    return seed_mean(scores) if len(scores) == len(tasks) else None, runs[0].measure if runs else Measure()


class Optuna:
    """Trials drawn by Optuna's TPE from the seed. Nothing is stored: asked again, it draws the same trials, and their
    runs are in the folder.

    Args:
        space: What is searched.
        trials: How many.
        seed: Of the sampler.
        at_once: Trials of a batch.
    """

    def __init__(self, space: Space, trials: int, seed: int, at_once: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ValueError("--trials needs Optuna: pip install 'fedlesam[tune]', or give a grid") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.trials, self.at_once = space, trials, at_once
        self.failed = optuna.trial.TrialState.FAIL
        self.study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        self.asked: list[Any] = []

    def batches(self) -> Iterator[list[Mapping[str, Value]]]:
        """Trials to be done at once, until all are drawn."""
        for begin in range(0, self.trials, self.at_once):
            self.asked = [self.study.ask() for _ in range(min(self.at_once, self.trials - begin))]
            yield [{name: self._draw(trial, name, of) for name, of in self.space.items()} for trial in self.asked]

    def tell(self, done: Sequence[Trial]) -> None:
        """How the trials of the last batch did.

        Args:
            done: In the order of the batch.
        """
        for trial, result in zip(self.asked, done, strict=True):
            if result.score is None:
                self.study.tell(trial, state=self.failed)
            else:
                self.study.tell(trial, result.quality)

    def _draw(self, trial: Any, name: str, of: tuple[Value, ...] | Range) -> Value:
        if not isinstance(of, Range):
            value: Value = trial.suggest_categorical(name, of)
            return value
        if name in OPTIONS and OPTIONS[name].kind is int:
            return int(trial.suggest_int(name, int(of.low), int(of.high), log=of.low >= 1))
        return float(f"{trial.suggest_float(name, of.low, of.high, log=of.low > 0):.6g}")
