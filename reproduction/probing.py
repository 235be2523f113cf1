"""The only module that uses the probes: readings of runs, surfaces of finished runs.

Through files and the command line alone: what is measured here is what anybody can measure.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlesam.engines.signals import Interrupted, handle_signals


def readings(run: Path, probe: str, value: str) -> list[tuple[int, float]]:
    """(round, value) from RUN/probes.jsonl; empty where it was not measured."""
    file = run / "probes.jsonl"
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    found = [
        (line["round"], line["values"][value]) for line in lines if line["probe"] == probe and value in line["values"]
    ]
    return sorted(found)


def surfaces(runs: Sequence[Path], grid: str, folder: Path, data_dir: str | None) -> dict[str, Any] | str:
    """Measure F around the models of finished runs into their folders and draw them into `folder`; or why not."""
    where = ["--data-dir", data_dir] if data_dir else []
    return _probe(*map(str, runs), "--probe", grid, "--figures", str(folder), *where)


def _probe(*arguments: str) -> dict[str, Any] | str:
    """`fedlesam probe ... --json`, in a process that is stopped with this one; its last error line if it fails."""
    stopped: list[int] = []
    command = [sys.executable, "-m", "fedlesam", "probe", *arguments, "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )

    def stop(signum: int) -> None:
        stopped.append(signum)
        process.send_signal(signal.SIGINT)

    with handle_signals(stop):
        out, errors = process.communicate()
    if stopped:
        raise Interrupted(stopped[0])
    if process.returncode:
        return (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found
