"""The settings of a run as a TOML file that somebody wrote: what is wrong in it is named with its line."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlesam.core.names import unknown
from fedlesam.runs import kinds
from fedlesam.runs.config import HYPER, OPTIONS, OWN, check_setting, parse
from fedlesam.runs.kinds import KINDS, Value


def read(path: Path) -> dict[str, Value]:
    """The settings of a TOML file, hyper-parameters flattened in; unknown keys are refused with their line.

    Args:
        path: The file.
    """
    try:
        source = path.read_text(encoding="utf-8")
        table = tomllib.loads(source)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config {path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config {path}: is not TOML: {error}") from error
    hyper = table.pop("hyper", {})
    if not isinstance(hyper, dict):
        raise ValueError(f"config {path}{_line(source, 'hyper')}: hyper must be a table, [hyper]")
    for key, value in table.items():
        where = f"config {path}{_line(source, key)}"
        if key not in OPTIONS:
            raise ValueError(f"{where}: {unknown('setting', key, [*OPTIONS, 'hyper'])}")
        kind, types = KINDS[OPTIONS[key].kind]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{where}: {key} must be {kind}, got {_shown(value)}")
        if isinstance(value, str):
            table[key] = parse(key, value, f"{where}: {key}")
        else:
            check_setting(where, key, value)
    for key, value in hyper.items():
        if not isinstance(value, Value) or (key in OPTIONS and not _takes(table, key)) or not key.isidentifier():
            shown = key if key.isidentifier() else repr(key)
            raise ValueError(f"config {path}{_line(source, key)}: {shown} is not a hyper-parameter of a method")
    named = {OWN + key if key in OPTIONS else key: value for key, value in hyper.items()}
    try:
        return {key: _as_typed(key, value) for key, value in {**table, **named}.items()}
    except OverflowError as error:
        raise ValueError(f"config {path}: holds a number that is too large") from error


def _takes(table: Mapping[str, Any], key: str) -> bool:
    from fedlesam.algorithms import CATALOGUE, hyperparameters

    return table.get("algorithm") in CATALOGUE and key in hyperparameters(table["algorithm"])


def _as_typed(key: str, value: Value) -> Value:
    """TOML's `1` where a number is meant is `1.0`, as it is on the command line."""
    known = OPTIONS.get(key) or HYPER.get(key)
    meant = known is not None and known.kind in (kinds.number, kinds.rate)
    return float(value) if meant and type(value) is int else value


def _shown(value: object) -> str:
    """Python does not write numbers beyond some thousand digits."""
    try:
        return repr(value)
    except ValueError:
        return "a number with thousands of digits"


def _line(source: str, key: str) -> str:
    for i, line in enumerate(source.splitlines(), 1):
        if re.match(rf'\s*\[?\s*"?{re.escape(key)}"?\s*[\]=]', line):
            return f", line {i}"
    return ""
