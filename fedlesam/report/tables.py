"""A table once, as CSV, Markdown and LaTeX; the page shows it by its template."""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass

Cell = str | float | int | None

NOTHING = "–"


@dataclass(frozen=True)
class Column:
    """A column and how its numbers are printed."""

    name: str
    """Its heading."""
    show: Callable[[float], str] | None = None
    """How a number is written for people; None for text."""


@dataclass(frozen=True)
class Table:
    """A table with a name, a title and a caption."""

    key: str
    """Also the name of its file."""
    title: str
    """Above the table."""
    columns: list[Column]
    """From left to right."""
    rows: list[list[Cell]]
    """A cell for each column."""
    caption: str = ""
    """Below the table."""

    def csv(self) -> str:
        """Numbers as they are, so that nothing is lost on the way to a spreadsheet; empty where there is none.

        Text that a spreadsheet would take for a formula gets an apostrophe before it.
        """
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([column.name for column in self.columns])
        writer.writerows([[_tame(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows])
        return out.getvalue()

    def markdown(self) -> str:
        """As Markdown."""

        def line(cells: list[str]) -> str:
            return "| " + " | ".join(cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells) + " |\n"

        rule = "|" + "|".join("---:" if column.show else "---" for column in self.columns) + "|\n"
        return line([column.name for column in self.columns]) + rule + "".join(line(row) for row in self.shown())

    def latex(self) -> str:
        """For the package booktabs."""
        align = "".join("r" if column.show else "l" for column in self.columns)
        head = " & ".join(latex_text(column.name) for column in self.columns)
        body = "".join(" & ".join(latex_text(cell) for cell in row) + " \\\\\n" for row in self.shown())
        begin = f"\\begin{{tabular}}{{{align}}}\n\\toprule\n"
        return f"{begin}{head} \\\\\n\\midrule\n{body}\\bottomrule\n\\end{{tabular}}\n"

    def forms(self) -> list[tuple[str, str, str]]:
        """As files: the format's name, the ending and the text."""
        return [("CSV", "csv", self.csv()), ("Markdown", "md", self.markdown()), ("LaTeX", "tex", self.latex())]

    def shown(self) -> list[list[str]]:
        """The cells as text for readers."""
        return [[_show(column, cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows]


def _show(column: Column, cell: Cell) -> str:
    if cell is None:
        return NOTHING
    return str(cell) if isinstance(cell, str) or column.show is None else column.show(cell)


def _tame(text: str) -> str:
    return f"'{text}" if text[:1] in tuple("=+-@\t\r") else text


LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "×": "$\\times$",
    "±": "$\\pm$",
    "–": "--",
    "—": "--",
    "²": "$^2$",
    "↑": "$\\uparrow$",
    "↓": "$\\downarrow$",
    "≠": "$\\neq$",
}


def latex_text(text: str) -> str:
    """Text with the special characters of LaTeX escaped.

    Args:
        text: Any text.
    """
    return "".join(LATEX.get(letter, letter) for letter in text)


Show = Callable[[float], str]

whole: Show = "{:,.0f}".format
two: Show = "{:.2f}".format
signed: Show = "{:+.2f}".format
by_fedavg: Show = "{:.2f}×".format
"""A multiple of FedAvg's."""


def digits(value: float) -> str:
    """With four significant digits.

    Args:
        value: The number.
    """
    return f"{value:.4g}"


def three_digits(value: float) -> str:
    """With three significant digits.

    Args:
        value: The number.
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
