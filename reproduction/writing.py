"""A table as Markdown, LaTeX and CSV."""

import csv
import io

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
        if block.title:
            lines += [f"**{block.title}**", ""]
        cells = _rows(block)
        lines += [_line(cells[0]), _line(["---"] * len(cells[0])), *map(_line, cells[1:]), ""]
    lines += [f"![{picture.stem}]({picture.name})\n" for picture in table.pictures]
    lines += [f"- {note}" for note in notes_of(table)]
    return "\n".join(lines).rstrip() + "\n"


def latex(table: ResultTable) -> str:
    """One table environment a part; needs no package."""
    lines = [f"% {table.name}: {table.title}"]
    for block in table.blocks:
        cells = [[_tex(cell) for cell in row] for row in _rows(block)]
        lines += [
            r"\begin{table}",
            rf"\caption{{{_tex(f'{table.title}. {block.title}')}}}",
            rf"\begin{{tabular}}{{l{'c' * len(block.columns)}}}",
            r"\hline",
            " & ".join(cells[0]) + r" \\",
            r"\hline",
            *(" & ".join(row) + r" \\" for row in cells[1:]),
            r"\hline",
            r"\end{tabular}",
            r"\end{table}",
        ]
    lines += [f"% {note}" for note in notes_of(table)]
    return "\n".join(lines) + "\n"


def table_csv(table: ResultTable) -> str:
    """A line a cell, for further computation."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    head = ["item", "part", "row", "column", "ours", "ours_std", "paper", "paper_std", "difference", "mark", "missing"]
    write.writerow(head)
    for block in table.blocks:
        for row, column, cell in block.cells():
            figures = [cell.ours, cell.spread, cell.paper, cell.paper_spread, cell.difference, cell.mark, cell.missing]
            write.writerow([table.name, block.title, row, column, *map(_plain, figures)])
    return out.getvalue()


def _rows(block: Block) -> list[list[str]]:
    rows = [["", *block.columns]]
    rows += [[name, *(shown(cell, block.places) for cell in cells)] for name, cells in block.rows.items()]
    if block.ranked:
        taus = block.taus().values()
        rows.append(["Kendall's tau", *("—" if tau is None else f"{tau:+.2f}" for tau in taus)])
    return rows


def shown(cell: Cell, places: int | None) -> str:
    ours, paper = figures(cell, places)
    return f"{ours} / {paper}" if paper else ours


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
    """What must be known to read it, the missing first."""
    missing = [f"missing, {count} cell{'s' if count > 1 else ''}: {why}" for why, count in table.missing().items()]
    return [*missing, *table.notes]


def _text(value: Value, places: int | None) -> str:
    return value if isinstance(value, str) else f"{value:.4g}" if places is None else f"{value:,.{places}f}"


def _plain(value: Value | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.6g}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _tex(text: str) -> str:
    plain = "".join(f"\\{letter}" if letter in "%&#_$" else letter for letter in text)
    signs = {"±": r"$\pm$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "≠": r"$\neq$", "—": "--"}
    return "".join(signs.get(letter, letter) for letter in plain)
