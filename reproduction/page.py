"""All tables as one HTML file that needs no other, in the style of the report."""

import base64
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedlesam.report.page import render
from reproduction import writing
from reproduction.result_table import ResultTable

LEGEND = (
    "A cell is ours; below it the paper's, and the difference: = the same, or within two deviations; ↑ ↓ ours is "
    "higher or lower; — missing, explained below the table. Kendall's tau: 1 if the methods are in the paper's order, "
    "-1 if in the opposite one."
)


def page(
    title: str, tables: Sequence[ResultTable], terms: Sequence[str] = (), reports: Mapping[str, Path] | None = None
) -> str:
    """The text of the HTML file.

    Args:
        title: Its heading.
        tables: A section each.
        terms: Shown once, above all: the reductions open, the choices folded.
        reports: Pages in the same folder, by name.
    """

    def forms(table: ResultTable) -> list[tuple[str, str, str]]:
        full = dataclasses.replace(table, notes=(*table.notes, *terms))
        texts = (writing.table_csv(table), writing.markdown(full), writing.latex(full))
        return list(zip(("CSV", "Markdown", "LaTeX"), ("csv", "md", "tex"), texts, strict=True))

    def starting(kind: str) -> list[str]:
        return [term.removeprefix(kind) for term in terms if term.startswith(kind)]

    return render(
        "tables.html.j2",
        "reproduction",
        policy="default-src 'none'; style-src 'unsafe-inline'; img-src data:",
        title=title,
        legend=LEGEND,
        tables=tables,
        reductions=starting("reduction: "),
        choices=starting("choice: "),
        reports=reports or {},
        forms=forms,
        heading=_heading,
        base64=lambda path: base64.b64encode(path.read_bytes()).decode(),
        figures=writing.figures,
        shown_tau=writing.shown_tau,
        notes_of=writing.notes_of,
    )


def _heading(name: str) -> str:
    """table2 is Table 2."""
    return re.sub(r"(\d+)$", r" \1", name.replace("fig", "figure")).capitalize()
