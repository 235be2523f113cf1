"""Plan the runs that the tables need, train them, write the tables."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedlesam.core import disk
from fedlesam.core.names import file_name
from fedlesam.data.catalogue import is_domains, parse_domains
from fedlesam.data.formats.domains import find
from fedlesam.report.write import write_report
from fedlesam.runs.build import load_data
from fedlesam.runs.config import RunConfig
from fedlesam.runs.read import Run, read_run
from fedlesam.runs.sweep import Sweep, Task, Watch
from reproduction import plan, tables, writing
from reproduction.context import Context
from reproduction.items import Item
from reproduction.page import page
from reproduction.plan import Only
from reproduction.result_table import ResultTable
from reproduction.results import Results
from reproduction.scales import CHOICES, DOMAIN_CHOICES, Scale, on_scale

Log = Callable[[str], None]
Begin = Callable[[Sequence[Task]], Watch]
"""Called with the runs that are left; returns the function that is called with their events."""
REPORTS = 8
"""Each is a file of some megabytes; `fedlesam report` makes any other."""


@dataclass(frozen=True)
class Outcome:
    tables: list[ResultTable]
    failed: dict[str, str]
    """The runs that failed, by their label, and why; the same call tries them again."""


@dataclass(frozen=True)
class Request:
    """What to reproduce, and how."""

    items: list[Item]
    scale: Scale
    only: Only = Only()
    seeds: int | None = None
    data_dir: str | None = None
    workers: int = 1
    jobs: int = 1
    stack_runs: int | None = None

    @property
    def repeats(self) -> int:
        return self.scale.seeds if self.seeds is None else self.seeds

    def plan(self) -> plan.Plan:
        how = self.data_dir, self.workers, self.stack_runs
        return plan.make(self.items, self.only, self.scale, self.repeats, *how)

    def terms(self) -> list[str]:
        """Every reduction and choice that concerns these tables, to be printed with the results."""
        specs = [spec for item in self.items for spec in on_scale(item, self.scale).specs if self.only.keeps(spec)]
        domains = [spec for spec in specs if is_domains(spec.data)]
        cuts = self.scale.reductions if len(domains) < len(specs) or not specs else ()
        cuts += self.scale.domains.reductions if domains and self.scale.domains else ()
        reduced = [f"reduction: {text}" for text in cuts]
        left = [f"reduction: only {key} {', '.join(sorted(v))}" for key, v in vars(self.only).items() if v]
        seeds = [f"choice: {self.repeats} seed{'s' if self.repeats > 1 else ''}, from 0 on"]
        return reduced + left + seeds + [f"choice: {text}" for text in CHOICES + (DOMAIN_CHOICES if domains else ())]


def reproduce(
    request: Request, out: Path, begin: Begin = lambda _: lambda _: None, log: Log = lambda _: None
) -> Outcome:
    """Train what is not finished in the folder `out`, and write every table there. Cells of failed runs are empty."""
    with Sweep(out).open() as sweep:
        planned = available(request, log)
        missing = dict(planned.missing)
        tasks = {spec: [sweep.task(config, spec.label) for config in configs] for spec, configs in planned.runs.items()}
        everything = [task for some in tasks.values() for task in some]
        left = list({task.folder: task for task in everything if not sweep.is_done(task)}.values())
        if left:
            sweep.run(left, request.jobs, begin(left))
        done = {spec: [task for task in some if sweep.is_done(task)] for spec, some in tasks.items()}
        wrong = {folder: about["why"] for folder, about in sweep.failed.items()}
        failed = {task.label: wrong[task.folder.name] for task in left if task.folder.name in wrong}
        for spec, some in tasks.items():
            why = next((wrong[task.folder.name] for task in some if task.folder.name in wrong), "it is not finished")
            if not done[spec]:
                missing[spec] = f"the run failed: {why}"
        fewer = sum(0 < len(done[spec]) < request.repeats for spec in tasks)
        runs = {spec: [read_run(task.folder) for task in some] for spec, some in done.items() if some}
        results = Results(request.scale, runs, missing, request.repeats)
        context = Context(results, request.only, out / "results", request.data_dir)
        made = []
        for item in planned.items:
            table = tables.make(item, context)
            if fewer:
                short = f"{fewer} cells of this sweep have fewer than {request.repeats} seeds, since runs failed"
                table = dataclasses.replace(table, notes=(*table.notes, short))
            made.append(table)
            _write(table, request, context.folder)
        reports = _reports([run for some in runs.values() for run in some], context.folder)
        title = f"The FedLESAM paper beside ours, {request.scale.name} scale"
        disk.write_text(context.folder / "index.html", page(title, made, request.terms(), reports))
        return Outcome(made, failed)


def available(request: Request, log: Log = lambda _: None, *, decode: bool = True) -> plan.Plan:
    """The plan without the runs whose data set is not found; those are in `missing`."""
    planned = request.plan()
    absent = _absent(planned, log, decode)
    runs = {spec: configs for spec, configs in planned.runs.items() if _source(configs[0]) not in absent}
    lost = {spec: absent[_source(configs[0])] for spec, configs in planned.runs.items() if spec not in runs}
    return dataclasses.replace(planned, runs=runs, missing={**planned.missing, **lost})


def _source(config: RunConfig) -> tuple[str, str | None]:
    return config.data, config.data_dir


def _absent(planned: plan.Plan, log: Log, decode: bool) -> dict[tuple[str, str | None], str]:
    """Data sets that cannot be loaded. Loading them once here fills the cache before several jobs need it.

    Without `decode` images with domains are only listed: there may be half a million.
    """
    absent = {}
    for source in dict.fromkeys(_source(config) for configs in planned.runs.values() for config in configs):
        name, folder = source
        try:
            if is_domains(name) and not decode:
                find(parse_domains(name), Path(folder) if folder else None)
            else:
                load_data(RunConfig(data=name, data_dir=folder))
        except ValueError as error:
            absent[source] = str(error)
            log(f"{name}: left out, its cells are marked: {error}")
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


def _with_terms(table: ResultTable, request: Request) -> ResultTable:
    return dataclasses.replace(table, notes=(*table.notes, *request.terms()))


def _write(table: ResultTable, request: Request, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    full = _with_terms(table, request)
    disk.write_text(folder / f"{table.name}.md", writing.markdown(full))
    if table.blocks:
        disk.write_text(folder / f"{table.name}.tex", writing.latex(full))
        disk.write_text(folder / f"{table.name}.csv", writing.table_csv(table))
