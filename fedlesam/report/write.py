"""A report on runs: the page, and on request its charts and tables as files."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from fedlesam.core.disk import write_text
from fedlesam.report import ledger
from fedlesam.report.charts import COSTS, Chart, charts_of
from fedlesam.report.groups import Comparison, compare_runs
from fedlesam.report.page import page
from fedlesam.report.summaries import tables_of
from fedlesam.report.tables import Cell, Column, Table
from fedlesam.runs.read import Run


def write_report(
    runs: list[Run],
    out: Path,
    *,
    figures: Path | None = None,
    tables: Path | None = None,
    targets: list[float] | None = None,
    done: Callable[[int, int], None] = lambda _, __: None,
) -> Comparison:
    """Write the page, and on request its charts and tables as files.

    Args:
        runs: The runs.
        out: The page.
        figures: A folder for the charts, as PNG and PDF.
        tables: A folder for the tables, as CSV, Markdown and LaTeX, and for the curves as curves.csv.
        targets: Accuracies of the table of costs to a target.
        done: Called with the number of figures drawn, and of all.
    """
    comparison = compare_runs(runs)
    found = tables_of(comparison, targets or ledger.default_targets(comparison))
    charts = charts_of(comparison)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page(comparison, charts, found))
    if tables is not None:
        write_tables(found, tables)
        write_text(tables / "curves.csv", curves_csv(comparison, charts))
    if figures is not None:
        _draw(comparison, figures, done)
    return comparison


def write_tables(tables: list[Table], folder: Path) -> None:
    """Write tables as CSV, Markdown and LaTeX.

    Args:
        tables: The tables.
        folder: Where the files go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        for _, ending, text in table.forms():
            write_text(folder / f"{table.key}.{ending}", text)


def curves_csv(comparison: Comparison, charts: list[Chart]) -> str:
    """Every point of every curve over rounds, with what had been spent by then; the page has it with five digits.

    Args:
        comparison: The groups of runs that are compared.
        charts: By `charts_of`.
    """
    columns = ["curve", "method", "seeds", "round", *COSTS, "mean", "low", "high"]
    rows: list[list[Cell]] = []
    for chart in (chart for chart in charts if chart.section != "surface"):
        for series in chart.series:
            group = comparison.groups[series.group]
            costs = [series.costs.get(cost, [None] * len(series.x)) for cost in COSTS]
            low, high = series.low or series.mean, series.high or series.mean
            for x, mean, least, most, *spent in zip(series.x, series.mean, low, high, *costs, strict=True):
                rows.append([chart.key, group.label, len(group.runs), int(x), *spent, mean, least, most])
    return Table("curves", "Curves", [Column(name) for name in columns], rows).csv()


def _draw(comparison: Comparison, folder: Path, done: Callable[[int, int], None]) -> None:
    from fedlesam.report import pictures, surfaces

    charts = [chart for chart in charts_of(comparison) if chart.section != "surface"]
    work: list[Callable[[], object]] = []
    work += [partial(pictures.chart_picture, chart, comparison.groups, folder) for chart in charts]
    found = [(g.label, g.look, s) for g in comparison.groups for dims in (1, 2) if (s := g.surface(dims)) is not None]
    if found:
        work.append(partial(surfaces.draw, found, folder))
    for i, (_, counts) in enumerate(comparison.splits(), 1):
        work.append(partial(pictures.split_picture, counts, folder, "split" if i == 1 else f"split-{i}"))
    for i, make in enumerate(work):
        done(i, len(work))
        make()
    done(len(work), len(work))
