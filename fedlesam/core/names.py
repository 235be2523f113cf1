"""Names a user types: look them up, or say which one was probably meant."""

import difflib
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not there, with the nearest that is.

    Args:
        kind: What the name should be of, e.g. `algorithm`.
        name: As the user typed it.
        known: All names that there are.
    """
    names = list(known)
    stems = {known.partition(":")[0].lower(): known for known in reversed(names)}
    close = difflib.get_close_matches(name.partition(":")[0].lower(), stems, n=1, cutoff=0.5)
    hint = f": did you mean {stems[close[0]]!r}?" if close else ""
    return ValueError(f"unknown {kind} {name!r}{hint} (known: {', '.join(names)})")


def is_path(text: str) -> bool:
    """Whether it reads as `module:name`.

    Args:
        text: As the user typed it.
    """
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def imported(kind: str, path: str) -> Any:
    """The object behind `module:name`; modules of the current folder count.

    Args:
        kind: What it should be, for the message, e.g. `algorithm`.
        path: As `module:name`.
    """
    if not is_path(path):
        raise ValueError(f"{kind} {path!r}: expected module:name")
    module_name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        what = f"{kind} {path!r}: cannot import {error.name!r}"
        raise ValueError(f"{what}; run from its folder or put it on PYTHONPATH") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ValueError(f"{kind} {path!r}: module {module_name!r} has no {attribute!r}") from error


def one_line(text: str) -> str:
    """For a message that repeats what a file says, which may be anything.

    Args:
        text: Any text; what would break a line of a terminal is replaced.
    """
    return "".join(letter if letter.isprintable() else " " for letter in text)


def file_name(text: str) -> str:
    """`text` with what a file system may not like replaced.

    Args:
        text: Any name.
    """
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text)
