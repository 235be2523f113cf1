"""The studies of the claim: choose every arm's rho on held-out training data, then train the seeds of the results."""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from fedlesam.core import disk
from fedlesam.report.tables import Cell as Value
from fedlesam.report.tables import Column, Table
from fedlesam.runs.build import load_data
from fedlesam.runs.read import Run, read_run
from fedlesam.runs.sweep import Sweep, Task, Watch
from reproduction import claim_tables, probing, writing
from reproduction.findings import MEASURES, Findings, Result
from reproduction.page import page
from reproduction.result_table import ResultTable
from reproduction.studies import ARMS, TUNING_SEED, Condition, Study, Where

Begin = Callable[[Sequence[Task]], Watch]
DIGITS_TESTED = 360
"""Test images of the digits; as many are held out for tuning."""
Trial = tuple[str, float | None, int]
"""Arm, rho, seed."""


@dataclass
class Outcome:
    table: ResultTable
    failed: dict[str, str] = field(default_factory=dict)


def terms(study: Study, where: Where) -> list[str]:
    """Budget, reductions and rules; printed before it runs, and below its tables."""
    said = [text for condition in study.conditions for text in (condition.budget(), *condition.changes())]
    if where.scale.name == "smoke":
        said.append("reduction: 3 rounds and few arms, to see that it runs; its numbers mean nothing")
    return said + [f"rule: {text}" for text in claim_tables.RULES]


def trials(condition: Condition, tuning: bool, chosen: dict[str, float | None]) -> Iterator[Trial]:
    """What is to be trained: for tuning every rho; then the chosen one, or all of them where the curve is shown."""
    first, seeds = (TUNING_SEED, condition.tuning_seeds) if tuning else (0, condition.seeds)
    for arm in condition.tuned if tuning else condition.arms:
        every = condition.rhos if ARMS[arm].base and (tuning or condition.curve) else (chosen.get(arm),)
        for rho in every:
            if rho is not None or not ARMS[arm].base:
                yield from ((arm, rho, seed) for seed in range(first, first + seeds))


def count(study: Study, where: Where) -> tuple[int, int]:
    """Runs and rounds, whatever rho is chosen."""
    rounds = []
    for condition in study.conditions:
        likely: dict[str, float | None] = dict.fromkeys(condition.tuned, condition.rhos[0])
        for tuning in (True, False):
            for arm, rho, seed in trials(condition, tuning, likely):
                rounds.append(condition.config(arm, rho, seed, where, tuning).rounds)
    return len(rounds), sum(rounds)


def run(study: Study, where: Where, out: Path, jobs: int, begin: Begin, log: Callable[[str], None]) -> Outcome:
    """Train what is not finished in the folder `out`, and write the tables; failed runs are not in the means."""
    with Sweep(out).open() as sweep:
        for condition in study.conditions:
            load_data(condition.config(condition.arms[0], None, 0, where))
        failed: dict[str, str] = {}
        everything = [Findings(condition) for condition in study.conditions]
        for tuning in (True, False):
            tasks = {
                (found.condition.name, trial): _task(sweep, found, trial, where, tuning)
                for found in everything
                for trial in trials(found.condition, tuning, found.chosen)
            }
            left = list({task.folder: task for task in tasks.values() if not sweep.is_done(task)}.values())
            if left:
                sweep.run(left, jobs, begin(left))
            for found in everything:
                mine = {trial: task for (name, trial), task in tasks.items() if name == found.condition.name}
                _read(found, mine, sweep, tuning)
                if tuning:
                    log(f"{found.condition.name}: chosen {_listed(found.chosen)}")
            wrong = sweep.failed
            failed |= {t.label: wrong[t.folder.name]["why"] for t in left if t.folder.name in wrong}
        table = _write(study, where, everything, out / "results")
        disk.write_text(out / "results" / f"{study.name}-runs.csv", raw(everything))
        return Outcome(table, failed)


def rebuild(study: Study, where: Where, lines: Path, folder: Path) -> ResultTable:
    """The tables from the lines of finished runs, NAME-runs.csv; nothing is trained.

    Args:
        study: Whose lines they are.
        where: The scale they were run at.
        lines: The file.
        folder: Where the tables go.

    Raises:
        ValueError: The lines are of another study.
    """
    everything = {condition.name: Findings(condition) for condition in study.conditions}
    with lines.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row.get("condition") not in everything:
                raise ValueError(f"{lines}: has a run of {row.get('condition')!r}, which is not in {study.name}")
            found = everything[row["condition"]]
            values = {name: float(row[name]) for name in ("accuracy", "seconds", *MEASURES) if row.get(name)}
            values["accuracy"] = _exact(values["accuracy"], found.condition)
            into = found.tuning if row["for"] == "tuning" else found.results
            into.setdefault((row["arm"], float(row["rho"]) if row["rho"] else None), {})[int(row["seed"])] = Result(
                values
            )
    for found in everything.values():
        found.choose()
    return _write(study, where, list(everything.values()), folder)


def _exact(accuracy: float, condition: Condition) -> float:
    """Of digits: a whole number of correct answers. Lines of six digits would break ties of the permutation test."""
    if condition.settings.get("data") != "digits":
        return accuracy
    answers = DIGITS_TESTED * condition.last
    return round(accuracy / 100 * answers) * 100 / answers


def _write(study: Study, where: Where, everything: list[Findings], folder: Path) -> ResultTable:
    folder.mkdir(parents=True, exist_ok=True)
    table = claim_tables.make(study, everything, folder, tuple(terms(study, where)))
    for ending, text in (
        ("md", writing.markdown(table)),
        ("tex", writing.latex(table)),
        ("csv", writing.table_csv(table)),
        ("html", page(f"FedLESAM: {study.name}, {where.scale.name} scale", [table])),
    ):
        disk.write_text(folder / f"{study.name}.{ending}", text)
    return table


def _task(sweep: Sweep, found: Findings, trial: Trial, where: Where, tuning: bool) -> Task:
    arm, rho, seed = trial
    config = found.condition.config(arm, rho, seed, where, tuning)
    if not tuning and (rho == found.chosen.get(arm) or not found.condition.tuning_seeds):
        config = found.condition.measured(config, arm)
    label = f"{arm}{'' if rho is None else f', rho {rho:g}'}, seed {seed}{', held out' if tuning else ''}"
    return sweep.task(config, label)


def _read(found: Findings, tasks: dict[Trial, Task], sweep: Sweep, tuning: bool) -> None:
    into = found.tuning if tuning else found.results
    for (arm, rho, seed), task in tasks.items():
        if sweep.is_done(task):
            into.setdefault((arm, rho), {})[seed] = result(read_run(task.folder), found.condition.last)
    if tuning:
        found.choose()


def result(run: Run, last: int) -> Result:
    """Accuracy of the last rounds; sharpness of the last model; drift and cosines over the rounds after the first."""
    rounds = run.config.rounds
    tested = [r["test_accuracy"] for r in run.records if r["round"] >= rounds - last and "test_accuracy" in r]
    values = {
        "accuracy": 100 * fmean(tested),
        "seconds": float(np.median([record["seconds"] for record in run.records])),
        "dropped": float(sum(len(record.get("dropped") or ()) for record in run.records)),
    }
    for name, (probe, value, at_end) in MEASURES.items():
        readings = [reading for round, reading in probing.readings(run.path, probe, value) if round > 0]
        if readings:
            values[name] = readings[-1] if at_end else fmean(readings)
    return Result(values)


def _listed(chosen: dict[str, float | None]) -> str:
    return ", ".join(f"{arm} {'none' if rho is None else f'{rho:g}'}" for arm, rho in chosen.items())


def raw(everything: list[Findings]) -> str:
    """A line per run as CSV, in full precision."""
    names = ["accuracy", "seconds", "dropped", *MEASURES]
    rows: list[list[Value]] = []
    for found in everything:
        for purpose, some in (("tuning", found.tuning), ("results", found.results)):
            for (arm, rho), by_seed in some.items():
                chosen = "yes" if found.chosen.get(arm) == rho else "no"
                begin = [found.condition.name, purpose, arm, "" if rho is None else rho, chosen]
                rows += [[*begin, seed, *(of.values.get(n) for n in names)] for seed, of in by_seed.items()]
    columns = [Column(name) for name in ("condition", "for", "arm", "rho", "chosen", "seed", *names)]
    return Table("runs", "", columns, rows).csv()
