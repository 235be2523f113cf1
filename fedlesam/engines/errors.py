"""Exceptions as data, so that the leader can raise what happened in another process. Nothing is unpickled."""

import builtins
from collections.abc import Sequence
from typing import Any

from fedlesam.core.checks import NotFinite
from fedlesam.engines.signals import Interrupted

Error = Exception | Interrupted
"""What a process reports and the leader raises."""


def describe(error: Error, client: int, rank: int) -> dict[str, Any]:
    """An exception as JSON. A class that is not Python's own becomes its nearest base class that is.

    Args:
        error: the exception.
        client: the client that was trained when it was raised.
        rank: of the process.
    """
    simple = all(isinstance(part, str | int | float) for part in error.args)
    return {
        "kind": next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"),
        "args": list(error.args) if simple else [str(error)],
        "notes": getattr(error, "__notes__", []),
        "finite": [error.what, error.round, error.client, error.remedy] if isinstance(error, NotFinite) else None,
        "signum": error.signum if isinstance(error, Interrupted) else None,
        "client": error.client if isinstance(error, NotFinite) else client,
        "rank": rank,
    }


def rebuild(error: dict[str, Any]) -> Error:
    """The exception that `describe` was given.

    Args:
        error: its description.
    """
    if error["signum"]:
        return Interrupted(error["signum"])
    kind = getattr(builtins, error["kind"])
    try:
        made: Exception = NotFinite(*error["finite"]) if error["finite"] else kind(*error["args"])
    except TypeError:
        made = RuntimeError(f"{error['kind']}: {error['args']}")
    for note in error["notes"]:
        made.add_note(note)
    return made


def first_error(errors: Sequence[dict[str, Any] | None], own: Error | None) -> Error | None:
    """The error that a single process would have met first: of the smallest client, after a request to stop.

    Args:
        errors: the descriptions, None for a process without an error.
        own: the exception of rank 0 itself, which keeps its traceback.
    """
    found = sorted((e for e in errors if e), key=lambda e: (e["signum"] is None, e["client"], e["rank"]))
    if not found:
        return None
    return own if found[0]["rank"] == 0 else rebuild(found[0])
