"""The report as one HTML file that needs nothing else: no network, no folder beside it."""

import base64
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps

from fedlesam.report.charts import ACCURACY, COSTS, Chart
from fedlesam.report.commands import command
from fedlesam.report.groups import Comparison, shared, shown
from fedlesam.report.style import ON_DARK
from fedlesam.report.tables import Table
from fedlesam.runs.evaluated import HELD_OUT

DIGITS = 5
"""Significant digits of a number in a chart: more cannot be seen, and would double the file."""


def page(comparison: Comparison, charts: list[Chart], tables: list[Table], live: str = "") -> str:
    """The text of the HTML file.

    Args:
        comparison: The groups of runs, and what must be known to compare them.
        charts: Curves, by `charts_of`.
        tables: Tables, by `tables_of`.
        live: What `fedlesam watch` calls the state of the runs; such a page asks its server for a newer one.
    """
    pool = Pool()
    panels = {
        "curves": _learning(charts, pool),
        "flatness": _probes(charts, pool),
        "surfaces": [*_surfaces(comparison), *_slices(charts, pool)],
        "split": _splits(comparison),
    }
    in_order = [panel for found in panels.values() for panel in found]
    for number, panel in enumerate(in_order):
        panel.number = number
    groups = [
        {"label": g.label, "light": g.look[0], "dark": ON_DARK.get(g.look[0], g.look[0]), "line": g.look[1]}
        for g in comparison.groups
    ]
    script, plotly = _file("page.js"), files("plotly").joinpath("package_data", "plotly.min.js").read_text("utf-8")
    watch = _file("watch.js") if live else ""
    return render(
        "report.html.j2",
        policy=_policy(plotly, script, watch),
        title=title(comparison),
        subtitle=subtitle(comparison),
        groups={group["label"]: {"number": i, **group} for i, group in enumerate(groups)},
        comparison=comparison,
        tables={table.key: table for table in tables},
        panels=panels,
        common={name: shown(value, name) for name, value in comparison.common.items()},
        versions=_versions(comparison),
        commands=[command(run.config) for run in comparison.runs],
        data=inline_json({"groups": groups, "panels": [panel.data for panel in in_order], "pool": pool.arrays}),
        plotly=plotly,
        script=script,
        live=live,
        watch=watch,
    )


def waiting_page(text: str, live: str) -> str:
    """A page that says why there are no charts yet, and renews itself.

    Args:
        text: What it waits for.
        live: The state of the runs.
    """
    watch = _file("watch.js")
    return render("waiting.html.j2", policy=_policy(watch), title="No charts yet", text=text, live=live, watch=watch)


def _policy(*scripts: str) -> str:
    """Nothing but these scripts runs, and only a live page may ask its own server."""
    allowed = " ".join(f"'sha256-{_hash(text)}'" for text in scripts if text)
    asks = "; connect-src 'self'" if _file("watch.js") in scripts else ""
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:{asks}"


def render(template: str, *packages: str, **values: Any) -> str:
    """A page of one file.

    Args:
        template: Its name; it extends base.html.j2, which takes `policy` and `title`.
        packages: Where templates are beside those of this package, in a folder `templates`.
        values: What the template shows.
    """
    found = templates(*packages).get_template(template)
    return found.render(css=_file("page.css"), version=version("fedlesam"), **values)


def templates(*packages: str) -> Environment:
    """Those of the packages and of this one; everything is escaped but what a template marks as safe."""
    loader = ChoiceLoader([PackageLoader(package) for package in (*packages, "fedlesam.report")])
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def title(comparison: Comparison) -> str:
    """The methods and the data set.

    Args:
        comparison: The groups of runs that are compared.
    """
    methods = list(dict.fromkeys(group.method for group in comparison.federated))
    what = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    if len(comparison.federated) < len(comparison.groups):
        what += " and centralised training"
    on = ", evaluated on held-out training samples" if comparison.evaluated_on == HELD_OUT else ""
    return f"{what} on {comparison.runs[0].config.data}{on}"


def subtitle(comparison: Comparison) -> str:
    """What all federated groups share, in a line.

    Args:
        comparison: The groups of runs that are compared.
    """
    common, counts = shared(comparison.federated), comparison.federated[0].runs[0].class_counts()
    active = common.get("active")
    clients = common.get("clients") or (len(counts) if counts is not None and "split" in common else None)
    seeds = max(len(group.seeds) for group in comparison.groups)
    parts = {
        common.get("model"): True,
        f"split {common.get('split')}": "split" in common,
        f"{clients} clients": clients is not None,
        f"{100 * active:g} % active" if isinstance(active, float) else f"{active} active": active is not None,
        f"{common.get('rounds')} rounds": "rounds" in common,
        f"{seeds} seed{'s' if seeds > 1 else ''}": len(comparison.runs) > 1,
    }
    return " · ".join(part for part, known in parts.items() if part and known)


class Pool:
    """Arrays of numbers, each kept once: charts of the same rounds share them."""

    def __init__(self) -> None:
        self.arrays: list[list[float | None]] = []
        self._places: dict[str, int] = {}

    def put(self, values: Iterable[float] | None) -> int | None:
        """The place of an array in `arrays`; None for None.

        Args:
            values: The array.
        """
        if values is None:
            return None
        array = [compact(value) for value in values]
        place = self._places.setdefault(json.dumps(array), len(self.arrays))
        if place == len(self.arrays):
            self.arrays.append(array)
        return place


def compact(value: float) -> float | int | None:
    """A number with few digits; None if JSON has no such number.

    Args:
        value: The number.
    """
    short = float(f"{value:.{DIGITS}g}")
    if not math.isfinite(short):
        return None
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def inline_json(content: object) -> str:
    """JSON that cannot end the script element it stands in.

    Args:
        content: What JSON can hold.
    """
    return htmlsafe_json_dumps(content, separators=(",", ":"), allow_nan=False)


def _file(name: str) -> str:
    return files("fedlesam.report").joinpath("templates", name).read_text("utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@dataclass
class Panel:
    """A chart's place on the page; the script draws `data` there."""

    heading: str
    data: dict[str, Any]
    kind: str = ""
    """Its CSS class."""
    costs: list[str] = field(default_factory=list)
    """What its curves can be drawn against, other than rounds."""
    number: int = 0
    """In the order in which the script finds their data."""

    @property
    def choices(self) -> list[str]:
        """Names of the charts a reader can choose from."""
        names = [option.get("name", "") for option in self.data["options"]]
        return names if len(names) > 1 and all(names) else []


def _chart(chart: Chart, pool: Pool) -> dict[str, Any]:
    series = []
    for one in chart.series:
        curve = {name: pool.put(getattr(one, name)) for name in ("x", "mean", "low", "high")}
        series.append({"group": one.group, **curve, "costs": {k: pool.put(v) for k, v in one.costs.items()}})
    plain = {name: getattr(chart, name) for name in ("key", "title", "caption", "log", "points")}
    axes = {"name": chart.y_label, "x": chart.x_label, "y": chart.y_label, "floor": chart.key in ACCURACY}
    return {**plain, **axes, "series": series}


def _learning(charts: list[Chart], pool: Pool) -> list[Panel]:
    """The first is the widest, and chooses what all are drawn against."""
    found: list[Panel] = []
    for chart in (chart for chart in charts if chart.section == "learning"):
        data = {"kind": "curves", "learning": True, "options": [_chart(chart, pool)]}
        costs = list(COSTS) if not found and chart.series[0].costs else []
        found.append(Panel(chart.title, data, "" if found else "wide", costs=costs))
    return found


def _probes(charts: list[Chart], pool: Pool) -> list[Panel]:
    """One for each probe, with a choice among its numbers."""
    by_probe: dict[str, list[dict[str, Any]]] = {}
    for chart in charts:
        if chart.section not in ("learning", "surface"):
            by_probe.setdefault(chart.section, []).append(_chart(chart, pool))
    return [Panel(probe.capitalize(), {"kind": "curves", "options": found}) for probe, found in by_probe.items()]


def _slices(charts: list[Chart], pool: Pool) -> list[Panel]:
    found = [chart for chart in charts if chart.section == "surface"]
    return [Panel(chart.title, {"kind": "curves", "options": [_chart(chart, pool)]}, "wide") for chart in found]


def _surfaces(comparison: Comparison) -> list[Panel]:
    options: list[dict[str, Any]] = []
    for i, group in enumerate(comparison.groups):
        if (surface := group.surface(2)) is not None:
            loss = [[compact(value) for value in row] for row in surface.loss]
            x = [compact(value) for value in surface.x]
            options.append({"group": i, "x": x, "y": x, "loss": loss})
    return [Panel("Around the final model", {"kind": "surfaces", "options": options})] if options else []


def _splits(comparison: Comparison) -> list[Panel]:
    """One heat map for each way the data were divided, of its first seed."""
    options = []
    for config, counts in comparison.splits():
        name = f"{config.split}, {len(counts)} clients"
        caption = f"Samples of each class at each client: {config.split}, seed {config.seed}."
        options.append({"name": name, "counts": counts.T.tolist(), "caption": caption})
    return [Panel("Split", {"kind": "heat", "options": options}, "heat")] if options else []


def _versions(comparison: Comparison) -> dict[str, str]:
    known = [(name, value) for run in comparison.runs for name, value in run.versions.items()]
    return {name: "; ".join(dict.fromkeys(v for n, v in known if n == name)) for name in dict(known)}
