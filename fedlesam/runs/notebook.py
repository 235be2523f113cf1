"""Progress in a notebook: one output below the cell that is renewed, without further packages."""

import time
from html import escape
from typing import Any

SECONDS_BETWEEN = 0.2


class NotebookBars:
    """Bars below the cell that runs."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[str, int, int | None, str]] = {}
        self._handle: Any = None
        self._shown = 0.0

    def update(self, bar: int, name: str, done: int, total: int | None, state: str) -> None:
        """Show a bar; one that has just begun or is full at once, others a few times a second.

        Args:
            bar: Its number.
            name: What is done.
            done: How much of it.
            total: How much there is, if it is known.
            state: What stands beside it.
        """
        new = bar not in self._rows
        self._rows[bar] = name, done, total, state
        if new or done == total or time.monotonic() - self._shown > SECONDS_BETWEEN:
            self._shown = time.monotonic()
            self._show({"text/html": self.html(), "text/plain": self.text()})

    def html(self) -> str:
        """The bars as a table."""
        rows = []
        for name, done, total, state in self._rows.values():
            bar = f'<progress value="{done}" max="{total}"></progress>' if total else ""
            cells = (escape(name), bar, escape(_of(done, total)), escape(state))
            rows.append("<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in cells) + "</tr>")
        return f"<table>{''.join(rows)}</table>"

    def text(self) -> str:
        """The bars where there is no HTML."""
        rows = self._rows.values()
        return "\n".join(f"{name} {_of(done, total)}  {state}".rstrip() for name, done, total, state in rows)

    def _show(self, content: dict[str, str]) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def _of(done: int, total: int | None) -> str:
    return f"{done:,}/{'?' if total is None else f'{total:,}'}"
