"""The report as one HTML file that needs nothing else: no network, no folder beside it."""

import base64
import hashlib
import json
import math
from collections.abc import Iterable
from html import escape
from importlib.metadata import version
from importlib.resources import files
from string import Template
from typing import Any
from urllib.parse import quote

from fedlesam.report.charts import ACCURACY, COSTS, Chart
from fedlesam.report.commands import command
from fedlesam.report.groups import Comparison, shared, shown
from fedlesam.report.style import ON_DARK
from fedlesam.report.tables import Table
from fedlesam.runs.evaluated import HELD_OUT

DIGITS = 5
"""Significant digits of a number in a chart: more cannot be seen, and would double the file."""

DASHES = {"-": "", "--": "6 3", ":": "2 2.5", "-.": "7 2 2 2"}

PROBES = {
    "sharpness": "How much the loss can rise within a radius around the global model, and around the clients' own.",
    "drift": "How far the clients' perturbations point away from the global one: 0 alike, 1 opposite.",
    "hessian": "The curvature of the global loss.",
    "estimate": "How well FedLESAM's estimate points along the true global gradient.",
}


def page(comparison: Comparison, charts: list[Chart], tables: list[Table]) -> str:
    pool = Pool()
    panels: list[dict[str, Any]] = []
    body = "\n".join(
        part
        for part in (
            _notes(comparison),
            _results(comparison, charts, tables, panels, pool),
            _probes(charts, panels, pool),
            _surfaces(comparison, charts, panels, pool),
            _section(
                "costs", "What it cost", [_table(t, comparison) for t in tables if t.key in ("costs", "to-target")]
            ),
            _splits(comparison, panels),
            _made(comparison, tables),
        )
        if part
    )
    groups = [
        {"label": g.label, "light": g.look[0], "dark": ON_DARK.get(g.look[0], g.look[0]), "line": g.look[1]}
        for g in comparison.groups
    ]
    script, plotly = _file("page.js"), files("plotly").joinpath("package_data", "plotly.min.js").read_text("utf-8")
    runs = " ".join(f"'sha256-{_hash(text)}'" for text in (plotly, script))
    return Template(_file("page.html")).substitute(
        policy=f"default-src 'none'; script-src {runs}; style-src 'unsafe-inline'; img-src data: blob:",
        version=escape(version("fedlesam")),
        title=escape(title(comparison)),
        about=escape(about(comparison)),
        css=_file("page.css"),
        chips=_chips(comparison),
        body=body,
        data=inline_json({"groups": groups, "panels": panels, "pool": pool.arrays}),
        plotly=plotly,
        script=script,
    )


def title(comparison: Comparison) -> str:
    methods = list(dict.fromkeys(group.method for group in comparison.federated))
    what = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    if len(comparison.federated) < len(comparison.groups):
        what += " and centralised training"
    beside = ", evaluated on held-out training samples" if comparison.evaluated_on == HELD_OUT else ""
    return f"{what} on {comparison.runs[0].config.data}{beside}"


def about(comparison: Comparison) -> str:
    """What all federated groups share, in a line."""
    common, counts = shared(comparison.federated), comparison.federated[0].runs[0].class_counts()
    active = common.get("active")
    clients = common.get("clients") or (len(counts) if counts is not None and "split" in common else None)
    told = [
        common.get("model"),
        f"split {common['split']}" if "split" in common else None,
        f"{clients} clients" if clients is not None else None,
        f"{100 * active:g} % active"
        if isinstance(active, float)
        else f"{active} active"
        if active is not None
        else None,
        f"{common['rounds']} rounds" if "rounds" in common else None,
        f"{max(len(group.seeds) for group in comparison.groups)} seeds" if len(comparison.runs) > 1 else None,
    ]
    return " · ".join(part for part in told if part).replace(" 1 seeds", " 1 seed")


class Pool:
    """Arrays of numbers, each kept once: charts of the same rounds share them."""

    def __init__(self) -> None:
        self.arrays: list[list[float | None]] = []
        self._places: dict[str, int] = {}

    def put(self, values: Iterable[float] | None) -> int | None:
        if values is None:
            return None
        array = [compact(value) for value in values]
        place = self._places.setdefault(json.dumps(array), len(self.arrays))
        if place == len(self.arrays):
            self.arrays.append(array)
        return place


def compact(value: float) -> float | int | None:
    """In few letters; None for what JSON has no number for."""
    short = float(f"{value:.{DIGITS}g}")
    if not math.isfinite(short):
        return None
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def inline_json(content: object) -> str:
    """Nothing in it can end the script element it stands in."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _file(name: str) -> str:
    return files("fedlesam.report").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _section(key: str, heading: str, parts: list[str], said: str = "") -> str:
    if not any(parts):
        return ""
    small = f'<p class="small">{escape(said)}</p>' if said else ""
    return (
        f'<section id="{key}">\n<h2>{escape(heading)}</h2>{small}\n' + "\n".join(p for p in parts if p) + "\n</section>"
    )


def _swatch(comparison: Comparison, number: int) -> str:
    colour, line = comparison.groups[number].look
    dashes = f' stroke-dasharray="{DASHES[line]}"' if DASHES[line] else ""
    colours = f"--light:{colour};--dark:{ON_DARK.get(colour, colour)}"
    return (
        f'<svg class="swatch" style="{colours}" viewBox="0 0 26 10" aria-hidden="true">'
        f'<line x1="0" y1="5" x2="26" y2="5"{dashes}/></svg>'
    )


def _chips(comparison: Comparison) -> str:
    chips = [
        f'<button class="chip" type="button" data-group="{i}" aria-pressed="true" '
        f'title="Show or hide; double-click shows it alone">{_swatch(comparison, i)}{escape(group.label)}</button>'
        for i, group in enumerate(comparison.groups)
    ]
    if len(chips) > 1:
        chips += [f'<button class="chip all" type="button" id="{name}">{name}</button>' for name in ("all", "none")]
    return "\n".join(chips)


def _notes(comparison: Comparison) -> str:
    if not comparison.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
    return f'<aside class="note"><strong>Before you compare</strong><ul>{items}</ul></aside>'


def _table(table: Table, comparison: Comparison) -> str:
    numbers = {group.label: i for i, group in enumerate(comparison.groups)}

    def method(label: str) -> tuple[str, str]:
        content = f'<span class="method">{_swatch(comparison, numbers[label])}{escape(label)}</span>'
        return f' data-group="{numbers[label]}"', content

    saves = "".join(
        f'<a download="{table.key}.{ending}" href="data:text/plain;charset=utf-8,{quote(text)}">{name}</a>'
        for name, ending, text in (
            ("CSV", "csv", table.csv()),
            ("Markdown", "md", table.markdown()),
            ("LaTeX", "tex", table.latex()),
        )
    )
    said = f'<p class="small">{escape(table.about)}</p>' if table.about else ""
    return (
        f'<div class="card"><div class="head"><h3>{escape(table.title)}</h3><span class="saves">{saves}</span></div>\n'
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(table.title)}">{table.html(method)}</div>'
        f"{said}</div>"
    )


def _panel(
    panels: list[dict[str, Any]], heading: str, data: dict[str, Any], *, tools: str = "", kind: str = "", said: str = ""
) -> str:
    """A chart's place on the page; the script fills it."""
    names = [option.get("name", "") for option in data["options"]]
    if len(names) > 1 and all(names):
        choices = "".join(f'<option value="{i}">{escape(name)}</option>' for i, name in enumerate(names))
        tools += f'<select data-choose aria-label="What {escape(heading)} shows">{choices}</select>'
    panels.append(data)
    plot = (
        '<div class="plot" tabindex="0" role="img"></div>'
        if data["kind"] != "surfaces"
        else '<div class="scenes"></div>'
    )
    return (
        f'<div class="card {kind}" data-panel="{len(panels) - 1}"><div class="head"><h3>{escape(heading)}</h3>'
        f'<span class="tools">{tools}</span></div>{plot}<p class="small said">{escape(said)}</p></div>'
    )


def _chart(chart: Chart, pool: Pool) -> dict[str, Any]:
    return {
        "key": chart.key,
        "title": chart.title,
        "name": chart.y_label,
        "x": chart.x_label,
        "y": chart.y_label,
        "about": chart.about,
        "log": chart.log,
        "points": chart.points,
        "floor": chart.key in ACCURACY,
        "series": [
            {
                "group": s.group,
                "x": pool.put(s.x),
                "mean": pool.put(s.mean),
                "low": pool.put(s.low),
                "high": pool.put(s.high),
                "costs": {name: pool.put(values) for name, values in s.costs.items()},
            }
            for s in chart.series
        ],
    }


def _results(
    comparison: Comparison, charts: list[Chart], tables: list[Table], panels: list[dict[str, Any]], pool: Pool
) -> str:
    results = [_table(table, comparison) for table in tables if table.key in ("results", "gains")]
    learning = [chart for chart in charts if chart.section == "learning"]
    cards = []
    for chart in learning:
        tools = ""
        if chart is learning[0] and chart.series[0].costs:
            choices = "".join(f'<option value="{escape(name)}">{escape(name)}</option>' for name in COSTS)
            tools = f'<label>against <select id="against"><option value="">rounds</option>{choices}</select></label>'
        data = {"kind": "curves", "learning": True, "options": [_chart(chart, pool)]}
        cards.append(_panel(panels, chart.title, data, tools=tools, kind="wide" if chart is learning[0] else ""))
    several = any(len(group.runs) > 1 for group in comparison.groups)
    said = "Lines are means over seeds, bands the range between the lowest and the highest." if several else ""
    curves = f'<div class="cards">{"".join(cards)}</div>' if cards else ""
    return _section("results", "Results", results) + _section("curves", "Learning curves", [curves], said)


def _probes(charts: list[Chart], panels: list[dict[str, Any]], pool: Pool) -> str:
    """One panel for each probe, with a choice among its numbers."""
    by_probe: dict[str, list[Chart]] = {}
    for chart in charts:
        if chart.section not in ("learning", "surface"):
            by_probe.setdefault(chart.section, []).append(chart)
    cards = []
    for probe, found in by_probe.items():
        data = {"kind": "curves", "options": [_chart(chart, pool) for chart in found]}
        cards.append(_panel(panels, probe.capitalize(), data))
    said = " ".join(f"{probe.capitalize()}: {PROBES[probe]}" for probe in by_probe if probe in PROBES)
    inner = f'<div class="cards">{"".join(cards)}</div>' if cards else ""
    return _section("flatness", "Flatness and drift", [inner], said)


def _surfaces(comparison: Comparison, charts: list[Chart], panels: list[dict[str, Any]], pool: Pool) -> str:
    lines = [
        _panel(panels, chart.title, {"kind": "curves", "options": [_chart(chart, pool)]}, kind="wide")
        for chart in charts
        if chart.section == "surface"
    ]
    options: list[dict[str, Any]] = []
    for i, group in enumerate(comparison.groups):
        surface = group.surface(2)
        if surface is not None:
            loss = [[compact(value) for value in row] for row in surface.loss]
            x, y = ([compact(value) for value in axis] for axis in (surface.x, surface.y))
            options.append({"group": i, "x": x, "y": y, "loss": loss})
    grid = ""
    if options:
        tools = (
            '<span class="scale">loss <i></i> <span data-range></span></span>'
            "<label>view <select data-view><option>3-D</option><option>contours</option></select></label>"
            '<label><input type="checkbox" data-log> log scale</label>'
        )
        said = "One scale of heights and colours for all methods, the same two directions. Drag one to rotate all."
        grid = _panel(
            panels, "Around the final model", {"kind": "surfaces", "options": options}, tools=tools, said=said
        )
    return _section("surfaces", "Loss surfaces", [grid, *lines])


def _splits(comparison: Comparison, panels: list[dict[str, Any]]) -> str:
    """One heat map for each way the data were divided, of its first seed."""
    options: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in (run for group in comparison.federated for run in group.runs):
        key = run.config.split, run.config.clients
        counts = run.class_counts() if key not in options else None
        if counts is not None and counts.size:
            options[key] = {
                "name": f"{run.config.split}, {len(counts)} clients",
                "counts": counts.T.tolist(),
                "about": f"Samples of each class at each client: {run.config.split}, seed {run.config.seed}.",
            }
    if not options:
        return ""
    panel = _panel(panels, "Split", {"kind": "heat", "options": list(options.values())}, kind="heat")
    return _section("split", "How the data were divided", [panel])


def _made(comparison: Comparison, tables: list[Table]) -> str:
    differ = [_table(table, comparison) for table in tables if table.key == "differences"]
    common = "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(shown(v))}</dd></div>" for k, v in comparison.common.items()
    )
    made: dict[str, list[str]] = {}
    for run in comparison.runs:
        for name, value in run.versions.items():
            made.setdefault(name, [])
            if value not in made[name]:
                made[name].append(value)
    versions = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape('; '.join(v))}</dd></div>" for k, v in made.items())
    commands = escape("\n".join(command(run.config) for run in comparison.runs))
    folders = escape("\n".join(str(run.path) for run in comparison.runs))
    card = (
        '<div class="card apart">'
        f"<h3>What all runs share</h3><dl>{common}</dl>"
        + (f"<details open><summary>Versions</summary><dl>{versions}</dl></details>" if versions else "")
        + "<details><summary>Commands to reproduce</summary>"
        '<p class="small">Each makes one run again, with the same bits where the versions and the machine are the '
        f'same.</p><pre tabindex="0">{commands}</pre></details>'
        f'<details><summary>Run folders</summary><pre tabindex="0">{folders}</pre></details></div>'
    )
    return _section("made", "What was compared, and how", [*differ, card])
