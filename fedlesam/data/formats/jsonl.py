"""Files of JSON objects, one a line, gzipped or not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedlesam.data._files import plain_bytes

Row = dict[str, Any]


def rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Every object with the place it is at, for messages; a ValueError names the first line that is none.

    Args:
        path: The file.
    """
    for number, line in enumerate(plain_bytes(path).split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: is not JSON ({error}); the file is truncated or of another kind") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: is a {type(row).__name__}, and an object {{...}} is expected")
        yield where, row


def text_of(row: Row, key: str, where: str) -> str:
    """A text of a row; a ValueError if there is none.

    Args:
        row: The row.
        key: Of the text.
        where: The place of the row.
    """
    value = row.get(key)
    if not isinstance(value, str):
        found = f"is {value!r:.40}" if key in row else f"is missing; it has {', '.join(row) or 'nothing'}"
        raise ValueError(f"{where}: {key!r} must be a text, and {found}")
    return value
