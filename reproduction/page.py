"""All tables as one HTML file that needs no other, in the style of the report."""

import base64
import dataclasses
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from reproduction import writing
from reproduction.result_table import Block, Cell, ResultTable

LEGEND = (
    "A cell is ours; below it the paper's, and the difference: = the same, or within two deviations; ↑ ↓ ours is "
    "higher or lower; — missing, explained below the table. Kendall's tau: 1 if the methods are in the paper's order, "
    "-1 if in the opposite one."
)

CSS = """
a.chip { color: inherit; text-decoration: none; }
td, thead th:not(:first-child) { text-align: right; }
td small { display: block; color: var(--soft); font-size: .8rem; line-height: 1.3; }
td.missing { color: var(--soft); }
tr.tau > * { border-top: 2px solid var(--line); color: var(--soft); }
.card img { display: block; max-width: 100%; margin: 0 auto; background: #fff; border-radius: 6px; }
details.card > summary { font-size: 1rem; }
section > .card, section > .cards, section > aside { margin-top: 1rem; }
main ul { margin: .4rem 0 0; padding-left: 1.15rem; }
ul.small { margin-top: .9rem; max-width: 100ch; }
"""


def page(
    title: str, tables: Sequence[ResultTable], terms: Sequence[str] = (), reports: Mapping[str, Path] | None = None
) -> str:
    """`terms` stand once, above all: the reductions open, the choices folded. `reports` lie beside the page."""
    links = "; ".join(f'<a href="{quote(path.name)}">{escape(name)}</a>' for name, path in (reports or {}).items())
    about = escape(LEGEND) + (f"<br>Curves and costs of the runs: {links}." if links else "")
    chips = "\n".join(f'<a class="chip" href="#{table.name}">{escape(_heading(table.name))}</a>' for table in tables)
    style = files("fedlesam.report").joinpath("page.css").read_text("utf-8") + CSS
    body = "\n".join([_terms(terms), *(_section(table, terms) for table in tables)])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<header><div><h1>{escape(title)}</h1><p class="about">{about}</p></div></header>
<nav id="bar" aria-label="Tables and figures">{chips}</nav>
<main>
{body}
</main>
<footer><p>Made by fedlesam {escape(version("fedlesam"))}.</p></footer>
</body>
</html>
"""


def _terms(terms: Sequence[str]) -> str:
    reduced = [term.partition(": ")[2] for term in terms if term.startswith("reduction: ")]
    chosen = [term.partition(": ")[2] for term in terms if term.startswith("choice: ")]
    parts = []
    if reduced:
        parts.append(f'<aside class="note"><strong>Reduced against the paper</strong>{_list(reduced)}</aside>')
    if chosen:
        parts.append(
            f'<details class="card"><summary>{len(chosen)} choices where the paper is silent</summary>{_list(chosen)}'
            "</details>"
        )
    return "<section>" + "\n".join(parts) + "</section>" if parts else ""


def _section(table: ResultTable, terms: Sequence[str]) -> str:
    parts = [f'<section id="{table.name}">\n<h2>{escape(f"{_heading(table.name)}: {table.title}")}</h2>']
    if table.blocks:
        full = dataclasses.replace(table, notes=(*table.notes, *terms))
        links = "".join(
            f'<a download="{table.name}.{ending}" href="data:text/plain;charset=utf-8,{quote(text)}">{name}</a>'
            for name, ending, text in (
                ("CSV", "csv", writing.table_csv(table)),
                ("Markdown", "md", writing.markdown(full)),
                ("LaTeX", "tex", writing.latex(full)),
            )
        )
        parts.append(f'<span class="saves">{links}</span>')
    parts += map(_block, table.blocks)
    drawn = "\n".join(map(_picture, table.pictures))
    if len(table.pictures) > 4:
        parts.append(f"<details><summary>{len(table.pictures)} pictures</summary>{_cards(drawn)}</details>")
    elif drawn:
        parts.append(_cards(drawn) if len(table.pictures) > 1 else drawn)
    if notes := writing.notes_of(table):
        parts.append(_list(notes, "small"))
    return "\n".join(parts) + "\n</section>"


def _block(block: Block) -> str:
    head = "".join(f'<th scope="col">{escape(name).replace("/", "/<wbr>")}</th>' for name in ("", *block.columns))
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(_cell(cell, block.places) for cell in cells)}</tr>\n'
        for name, cells in block.rows.items()
    )
    if block.ranked:
        taus = "".join(f"<td>{writing.shown_tau(tau)}</td>" for tau in block.taus().values())
        body += f'<tr class="tau"><th scope="row">Kendall\'s tau</th>{taus}</tr>\n'
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"
    named = escape(block.title)
    scroll = f'<div class="table" tabindex="0" role="region" aria-label="{named or "table"}">{table}</div>'
    if block.folded:
        return f'<details class="card"><summary>{named}</summary>{scroll}</details>'
    return f'<div class="card">{f"<h3>{named}</h3>" if named else ""}{scroll}</div>'


def _cell(cell: Cell, places: int | None) -> str:
    ours, paper = writing.figures(cell, places)
    below = f"<small>{escape(paper)}</small>" if paper else ""
    if cell.missing:
        return f'<td class="missing" title="{escape(cell.missing)}">{escape(ours)}{below}</td>'
    return f"<td>{escape(ours)}{below}</td>"


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<div class="card"><img alt="{escape(path.stem)}" src="data:image/png;base64,{data}"></div>'


def _cards(content: str) -> str:
    return f'<div class="cards">{content}</div>'


def _list(items: Sequence[str], kind: str = "") -> str:
    opened = f'<ul class="{kind}">' if kind else "<ul>"
    return opened + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _heading(name: str) -> str:
    """table2 is Table 2."""
    return re.sub(r"(\d+)$", r" \1", name.replace("fig", "figure")).capitalize()
