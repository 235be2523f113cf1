"""Tables of the paper beside ours: plan the runs, do them, write what came of them."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedlesam import disk
from fedlesam.build import load_data
from fedlesam.config import RunConfig
from fedlesam.data.domain_sets import is_domains, parse
from fedlesam.data.formats.domains import find
from fedlesam.experiments import estimate, plan, sheets, writing
from fedlesam.experiments.bench import Bench
from fedlesam.experiments.items import Item
from fedlesam.experiments.page import page
from fedlesam.experiments.plan import Only
from fedlesam.experiments.results import Results
from fedlesam.experiments.scales import CHOICES, DOMAIN_CHOICES, Scale, on_scale
from fedlesam.experiments.sheet import Sheet
from fedlesam.experiments.sweep import Sweep, Task, Watch
from fedlesam.names import file_name
from fedlesam.report.read import Run, read_run
from fedlesam.report.write import write_report

Say = Callable[[str], None]
Begin = Callable[[Sequence[Task]], Watch]
"""Told what is left to do; gives back who is told of its progress."""
REPORTS = 8
"""Each is a file of some megabytes; `fedlesam report` makes any other."""


@dataclass(frozen=True)
class Outcome:
    sheets: list[Sheet]
    failed: dict[str, str]
    """The runs that failed, by their label, and why; the same call tries them again."""


@dataclass(frozen=True)
class Wish:
    """What to reproduce, and how."""

    items: list[Item]
    scale: Scale
    only: Only = Only()
    seeds: int | None = None
    data_dir: str | None = None
    workers: int = 1
    jobs: int = 1

    @property
    def repeats(self) -> int:
        return self.scale.seeds if self.seeds is None else self.seeds

    def plan(self) -> plan.Plan:
        return plan.make(self.items, self.only, self.scale, self.repeats, self.data_dir, self.workers)

    def terms(self) -> list[str]:
        """Every reduction and choice that concerns these tables, to be printed with the results."""
        asks = [ask for item in self.items for ask in on_scale(item, self.scale).asks if self.only.keeps(ask)]
        domains = [ask for ask in asks if is_domains(ask.data)]
        cuts = self.scale.reductions if len(domains) < len(asks) or not asks else ()
        cuts += self.scale.domains.reductions if domains and self.scale.domains else ()
        reduced = [f"reduction: {text}" for text in cuts]
        left = [f"reduction: only {key} {', '.join(sorted(v))}" for key, v in vars(self.only).items() if v]
        seeds = [f"choice: {self.repeats} seed{'s' if self.repeats > 1 else ''}, from 0 on"]
        return reduced + left + seeds + [f"choice: {text}" for text in CHOICES + (DOMAIN_CHOICES if domains else ())]


def reproduce(wish: Wish, out: Path, begin: Begin = lambda _: lambda _: None, say: Say = lambda _: None) -> Outcome:
    """Do what is not done yet in the folder `out`, and write every sheet there. A failed run is a hole in its cells."""
    with Sweep(out).open() as sweep:
        planned = possible(wish, say)
        holes = dict(planned.holes)
        tasks = {
            ask: [sweep.task(config, ask.label, estimate.seconds(config)) for config in configs]
            for ask, configs in planned.runs.items()
        }
        everything = [task for some in tasks.values() for task in some]
        left = list({task.folder: task for task in everything if not sweep.is_done(task)}.values())
        if left:
            sweep.run(left, wish.jobs, begin(left))
        done = {ask: [task for task in some if sweep.is_done(task)] for ask, some in tasks.items()}
        wrong = {folder: about["why"] for folder, about in sweep.failed.items()}
        failed = {task.label: wrong[task.folder.name] for task in left if task.folder.name in wrong}
        for ask, some in tasks.items():
            why = next((wrong[task.folder.name] for task in some if task.folder.name in wrong), "it is not finished")
            if not done[ask]:
                holes[ask] = f"the run failed: {why}"
        fewer = sum(0 < len(done[ask]) < wish.repeats for ask in tasks)
        runs = {ask: [read_run(task.folder) for task in some] for ask, some in done.items() if some}
        results = Results(wish.scale, runs, holes, wish.repeats)
        bench = Bench(results, wish.only, out / "results", wish.data_dir)
        made = []
        for item in planned.items:
            sheet = sheets.make(item, bench)
            if fewer:
                short = f"{fewer} cells of this sweep have fewer than {wish.repeats} seeds, since runs failed"
                sheet = dataclasses.replace(sheet, notes=(*sheet.notes, short))
            made.append(sheet)
            _write(sheet, wish, bench.folder)
        reports = _reports([run for some in runs.values() for run in some], bench.folder)
        title = f"The FedLESAM paper beside ours, {wish.scale.name} scale"
        disk.write_text(bench.folder / "index.html", page(title, made, wish.terms(), reports))
        return Outcome(made, failed)


def possible(wish: Wish, say: Say = lambda _: None, *, decode: bool = True) -> plan.Plan:
    """The plan; runs whose data set is not there are holes."""
    planned = wish.plan()
    absent = _absent(planned, say, decode)
    runs = {ask: configs for ask, configs in planned.runs.items() if _source(configs[0]) not in absent}
    lost = {ask: absent[_source(configs[0])] for ask, configs in planned.runs.items() if ask not in runs}
    return dataclasses.replace(planned, runs=runs, holes={**planned.holes, **lost})


def _source(config: RunConfig) -> tuple[str, str | None]:
    return config.data, config.data_dir


def _absent(planned: plan.Plan, say: Say, decode: bool) -> dict[tuple[str, str | None], str]:
    """Data sets that cannot be had. Loading them here, once, also spares the jobs decoding the same files at once.

    Without `decode` images with domains are only listed: there may be half a million.
    """
    absent = {}
    for source in dict.fromkeys(_source(config) for configs in planned.runs.values() for config in configs):
        name, folder = source
        try:
            if is_domains(name) and not decode:
                find(parse(name), Path(folder) if folder else None)
            else:
                load_data(RunConfig(data=name, data_dir=folder))
        except ValueError as error:
            absent[source] = str(error)
            say(f"{name}: left out, its cells are marked: {error}")
    return absent


def _reports(runs: list[Run], folder: Path) -> dict[str, Path]:
    """A report on the runs of each split and data set, by its name, unless there are too many."""
    for stale in folder.glob("report-*.html"):
        stale.unlink()
    alike: dict[str, dict[Path, Run]] = {}
    for run in runs:
        config = run.config
        clients = f", {config.clients} clients" if config.clients is not None else ""
        alike.setdefault(f"{config.data}, {config.split}{clients}", {})[run.path] = run
    if len(alike) > REPORTS:
        return {}
    files = {name: folder / f"report-{file_name(name)}.html" for name in alike}
    for name, file in files.items():
        write_report(list(alike[name].values()), file)
    return files


def _with_terms(sheet: Sheet, wish: Wish) -> Sheet:
    return dataclasses.replace(sheet, notes=(*sheet.notes, *wish.terms()))


def _write(sheet: Sheet, wish: Wish, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    full = _with_terms(sheet, wish)
    disk.write_text(folder / f"{sheet.name}.md", writing.markdown(full))
    if sheet.blocks:
        disk.write_text(folder / f"{sheet.name}.tex", writing.latex(full))
        disk.write_text(folder / f"{sheet.name}.csv", writing.table_csv(sheet))
