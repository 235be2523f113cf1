"""The studies whose runs are lines of a file: train what is missing, by any number of processes; make the tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import click

from fedlesam.cli.show import Display
from fedlesam.core import disk
from reproduction import anchor, domains, heads, leaderboard, scratch, why_features
from reproduction.heads import Bench
from reproduction.page import page
from reproduction.plan import parse_selection
from reproduction.result_table import ResultTable
from reproduction.writing import markdown

LEADERBOARD = Path(__file__).parents[1] / "docs" / "results" / "leaderboard" / "runs.jsonl"
"""The committed lines."""
B = TypeVar("B", bound=Bench)
KEYS: dict[str, Callable[[Bench], str]] = {
    "data": lambda bench: bench.data,
    "splits": lambda bench: bench.split,
    "clients": lambda bench: str(bench.clients),
    "images": lambda bench: str(bench.images // bench.clients),
}
"""What `--only` can name of a problem; images: of a client."""


@dataclass(frozen=True)
class Asked:
    """What was asked of a study."""

    scale: str
    only: str
    seeds: int | None
    data_dir: Path | None
    lines: Path | None

    @property
    def smoke(self) -> bool:
        return self.scale == "smoke"

    def kept(self, every: Sequence[B]) -> list[B]:
        """The problems that `--only` leaves."""
        known = {key: list(dict.fromkeys(map(of, every))) for key, of in KEYS.items()}
        wanted = parse_selection(self.only, known)
        return [bench for bench in every if all(KEYS[key](bench) in some for key, some in wanted.items())]


@dataclass(frozen=True)
class LinesStudy:
    """A study, as the command line has it."""

    name: str
    shows: str
    count: Callable[[str], tuple[int, int]]
    """Runs and rounds at a scale."""
    run: Callable[[Asked, Path, bool, Display], None]
    """Train what is missing in the folder and write the tables; a dry run prints the rules alone."""
    only: bool = True
    """Whether it takes `--only`."""


def run_features(asked: Asked, folder: Path, dry_run: bool, display: Display) -> None:
    """Every problem, one after the other; the tables are written from all lines that are there."""
    from reproduction import heads_run, heads_tables

    for bench in asked.kept(heads.benches(asked.scale, asked.seeds)):
        _print_rules(heads_tables.rules(bench), display, heads.count([bench]))
        if dry_run:
            continue
        path = asked.lines or folder / "runs.jsonl"
        if asked.lines is None:
            runner = heads_run.Runner(bench, heads_run.load(asked.data_dir, asked.smoke, bench.data))
            heads_run.work(partial(heads.pending, bench, path), runner.line, path, display.print, bench.name)
        lines = heads.Lines.read(bench, path)
        if lines.found:
            _show(heads_tables.make(bench, lines), folder / f"{bench.name}.md", display)


def run_scratch(asked: Asked, folder: Path, dry_run: bool, display: Display) -> None:
    """Every data set with 100 images a client; where that gate failed, with fewer."""
    from reproduction import heads_run, heads_tables, scratch_run

    path = asked.lines or folder / "runs.jsonl"
    for bench in asked.kept(scratch.benches(asked.scale, asked.seeds)):
        if not dry_run and not scratch.is_due(bench, path):
            continue
        _print_rules(heads_tables.rules(bench), display, heads.count([bench]))
        if dry_run:
            continue
        if asked.lines is None:
            runner = scratch_run.ScratchRunner(bench, scratch_run.load(asked.data_dir, asked.smoke, bench.data))
            heads_run.work(partial(heads.pending, bench, path), runner.line, path, display.print, bench.name)
        lines = heads.Lines.read(bench, path)
        if lines.found:
            _show(heads_tables.make(bench, lines, scratch.NAME, scratch.SHOWS), folder / f"{bench.name}.md", display)


def run_domains(asked: Asked, folder: Path, dry_run: bool, display: Display) -> None:
    """All targets of a federation together, so that what is complete can be averaged over them."""
    from reproduction import domains_run, domains_tables, heads_run

    federations = domains.federations(asked.scale, asked.seeds)
    kept = asked.kept([bench for every in federations for bench in every])
    for every in federations:
        if not set(every) & set(kept):
            continue
        if not set(every) <= set(kept):
            raise click.UsageError(f"{domains.NAME} judges all targets together and takes --only clients=1 or 10 alone")
        _print_rules(domains_tables.rules(every[0]), display, heads.count(every))
        if dry_run:
            continue
        path = asked.lines or folder / "runs.jsonl"
        if asked.lines is None:
            runner = domains_run.DomainRunner(every[0], domains_run.load(asked.data_dir, asked.smoke))
            name = f"{every[0].clients}-clients"
            heads_run.work(partial(domains.pending, every, path), runner.line, path, display.print, name)
        lines = [heads.Lines.read(bench, path) for bench in every]
        if any(some.found for some in lines):
            _show(domains_tables.make(every, lines), folder / f"pacs-{every[0].clients}-clients.md", display)


def run_why(asked: Asked, folder: Path, dry_run: bool, display: Display) -> None:
    """The runs of the tuning seeds again, measured; the leaderboard's lines are beside them if they are committed."""
    from reproduction import heads_run, why_run, why_tables

    _print_rules(why_tables.RULES, display, why_features.count(asked.scale))
    if dry_run:
        return
    bench, path = why_features.bench(asked.scale), asked.lines or folder / "runs.jsonl"
    if asked.lines is None:
        runner = why_run.WhyRunner(bench, heads_run.load(asked.data_dir, asked.smoke))
        heads_run.work(partial(why_features.pending, bench, path, asked.smoke), runner.line, path, display.print)
    board = leaderboard.make_board(asked.scale, asked.seeds).read(LEADERBOARD)
    _show(why_tables.make(why_features.Found.read(bench, path), board), folder / f"{why_features.NAME}.md", display)


def run_leaderboard(asked: Asked, folder: Path, dry_run: bool, display: Display) -> None:
    """Six trials a method, then the seeds of its best."""
    from reproduction import heads_run, leaderboard_tables

    _print_rules(leaderboard_tables.RULES, display, leaderboard.count(asked.scale))
    if dry_run:
        return
    board, path = leaderboard.make_board(asked.scale, asked.seeds), asked.lines or folder / "runs.jsonl"
    if asked.lines is None:
        runner = heads_run.Runner(leaderboard.bench(asked.scale), heads_run.load(asked.data_dir, asked.smoke))
        heads_run.work(partial(board.pending, path), runner.entry, path, display.print)
    disk.make_folder(folder)
    table = leaderboard_tables.make(board.read(path), folder)
    disk.write_text(folder / f"{leaderboard.NAME}.html", page(f"FedLESAM: {leaderboard.SHOWS}", [table]))
    _show(table, folder / f"{leaderboard.NAME}.md", display)


def run_anchor(asked: Asked, folder: Path, dry_run: bool, display: Display) -> None:
    """FedAvg as an outside baseline has it, three seeds."""
    from reproduction import heads_run

    display.print("{:,} runs, {:,} rounds".format(*anchor.count(asked.scale)))
    if dry_run:
        return
    path, seeds = asked.lines or folder / "runs.jsonl", asked.seeds or anchor.SEEDS
    if asked.lines is None:
        runner = anchor.Runner(folder, asked.data_dir, asked.smoke)
        heads_run.work(partial(anchor.pending, path, seeds), runner.line, path, display.print)
    _show(anchor.make_table(path, seeds), folder / f"{anchor.NAME}.md", display)


def _print_rules(rules: Sequence[str], display: Display, counted: tuple[int, int]) -> None:
    """With the number of runs, if the gate is open and no chosen rho is the paper's, and of their rounds."""
    display.print(f"{counted[0]:,} runs at most, {counted[1]:,} rounds")
    for text in rules:
        display.print(f"rule: {text}")


def _show(table: ResultTable, path: Path, display: Display) -> None:
    disk.write_text(path, markdown(table))
    click.echo(markdown(table) if not display.quiet else "", nl=False)


def _count_features(scale: str) -> tuple[int, int]:
    return heads.count(heads.benches(scale))


def _count_scratch(scale: str) -> tuple[int, int]:
    return heads.count([bench for bench in scratch.benches(scale) if bench.before is None])


def _count_domains(scale: str) -> tuple[int, int]:
    return heads.count([bench for every in domains.federations(scale) for bench in every])


STUDIES = {
    study.name: study
    for study in (
        LinesStudy(heads.NAME, heads.SHOWS, _count_features, run_features),
        LinesStudy(domains.NAME, domains.SHOWS, _count_domains, run_domains),
        LinesStudy(scratch.NAME, scratch.SHOWS, _count_scratch, run_scratch),
        LinesStudy(why_features.NAME, why_features.SHOWS, why_features.count, run_why, only=False),
        LinesStudy(leaderboard.NAME, leaderboard.SHOWS, leaderboard.count, run_leaderboard, only=False),
        LinesStudy(anchor.NAME, anchor.SHOWS, anchor.count, run_anchor, only=False),
    )
}
