"""Any Hugging Face `datasets.Dataset` as natural clients. The package itself is not imported: the user has made one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlesam.core.batches import ClientData
from fedlesam.core.names import unknown

LABELS = {"label": "labels"}
"""What the columns of targets are called, and what models of `transformers` and tasks call them."""
DECODED = ("Image", "Audio", "Video", "Pdf", "Nifti")
"""Features that are decoded when a sample is read."""


class NamedClients(list[ClientData | None]):
    """Clients in the order of their names, for `Federation(clients=...)`: a list, with `.names`.

    Args:
        names: One for each client.
        clients: Their samples; None of one that has none.
    """

    def __init__(self, names: Sequence[Any], clients: Sequence[ClientData | None]) -> None:
        super().__init__(clients)
        self.names = list(names)


class Samples:
    """Some rows of a dataset, each read when it is needed, as a dict.

    Attributes:
        rows: The rows.
        columns: Those that a sample has.
    """

    def __init__(self, rows: Any, columns: Sequence[str]) -> None:
        self.rows, self.columns = rows, list(columns)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.rows[number]
        return {LABELS.get(column, column): row[column] for column in self.columns}


def from_huggingface(
    dataset: Any, client: str, *, columns: Sequence[str] | None = None, names: Sequence[Any] | None = None
) -> NamedClients:
    """The rows of a `datasets.Dataset` as natural clients: those with the same value in a column are one.

    A client is a dict of tensors, with a row for each sample, where all its columns are numbers of one length: that is
    what a tokenizer with padding makes. Else it is a Dataset of dicts, for which the task needs a `collate`. The column
    `label` is called `labels`, as `Task.huggingface()` and other tasks expect.

    Args:
        dataset: A map-style dataset, such as `load_dataset(...)["train"]`.
        client: The column that says whose a row is, e.g. "speaker_id".
        columns: Those that a sample has; by default all others.
        names: The clients and their order, e.g. `clients.names` of the training part: the result then fits
            `Federation(test_clients=...)`, with None for a client without a row. By default all clients, sorted.

    Returns:
        The clients; `.names` has their names.

    Raises:
        ValueError: It is no such dataset, a column is not there, or a row has no client.
    """
    _check(dataset, client, columns or ())
    used = [name for name in dataset.column_names if name != client] if columns is None else list(columns)
    plain = dataset.with_format(None)
    owners = list(plain[client])
    for row, owner in enumerate(owners):
        if owner is None or owner == "" or (isinstance(owner, float) and np.isnan(owner)):
            raise ValueError(f"from_huggingface: row {row} has no {client}; give it one, or filter the dataset before")
    ranked = sorted(set(owners)) if names is None else list(names)
    rows: dict[Any, list[int]] = {name: [] for name in ranked}
    for row, owner in enumerate(owners):
        if owner in rows:
            rows[owner].append(row)
    tensors = _tensors(dataset, used)
    clients: list[ClientData | None] = []
    for name in ranked:
        if not rows[name]:
            clients.append(None)
        elif tensors is not None:
            mine = torch.tensor(rows[name])
            clients.append({column: values[mine] for column, values in tensors.items()})
        else:
            clients.append(Samples(dataset.select(rows[name]), used))  # type: ignore[arg-type]
    return NamedClients(ranked, clients)


def _check(dataset: Any, client: str, columns: Sequence[str]) -> None:
    if isinstance(dataset, dict):
        parts = ", ".join(map(repr, dataset))
        raise ValueError(f"from_huggingface: this is a dict of {parts}; give one of them, e.g. dataset['train']")
    if not all(hasattr(dataset, name) for name in ("column_names", "select", "with_format", "__len__")):
        raise ValueError(
            f"from_huggingface: expected a map-style datasets.Dataset, got a {type(dataset).__name__}; "
            "load it with streaming=False"
        )
    for name in (client, *columns):
        if name not in dataset.column_names:
            raise unknown("column", name, dataset.column_names)
    if not len(dataset):
        raise ValueError("from_huggingface: the dataset has no rows")
    if not [name for name in columns or dataset.column_names if name != client]:
        raise ValueError(f"from_huggingface: there is no column other than {client}, so samples would be empty")


def _tensors(dataset: Any, columns: Sequence[str]) -> dict[str, Tensor] | None:
    """All columns as tensors; None where one holds texts, pictures to be decoded, or rows of several lengths."""
    found: dict[str, Tensor] = {}
    for name in columns:
        feature = dataset.features[name]
        if type(feature).__name__ in DECODED or "string" in str(feature):
            return None
        values = dataset.with_format("torch")[name][:]
        if not isinstance(values, Tensor):
            return None
        found[LABELS.get(name, name)] = values
    return found
