"""The order in which a user named runs: that of their folder's names is not it."""

import functools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from fedlesam.core import disk

FILE = "order.json"


def read(folder: Path) -> list[str]:
    """Run folders in their order, relative to this one; empty where nobody gave one.

    A file that is not such a list is ignored: the order changes no number.

    Args:
        folder: Holds run folders.
    """
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def keep(folder: Path, names: Iterable[str]) -> None:
    """Write an order; what an earlier one has more comes after it.

    Args:
        folder: Holds run folders.
        names: Theirs, relative to it.
    """
    before = read(folder)
    order = list(dict.fromkeys([*names, *before]))
    if order != before:
        folder.mkdir(parents=True, exist_ok=True)
        disk.write_json(folder / FILE, order)


def arranged(runs: Iterable[Path]) -> list[Path]:
    """Run folders by the folder that says their order, in that order; the others by their paths.

    Args:
        runs: Run folders.
    """
    orders = functools.cache(lambda folder: {name: i for i, name in enumerate(read(folder))})

    def place(path: Path) -> tuple[Path, int, Path]:
        for folder in (path.parent, path.parent.parent):  # a sweep has its runs one level below
            order = orders(folder)
            if (name := path.relative_to(folder).as_posix()) in order:
                return folder, order[name], path
        return path.parent, sys.maxsize, path

    return sorted(runs, key=place)
