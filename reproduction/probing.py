"""The only module that uses the probes: readings of runs, surfaces of finished runs."""

from collections.abc import Sequence
from pathlib import Path

from fedlesam.report.measured import draw
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.measure import measure


def readings(run: Path, probe: str, value: str) -> list[tuple[int, float]]:
    """(round, value) from RUN/probes.jsonl; empty where it was not measured."""
    return [
        (one.round, one.values[value])
        for one in RunFolder(run).read_readings()
        if one.probe == probe and value in one.values
    ]


def surfaces(runs: Sequence[Path], grid: str, folder: Path, data_dir: str | None) -> str:
    """Measure F around the models of finished runs into their folders and draw them into `folder`; why not, if not."""
    try:
        draw(measure(runs, [grid], data_dir=data_dir), folder)
    except (ValueError, ArithmeticError, OSError) as error:
        return str(error)
    return ""
