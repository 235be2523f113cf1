"""What probes measured of runs in their folders: names, tables and pictures."""

from collections.abc import Sequence
from pathlib import Path

from fedlesam.report import surfaces
from fedlesam.report.groups import labels
from fedlesam.report.style import looks
from fedlesam.report.tables import Cell, Column, Table
from fedlesam.runs.measure import Measured
from fedlesam.runs.methods import method_name
from fedlesam.runs.read import read_run


def names(found: Sequence[Measured]) -> dict[Path, str]:
    """A name per run, as in a report; with the seed if there are several, and the folder if that is not enough.

    Args:
        found: What `measure` returned.
    """
    configs = {one.run: one.config for one in found}
    known = [label.split(" #")[0] for label in labels(list(configs.values()))]
    seeds = [config.seed for config in configs.values()]
    if len(set(seeds)) > 1:
        known = [f"{name} seed {seed}" for name, seed in zip(known, seeds, strict=True)]
    named = zip(configs, known, strict=True)
    return {path: name if known.count(name) == 1 else f"{name} {path.name}" for path, name in named}


def tables(found: Sequence[Measured]) -> list[tuple[Table, list[Measured]]]:
    """A table per probe with a row per run, and the measurements it is made of.

    Args:
        found: What `measure` returned.
    """
    made: list[tuple[Table, list[Measured]]] = []
    method = names(found)
    for request in dict.fromkeys(one.request for one in found if one.reading is not None):
        ours = [one for one in found if one.request == request]
        readings = [one.reading for one in ours if one.reading is not None]
        probe, first = readings[0].probe, readings[0].metadata
        values = list(dict.fromkeys(name for reading in readings for name in reading.values))
        same = {k: v for k, v in first.items() if all(reading.metadata.get(k) == v for reading in readings)}
        shown = ", ".join(f"{k} {v}" for k, v in same.items() if not isinstance(v, bool) and k != "clients")
        gaps = any(reading.missing for reading in readings)
        rows: list[list[Cell]] = []
        for one, r in zip(ours, readings, strict=True):
            own = [*map(r.values.get, values), r.seconds, *([r.missing] if gaps else [])]
            rows.append([method[one.run], str(one.run), r.round, *own])
        columns = [Column("method"), Column("run")]
        columns += [Column(name, "{:.5g}".format) for name in ("round", *values, "seconds")]
        columns += [Column("missing")] if gaps else []
        again = sum(others[0].probe == probe for _, others in made)
        made.append((Table(f"{probe}-{again + 1}" if again else probe, f"{probe}, {shown}", columns, rows), ours))
    return made


def draw(found: Sequence[Measured], folder: Path) -> list[Path]:
    """Pictures of the loss surfaces, on one scale; none where no surface was measured.

    Args:
        found: What `measure` returned.
        folder: Where the pictures go.
    """
    ours, method = [one for one in found if one.dims], names(found)
    if not ours:
        return []
    runs = {one.run: read_run(one.run) for one in ours}
    configs = [run.config for run in runs.values()]
    style = dict(zip(runs, looks([method_name(c.algorithm, c.split) for c in configs]), strict=True))
    drawn = [(method[one.run], style[one.run], runs[one.run].surface(one.dims)) for one in ours]
    return surfaces.draw([(name, look, found) for name, look, found in drawn if found is not None], folder)
