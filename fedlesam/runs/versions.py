"""Which packages, interpreter and machine made the numbers of a run."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path


def versions() -> dict[str, str]:
    """What made the numbers: packages, interpreter, machine, and the commit where this is a checkout."""
    found = {name: version(name) for name in ("fedlesam", "torch", "numpy", "safetensors")}
    home = Path(__file__).resolve().parents[2]
    commit = ""
    if (home / ".git").exists():
        try:
            git = ["git", "-C", str(home)]
            commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True, stderr=subprocess.DEVNULL).strip()
            if subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], text=True).strip():
                commit += " with changes"
        except (OSError, subprocess.CalledProcessError):
            commit = ""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return {**found, "python": platform.python_version(), "machine": machine, "commit": commit or "not a checkout"}
