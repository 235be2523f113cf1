"""A result table as Markdown, LaTeX and CSV."""

from fedlesam.report.tables import Column, Table, latex_text, two
from reproduction.result_table import Block, Cell, ResultTable, Value

LEGEND = (
    "A cell is ours / the paper's (difference): = the same, or within two deviations; ↑ ↓ ours is higher or lower; "
    "— missing, explained below the table."
)


def markdown(table: ResultTable) -> str:
    lines = [f"## {table.name}: {table.title}", ""]
    if any(cell.paper is not None for block in table.blocks for _, _, cell in block.cells()):
        lines += [LEGEND, ""]
    for block in table.blocks:
        lines += [f"**{block.title}**", ""] if block.title else []
        lines += [_printed(block).markdown()]
    lines += [f"![{picture.stem}]({picture.name})\n" for picture in table.pictures]
    lines += [f"- {note}" for note in notes_of(table)]
    return "\n".join(lines).rstrip() + "\n"


def latex(table: ResultTable) -> str:
    """One table environment a part; for the package booktabs."""
    lines = [f"% {table.name}: {table.title}"]
    for block in table.blocks:
        caption = latex_text(f"{table.title}. {block.title}")
        lines += [r"\begin{table}", rf"\caption{{{caption}}}", _printed(block).latex() + r"\end{table}"]
    lines += [f"% {note}" for note in notes_of(table)]
    return "\n".join(lines) + "\n"


def table_csv(table: ResultTable) -> str:
    """A line a cell, in full precision."""
    head = ["item", "part", "row", "column", "ours", "ours_std", "paper", "paper_std", "difference", "mark", "missing"]
    rows = [
        [
            *(table.name, block.title, row, column, cell.ours, cell.spread, cell.paper, cell.paper_spread),
            *(cell.difference, cell.mark, cell.missing),
        ]
        for block in table.blocks
        for row, column, cell in block.cells()
    ]
    return Table(table.name, table.title, [Column(name) for name in head], rows).csv()


def _printed(block: Block) -> Table:
    """Its cells as text; numbers to the right."""
    rows: list[list[Value | None]] = [
        [name, *(shown(cell, block.places) for cell in cells)] for name, cells in block.rows.items()
    ]
    if block.ranked:
        rows.append(["Kendall's tau", *map(shown_tau, block.taus().values())])
    return Table("", block.title, [Column(""), *(Column(name, two) for name in block.columns)], rows)


def shown(cell: Cell, places: int | None) -> str:
    ours, paper = figures(cell, places)
    return f"{ours} / {paper}" if paper else ours


def shown_tau(tau: float | None) -> str:
    return "—" if tau is None else f"{tau:+.2f}"


def figures(cell: Cell, places: int | None) -> tuple[str, str]:
    """Ours, and the paper's with the difference, which is empty if it has none."""
    ours = "—" if cell.ours is None else _text(cell.ours, places)
    if cell.spread is not None:
        ours += f" ± {_text(cell.spread, places)}"
    if cell.paper is None:
        return ours, ""
    paper = _text(cell.paper, places)
    if cell.difference is None:
        return ours, paper + (f" ({cell.mark})" if cell.mark else "")
    sign = "" if cell.difference < 0 else "+"
    change = "=" if cell.mark == "=" else f"{cell.mark} {sign}{_text(cell.difference, places)}"
    return ours, f"{paper} ({change})"


def notes_of(table: ResultTable) -> list[str]:
    """What must be known to read it, the missing cells first."""
    missing = [f"missing, {count} cell{'s' if count > 1 else ''}: {why}" for why, count in table.missing().items()]
    return [*missing, *table.notes]


def _text(value: Value, places: int | None) -> str:
    return value if isinstance(value, str) else f"{value:.4g}" if places is None else f"{value:,.{places}f}"
