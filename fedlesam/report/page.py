"""The report as one HTML file that needs nothing else: no network, no folder beside it."""

import base64
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps

from fedlesam.core.checks import is_number
from fedlesam.report import sweeps
from fedlesam.report.charts import COSTS, Chart
from fedlesam.report.commands import command
from fedlesam.report.groups import Comparison, Group, shared, shown
from fedlesam.report.style import ON_DARK
from fedlesam.report.tables import Table
from fedlesam.runs.evaluated import HELD_OUT, Measure

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
        "clients": _choices(charts, pool, clients=True),
        "sweep": _sweeps(comparison),
        "flatness": _choices(charts, pool, clients=False),
        "surfaces": [*_surfaces(comparison), *_slices(charts, pool)],
        "split": _splits(comparison),
    }
    in_order = [panel for found in panels.values() for panel in found]
    for number, panel in enumerate(in_order):
        panel.number = number
    groups = [
        {
            "label": g.label,
            "values": g.values,
            "seeds": len(g.runs),
            "light": g.look[0],
            "dark": ON_DARK.get(g.look[0], g.look[0]),
            "line": g.look[1],
        }
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
        hyper={group.label: _all_values(group) for group in comparison.groups},
        comparison=comparison,
        tables={table.key: table for table in tables},
        panels=panels,
        costs=_costs(charts),
        common={name: shown(value, name) for name, value in comparison.common.items()},
        versions=_versions(comparison),
        commands=[command(run.config) for run in comparison.runs],
        data=inline_json(
            {"groups": groups, "panels": [panel.data for panel in in_order], "pool": pool.arrays, "costs": list(COSTS)}
        ),
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
    """Those of the packages and of this one; everything is escaped but what a template marks as safe.

    Args:
        packages: Their names; each has a folder `templates`.
    """
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
    """Above the chart."""
    data: dict[str, Any]
    """What the script draws, as JSON."""
    kind: str = ""
    """Its CSS class."""
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
    axes = {"name": chart.y_label, "x": chart.x_label, "y": chart.y_label}
    return {**plain, **axes, "series": series}


def _all_values(group: Group) -> str:
    """A line of all hyper-parameters, for a tooltip."""
    given = ", ".join(f"{name}={shown(value)}" for name, value in group.runs[0].config.hyper.items())
    return f"{given}\n" if given else ""


def _costs(charts: list[Chart]) -> list[str]:
    """What curves over rounds can be drawn against instead."""
    known = {cost for chart in charts for series in chart.series for cost in series.costs}
    return [cost for cost in COSTS if cost in known]


def _learning(charts: list[Chart], pool: Pool) -> list[Panel]:
    """The first is the widest."""
    found: list[Panel] = []
    for chart in (chart for chart in charts if chart.section == "learning"):
        data = {"kind": "curves", "options": [_chart(chart, pool)]}
        found.append(Panel(chart.title, data, "" if found else "wide"))
    return found


def _choices(charts: list[Chart], pool: Pool, *, clients: bool) -> list[Panel]:
    """One for each metric over clients or for each probe, with a choice among its numbers."""
    by_heading: dict[str, list[dict[str, Any]]] = {}
    for chart in charts:
        if (chart.section == "clients") == clients and chart.section not in ("learning", "surface"):
            heading = chart.title.partition(":")[0] if clients else chart.section.capitalize()
            by_heading.setdefault(heading, []).append(_chart(chart, pool))
    return [Panel(heading, {"kind": "curves", "options": found}) for heading, found in by_heading.items()]


def _sweeps(comparison: Comparison) -> list[Panel]:
    """What methods reached with other settings, one at a time by choice."""
    measure, options = comparison.measure, []
    label = f"{comparison.evaluated_on} {measure.title}{' (%)' if measure.percent else ''}"
    for view in sweeps.views(comparison):
        axes = []
        for i, name in enumerate(view.settings):
            values = view.axis(i)
            numbers = [compact(v) for v in values] if all(map(is_number, values)) else None
            axes.append({"name": name, "ticks": [shown(v) for v in values], "at": numbers, "log": view.is_log(i)})
        points = {name: [_point(view, p, measure) for p in found] for name, found in view.points.items()}
        beside = {name: _point(view, p, measure) for name, p in view.beside.items()}
        bars = view.form == "lines" and any(point["sd"] is not None for found in points.values() for point in found)
        caption = f"Mean of the last evaluations, over seeds{'; bars are standard deviations' if bars else ''}."
        data = {"form": view.form, "name": view.name, "axes": axes, "points": points, "beside": beside}
        options.append({**data, "y": label, "smaller": measure.smaller, "caption": caption})
    return [Panel("Over settings", {"kind": "sweep", "options": options}, "wide")] if options else []


def _point(view: sweeps.View, point: sweeps.Point, measure: Measure) -> dict[str, Any]:
    ticks = [[shown(v) for v in view.axis(i)] for i in range(len(view.settings))]
    at = [ticks[i].index(shown(v)) for i, v in enumerate(point.values)]
    spread = None if point.score.spread is None else compact(measure.scale * point.score.spread)
    return {"group": point.group, "at": at, "mean": compact(measure.scale * point.score.mean), "sd": spread}


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
