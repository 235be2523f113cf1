"""The command line as a program, and what it said."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TINY = ["--clients", "6", "--active", "2", "--epochs", "1", "--batch-size", "50", "--model", "mlp:hidden=4"]


class Done(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Done]


def process(*args: str, folder: Path, code: str | None = None, **environment: str) -> Done:
    """A real one, its output in pipes."""
    start = ["-m", "fedlesam"] if code is None else ["-c", code]
    clean = {k: v for k, v in os.environ.items() if k not in ("FEDLESAM_TRACEBACK", "FORCE_COLOR", "PYTHONWARNINGS")}
    done = subprocess.run(
        [sys.executable, *start, *args],
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
