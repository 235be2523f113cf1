"""A federation and its records, as a person wants to see them."""

import re
from dataclasses import dataclass
from html import escape

from fedlesam.core.record import Record

HEAD, TAIL = 3, 5
"""Rounds that a notebook shows of a long history."""


class History(list[Record]):
    """A list of records that prints itself as a line, and in a notebook as a table."""

    def __repr__(self) -> str:
        if not self:
            return "History(no rounds yet)"
        tested = next((record for record in reversed(self) if record.test_loss is not None), None)
        last = "" if tested is None else f"; after round {tested.round}: {_measured(tested)}"
        return f"History({len(self)} rounds; train loss {self[-1].train_loss:.4g}{last})"

    def _repr_html_(self) -> str:
        """A row for each of the first and the last rounds."""
        names = list(dict.fromkeys(name for record in self for name in record.metrics))
        columns = [
            "round",
            "train loss",
            "test loss",
            *(f"test {name}" for name in names),
            "passes",
            "MB sent",
            "seconds",
        ]
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        long = len(self) > HEAD + TAIL + 1
        shown = [*self[:HEAD], None, *self[-TAIL:]] if long else list(self)
        body = "".join(_row(record, names, len(columns)) for record in shown)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class Overview:
    """A federation for readers: a line, and in a notebook a table."""

    name: str | None
    """The method's name in the catalogue; None for one that was given as an Algorithm."""
    algorithm: str
    """Its `repr`."""
    clients: int
    """How many there are."""
    active: int
    """How many of them a round has."""
    parameters: int
    """The trainable ones of the model."""
    round: int
    """Rounds done."""
    local: str
    """The `repr` of the settings of local training."""
    history: History
    """The records of the rounds."""

    def __repr__(self) -> str:
        last = next((r for r in reversed(self.history) if r.test_loss is not None), None)
        first = next(iter(last.metrics.items()), ("loss", last.test_loss)) if last is not None else None
        parts = [
            self.name or self.algorithm,
            f"{self.clients} clients, {self.active} active",
            f"{self.parameters:,} parameters",
            f"round {self.round}",
            *([f"test {first[0]} {first[1]:.4f}"] if first is not None else []),
        ]
        return f"Federation({'; '.join(parts)})"

    def html(self) -> str:
        """The table of a notebook."""
        known = {
            "method": self.algorithm if self.name is None else f"{self.name}: {self.algorithm}",
            "clients": f"{self.clients:,}, {self.active:,} active in a round",
            "parameters": f"{self.parameters:,}",
            "local training": re.sub(r"<function (\w+) at 0x\w+>", r"\1", self.local),
            "rounds": f"{self.round:,}",
            "history": repr(self.history),
        }
        left = ' style="text-align:left"'
        rows = [f"<tr><th{left}>{name}</th><td{left}>{escape(value)}</td></tr>" for name, value in known.items()]
        return f"<table>{''.join(rows)}</table>"


def _measured(record: Record) -> str:
    """The numbers of an evaluation, in a line."""
    found = {"loss": record.test_loss, **record.metrics}
    return ", ".join(f"test {name} {value:.4g}" for name, value in found.items() if value is not None)


def _row(record: Record | None, names: list[str], width: int) -> str:
    if record is None:
        return f'<tr><td colspan="{width}">…</td></tr>'
    sent = (record.bytes_down + record.bytes_up) / 1e6
    numbers = [record.train_loss, record.test_loss, *map(record.metrics.get, names)]
    cells = [str(record.round), *("" if value is None else f"{value:.4g}" for value in numbers)]
    cells += [f"{record.backward_passes:,}", f"{sent:.3g}", f"{record.seconds:.2g}"]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
