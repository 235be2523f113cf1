"""How each kind of table is made from the runs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from fedlesam import algorithms
from fedlesam.algorithms import CATALOGUE, Algorithm
from fedlesam.data.catalogue import is_domains, parse_domains
from fedlesam.data.formats.domains import find
from fedlesam.report.pictures import accuracy_curves
from fedlesam.rules import CorrectedAscent, GlobalAscent, LocalAscent, NoPerturbation
from fedlesam.runs import costs
from fedlesam.runs.build import load_data
from fedlesam.runs.config import RunConfig
from fedlesam.runs.read import Run
from fedlesam.runs.stats import SeedMean
from reproduction import figures
from reproduction.context import Context, average, cell_of, first
from reproduction.items import DOMAIN_SETTINGS, ITEMS, SETTINGS, Item, RunSpec
from reproduction.paper import paper_tables
from reproduction.rankings import places
from reproduction.result_table import Block, Cell, ResultTable, Value
from reproduction.results import MEASURES
from reproduction.scales import on_scale
from reproduction.timing import TURNS, per_round

PARTS = {setting: part for part, setting in (SETTINGS | DOMAIN_SETTINGS).items()}
BASES = {"fedlesam": "fedavg", "fedlesam-s": "scaffold", "fedlesam-d": "feddyn"}
TARGETS = (68.0, 74.0)
IN_TURNS = f"the median of {TURNS} rounds, training and aggregation, the methods taking turns on one thread"


PERTURBATIONS: dict[type, tuple[str, str]] = {
    LocalAscent: ("local sharpness", "rho * unit(g_i)"),
    CorrectedAscent: ("local sharpness with correction", "rho * unit(g_i - mu_i - s)"),
    GlobalAscent: ("global sharpness", "rho * unit(old_i - w)"),
}
"""Table 1: what the method minimises, and its perturbation."""


def make(item: Item, context: Context) -> ResultTable:
    return MAKERS[item.kind](item, context)


def accuracy(item: Item, context: Context) -> ResultTable:
    """Tables 2 and 3: a part a client setting and measure, in the paper's shape; curves of every column.

    A stand-in has its own columns, with their average and the places of the methods in place of the paper's figures.
    """
    blocks, drawn = [], []
    for setting in dict.fromkeys((spec.clients, spec.active) for spec in item.specs):
        specs = {(spec.method, spec.column): spec for spec in item.specs if (spec.clients, spec.active) == setting}
        columns = tuple(dict.fromkeys(column for _, column in specs))
        methods = tuple(dict.fromkeys(method for method, _ in specs))
        printed = [column for column in columns if column in paper_tables()[item.name].columns]
        for measure, name in MEASURES.items():
            rows = {
                method: tuple(_accuracy(item, context, specs[method, column], measure) for column in columns)
                for method in methods
            }
            title = f"{PARTS[setting]}; {name}"
            if printed:
                blocks.append(Block(title, columns, rows, ranked=True, folded=measure != "last"))
                continue
            means = {method: (*cells, average(cells)) for method, cells in rows.items()}
            blocks.append(Block(title, (*columns, "average"), means, folded=measure != "last"))
            if measure == "last":
                blocks += _places(item, context, PARTS[setting], {m: cells[-1] for m, cells in means.items()}, columns)
        for column in columns:
            runs = [run for method in methods for run in context.results.of(specs[method, column])]
            if runs:
                path = context.folder / f"{item.name}-{column.replace('/', '-')}-{setting[0]}-clients.png"
                drawn.append(accuracy_curves(runs, path, f"{column}, {PARTS[setting]}"))
    notes = [] if item.specs else ["missing: nothing is left by --only at this scale"]
    if context.scale_name != "full":
        notes.append(
            "at a reduced scale the differences are the scale's; what can be compared is the order of the methods"
        )
    if any(spec.data == context.stand_in for spec in item.specs):
        notes.append(
            f"{context.stand_in} stands in for OfficeHome and DomainNet; the paper prints nothing for it. Places: 1 is "
            "the highest average over the targets, among the methods shown"
        )
    if item.name == "table3":
        notes.append("the paper's upper rows of FedLESAM and FedLESAM-D repeat the lower ones (docs/errata.md, 6)")
    return ResultTable(item.name, item.shows, tuple(blocks), tuple(notes), tuple(drawn))


def _accuracy(item: Item, context: Context, spec: RunSpec, measure: str) -> Cell:
    printed = paper_tables()[item.name].figure(PARTS[spec.clients, spec.active], spec.method, spec.column)
    return context.cell(spec, measure, printed)


def _places(
    item: Item, context: Context, part: str, averages: Mapping[str, Cell], columns: tuple[str, ...]
) -> Iterator[Block]:
    """The order of the methods on a stand-in beside their order by the paper's averages on its own data sets."""
    ours = {method: float(cell.ours) for method, cell in averages.items() if isinstance(cell.ours, float)}
    every = {spec.column for spec in on_scale(ITEMS[item.name], context.results.scale).specs}
    if len(ours) < 2 or not every <= set(columns):
        return
    printed = paper_tables()[item.name]
    sets = tuple(dict.fromkeys(column.partition("/")[0] for column in printed.columns))
    theirs = {}
    for data in sets:
        mine = [i for i, column in enumerate(printed.columns) if column.startswith(f"{data}/")]
        theirs[data] = places({m: fmean(float(printed.parts[part][m][i][0]) for i in mine) for m in ours})
    found = places(ours)
    rows = {m: tuple(Cell(float(found[m]), None, float(theirs[data][m])) for data in sets) for m in ours}
    titles = tuple(f"{context.stand_in} / {data}" for data in sets)
    yield Block(f"{part}; place by the average, ours on {context.stand_in} / the paper's", titles, rows, 0, ranked=True)


def gain(item: Item, context: Context) -> ResultTable:
    """Table 4: averages over all splits and client settings, where every method of the table has a result."""
    printed = paper_tables()[item.name]
    methods = tuple(dict.fromkeys(spec.method for spec in item.specs))
    averages: dict[tuple[str, str], Cell] = {}
    columns = context.data_sets(printed.columns)
    whole_table = on_scale(ITEMS[item.name], context.results.scale).specs
    notes = []
    for data in columns:
        cells: dict[tuple[object, ...], dict[str, RunSpec]] = {}
        for spec in item.specs:
            if spec.data == data:
                cells.setdefault((spec.split, spec.clients), {})[spec.method] = spec
        whole = [specs for specs in cells.values() if all(context.results.of(specs[m]) for m in methods if m in specs)]
        of = len({(spec.split, spec.clients) for spec in whole_table if spec.data == data})
        if 0 < len(whole) < of:
            whose = "the paper's " if data in printed.columns else ""
            notes.append(f"{data}: the average of {len(whole)} of {whose}{of} cells")
        for method in methods:
            values = [context.results.accuracy(specs[method]) for specs in whole if method in specs]
            mean = fmean(value.mean for value in values if value is not None) if values else None
            asked = next((specs[method] for specs in cells.values() if method in specs), None)
            figure = printed.figure(item.part, method, data) or (None, None)
            reasons = (context.results.why_missing(spec) for specs in cells.values() for spec in specs.values())
            why = first(reasons) or "not run"
            missing = "" if mean is not None else why if asked else context.why_absent(data)
            averages[method, data] = Cell(mean, None, figure[0], missing=missing)
    rows = {method: tuple(averages[method, data] for data in columns) for method in methods}
    gains = {
        f"{variant} - {base}": tuple(_minus(averages[variant, data], averages[base, data]) for data in columns)
        for variant, base in BASES.items()
        if variant in methods and base in methods
    }
    blocks = [Block("average accuracy, last round", columns, rows, ranked=True)]
    return ResultTable(
        item.name,
        item.shows,
        (*blocks, Block("gain", columns, gains)) if gains else tuple(blocks),
        tuple(notes),
    )


def _minus(left: Cell, right: Cell) -> Cell:
    def less(one: Value | None, other: Value | None) -> float | None:
        return one - other if isinstance(one, float) and isinstance(other, float) else None

    ours, paper = less(left.ours, right.ours), less(left.paper, right.paper)
    missing = "" if ours is not None else left.missing or right.missing
    return Cell(ours, None, None if paper is None else round(paper, 2), missing=missing)


def target(item: Item, context: Context) -> ResultTable:
    """Tables 5 and 9: what the first round at or above a target has cost up to there."""
    printed = paper_tables()[item.name]
    rows = printed.parts[item.part]
    specs = {spec.method: spec for spec in item.specs}
    if not specs:
        return ResultTable(item.name, item.shows, notes=("missing: left out by --only",))
    column = next(iter(specs.values())).column
    targets, said = _targets(context, specs.get("fedavg"), column)
    seconds = _seconds(item, context)
    spent = {
        method: [_spent(context.results.of(spec), target, seconds.get(method, 0.0)) for target in targets]
        for method, spec in specs.items()
    }
    base = spent.get("fedavg", [None, None])

    def cells(method: str, absolute: bool) -> tuple[Cell, ...]:
        found = []
        for i in range(len(printed.columns)):
            what, which = divmod(i, 2)
            figure, unit = float(rows[method][i][0]), float(rows["fedavg"][i][0])
            paper = figure / unit if not absolute and figure > 10 else figure  # table 9 prints rounds, not multiples
            mine, theirs = spent[method][which], base[which]
            ours = None if mine is None else mine[what]
            missing = context.results.why_missing(specs[method]) or "the target was not reached" if ours is None else ""
            if ours is not None and not absolute:
                ours = ours / theirs[what] if theirs is not None and theirs[what] else None
                missing = "FedAvg has not reached it, or was left out" if ours is None else ""
            found.append(Cell(ours, None, paper, missing=missing))
        return tuple(found)

    columns = tuple(
        f"{what} to {'high' if i % 2 else 'low'} target"
        for i, what in enumerate(("rounds", "rounds", "communication", "communication", "time", "time"))
    )
    blocks = []
    if "fedavg" in specs:
        title = "FedAvg: rounds, billions of numbers sent, minutes"
        blocks.append(Block(title, columns, {"fedavg": cells("fedavg", True)}, None))
    others = {method: cells(method, False) for method in specs if method != "fedavg"}
    if others:
        blocks.append(Block("multiples of FedAvg", columns, others, ranked=True))
    notes = (
        *said,
        "reached: the first evaluated round at or above the target; the paper does not say",
        "the paper's communication of FedLESAM-D and MoFedSAM counts too much, its times contradict table 8 "
        "(docs/errata.md, 14 and 15)",
        f"time: the rounds times the seconds of a round: {IN_TURNS}",
    )
    return ResultTable(item.name, item.shows, tuple(blocks), notes)


def _targets(context: Context, base: RunSpec | None, column: str) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """The paper's at full scale; else the same shares of FedAvg's accuracy that they are in the paper."""
    if context.scale_name == "full":
        return TARGETS, ()
    found = context.results.accuracy(base, "mean_of_last") if base is not None else None
    figure = paper_tables()["table2"].figure(PARTS[100, 0.1], "fedavg", column)
    assert figure is not None
    if found is None:
        return TARGETS, ("targets: 68 and 74 %, since there is no FedAvg to take shares of",)
    shares = [target / float(figure[0]) for target in TARGETS]
    lower = tuple(share * found.mean for share in shares)
    return lower, (
        f"reduction: the targets are {lower[0]:.2f} and {lower[1]:.2f} %, {100 * shares[0]:.1f} and "
        f"{100 * shares[1]:.1f} % of FedAvg's mean of the last evaluations, as 68 and 74 are of the paper's FedAvg",
    )


def _spent(runs: list[Run], target: float, seconds: float) -> tuple[float, float, float] | None:
    """Rounds, billions of numbers sent, minutes; means over seeds, None if one of them never came there."""
    found = []
    for run in runs:
        at = next((i for i, r in enumerate(run.records) if 100 * (r.get("test_accuracy") or 0.0) >= target), None)
        if at is None:
            return None
        until = run.records[: at + 1]
        sent = sum(r["bytes_down"] + r["bytes_up"] for r in until) / 4e9
        found.append((at + 1.0, sent, (at + 1) * seconds / 60))
    return (fmean(f[0] for f in found), fmean(f[1] for f in found), fmean(f[2] for f in found)) if found else None


def clock(item: Item, context: Context) -> ResultTable:
    """Table 8: seconds per round, and as multiples of FedAvg's, which can be compared between machines."""
    printed = paper_tables()[item.name]
    seconds = _seconds(item, context)
    base, unit = seconds.get("fedavg"), printed.figure(item.part, "fedavg", printed.columns[0])
    assert unit is not None
    absolute, relative = {}, {}
    for spec in item.specs:
        figure = printed.figure(item.part, spec.method, printed.columns[0])
        assert figure is not None
        mine = seconds.get(spec.method)
        missing = context.results.why_missing(spec)
        absolute[spec.method] = (cell_of(SeedMean(mine, None) if mine else None, figure[0], None, missing),)
        times = SeedMean(mine / base, None) if mine and base else None
        missing = missing if base else "there is no FedAvg to compare with"
        relative[spec.method] = (cell_of(times, float(figure[0]) / float(unit[0]), None, missing),)
    notes = (f"ours: {IN_TURNS}; the paper's: one RTX 3090, loading and evaluation included",)
    blocks = (
        Block("", printed.columns, absolute, None),
        Block("multiples of FedAvg", printed.columns, relative, ranked=True),
    )
    return ResultTable(item.name, item.shows, blocks if item.specs else (), notes)


def _seconds(item: Item, context: Context) -> dict[str, float]:
    """Per round and method, of all that tables 5, 8 and 9 show on this split, so that they agree with each other."""
    split = next((spec.split for spec in item.specs), "")
    runs = context.results.runs
    done = {spec.method: spec for spec in runs if (spec.split, spec.clients, spec.ratio) == (split, 100, None)}
    rows = [method for method in paper_tables()["table8"].parts["time"] if method in done]
    configs = {method: runs[done[method]][0].config for method in rows}
    return per_round(configs, context.folder / "clock.json") if rows else {}


def cost(item: Item, context: Context) -> ResultTable:
    """Table 7, counted on two rounds of the smallest problem. Stored: the model, what comes with it, what is kept."""
    printed = paper_tables()[item.name]
    rows = {}
    for method, row in printed.parts[item.part].items():
        if context.only.keeps_method(method):
            found = costs.measure(algorithms.get(method))
            ours = (found.stored + found.down - 1, (found.down + found.up) / 2, found.passes)
            rows[method] = tuple(Cell(o, None, p) for o, (p, _) in zip(ours, row, strict=True))
    notes = ("differences: docs/errata.md, 15",)
    return ResultTable(item.name, item.shows, (Block("multiples of FedAvg", printed.columns, rows, 1),), notes)


def methods(item: Item, context: Context) -> ResultTable:
    """Table 1, derived from the catalogue."""
    printed = paper_tables()[item.name]
    rows = {}
    for method, row in printed.parts[item.part].items():
        if context.only.keeps_method(method):
            algorithm = algorithms.get(method)
            extra = "yes" if costs.measure(algorithm).passes > 1 else "no"
            target, direction = PERTURBATIONS[type(algorithm.perturbation)]
            ours = (_base(algorithm), target, extra)
            rows[method] = (
                *(Cell(o, None, p) for o, (p, _) in zip(ours, row, strict=True)),
                Cell(direction),
            )
    return ResultTable(item.name, item.shows, (Block("", (*printed.columns, "perturbation"), rows),))


def _base(algorithm: Algorithm) -> str:
    """The method with the same correction and server rule and no perturbation, by the paper's name for it."""
    names = {"fedavg": "FedAvg", "scaffold": "SCAFFOLD", "fedcm": "FedAvg with momentum", "feddyn": "FedDyn"}
    for name in names:
        base = CATALOGUE[name]()
        if isinstance(base.perturbation, NoPerturbation) and (type(base.correction), type(base.server)) == (
            type(algorithm.correction),
            type(algorithm.server),
        ):
            return names[name]
    return "none"


def data_sets(item: Item, context: Context) -> ResultTable:
    """Table 6, counted in the files; the images themselves, so the same at every scale."""
    printed = paper_tables()[item.name]
    rows = {}
    for name in context.data_sets(printed.parts[item.part]):
        if context.only.data and name not in context.only.data:
            continue
        row = printed.parts[item.part].get(name) or ((None, None),) * len(printed.columns)
        ours: tuple[float | str | None, ...] = (None,) * len(row)
        missing = ""
        try:
            ours = _counted(name, context)
        except ValueError as error:
            missing = str(error)
        rows[name] = tuple(
            Cell(o, None, float(p) if isinstance(p, int | float) else p, missing=missing)
            for o, (p, _) in zip(ours, row, strict=True)
        )
    return ResultTable(item.name, item.shows, (Block("", printed.columns, rows, 0),))


def _counted(name: str, context: Context) -> tuple[float | str, ...]:
    """Images, classes, domains and size. Those with domains are listed and not decoded: there may be half a million."""
    if not is_domains(name):
        found = load_data(RunConfig(data=name, data_dir=context.data_dir))
        size = " x ".join(map(str, found.shape))
        return float(len(found.train) + len(found.test)), float(len(found.classes)), 0.0, size
    domains = context.results.scale.domains
    used = parse_domains(f"{name}:{domains.options}" if domains is not None and name == domains.stand_in else name)
    listed = find(replace(used, limit=None), Path(context.data_dir) if context.data_dir else None)
    size = f"3 x {used.size} x {used.size}"
    return float(len(listed.files)), float(len(listed.classes)), float(len(listed.domains)), size


MAKERS: dict[str, Callable[[Item, Context], ResultTable]] = {
    "accuracy": accuracy,
    "gain": gain,
    "target": target,
    "clock": clock,
    "cost": cost,
    "methods": methods,
    "data": data_sets,
    "surface": figures.surface,
    "drift": figures.drift,
    "ablation": figures.ablation,
    "heat": figures.heat,
    "theory": figures.theory,
}
