"""The tables of a report."""

from fedlesam.report import ledger
from fedlesam.report.clients import other_metrics, over_clients
from fedlesam.report.groups import Comparison, shown
from fedlesam.report.ledger import times
from fedlesam.report.ranking import MEASURES, Row, rank
from fedlesam.report.tables import Cell, Column, Show, Table, by_fedavg, digits, signed, three_digits, two, whole
from fedlesam.runs.evaluated import Measure


def tables_of(comparison: Comparison, targets: list[float]) -> list[Table]:
    """All tables of a report that have rows.

    Args:
        comparison: The groups of runs that are compared.
        targets: Of the measure; accuracies as shares.
    """
    found = [make(comparison) for make in (results, gains, over_clients, other_metrics, costs)]
    found += [to_targets(comparison, targets), differences(comparison)]
    return [table for table in found if table.rows]


def _ranked(comparison: Comparison) -> list[Row]:
    return rank((group.label, group.runs) for group in comparison.groups)


def results(comparison: Comparison) -> Table:
    """Scores, best first.

    Args:
        comparison: The groups of runs that are compared.
    """
    several = any(len(group.runs) > 1 for group in comparison.groups)
    order, measure = ("mean_of_last", "last", "best"), comparison.measure
    scale, show, sign = measure.scale, two if measure.percent else digits, " %" if measure.percent else ""
    rows: list[list[Cell]] = []
    ranked = _ranked(comparison)
    probed = any(row.sharpness is not None for row in ranked)
    for row in ranked:
        cells: list[Cell] = [row.algorithm]
        for name in order:
            found = (getattr(row, name), *([row.spreads.get(name)] if several else []))
            cells += [None if value is None else scale * value for value in found]
        if probed:
            rise = row.sharpness
            both = (None, None) if rise is None else (rise.mean, rise.spread)
            cells += both if several else both[:1]
        rows.append([*cells, row.seeds, row.rounds, row.hyper or "-"])
    on = comparison.evaluated_on
    columns = [Column("method")]
    for name in order:
        title = f"{on}, {MEASURES[name]}"
        columns += [Column(f"{title}{sign}", show), *([Column(f"± {title}", show)] if several else [])]
    if probed:
        columns += [Column("sharpness", digits), *([Column("± sharpness", digits)] if several else [])]
    columns += [Column("seeds", whole), Column("rounds", whole), Column("hyper-parameters")]
    caption = "The first number is the mean of the last 10 evaluations, or of all if there are fewer."
    if measure.smaller:
        caption += " Smaller is better."
    if probed:
        caption += " Sharpness: how much the training loss rises within the probe's radius, at its last reading."
    if several:
        caption += " Means over seeds; ± is their standard deviation."
    return Table("results", f"{on.capitalize()} {measure.title}, best first", columns, rows, caption)


def gains(comparison: Comparison) -> Table:
    """Differences from the first method, paired by seed.

    Args:
        comparison: The groups of runs that are compared.
    """
    first, measure = comparison.groups[0].label, comparison.measure
    show = signed if measure.percent else digits
    rows: list[list[Cell]] = []
    for row in _ranked(comparison):
        if row.gains:
            cells: list[Cell] = [row.algorithm]
            for name in MEASURES:
                gain = row.gains.get(name)
                cells += (
                    [None] * 3 if gain is None else [measure.scale * end for end in (gain.mean, gain.low, gain.high)]
                )
            rows.append([*cells, max(gain.seeds for gain in row.gains.values())])
    columns = [Column("method")]
    for title in MEASURES.values():
        columns += [Column(title, show), Column(f"{title}, from", show), Column(f"{title}, to", show)]
    points = (
        f"{'Points' if measure.percent else 'Difference'} of {comparison.evaluated_on} {measure.title} over {first}"
    )
    caption = f"{points}: mean difference on the seeds both have, and its 95 % t-interval."
    caption += " Below 0 is better." if measure.smaller else ""
    return Table("gains", f"Over {first}, paired by seed", [*columns, Column("seeds", whole)], rows, caption)


def costs(comparison: Comparison) -> Table:
    """What one round cost, by the counters of the runs.

    Args:
        comparison: The groups of runs that are compared.
    """
    names = ("backward_passes", "megabytes_down", "megabytes_up", "client_megabytes", "seconds")
    titles = ("backward passes", "MB down", "MB up", "MB a client holds", "seconds")
    base = ledger.ledger(comparison.baseline) if comparison.baseline is not None else None
    rows: list[list[Cell]] = []
    for group in comparison.groups:
        found = ledger.ledger(group)
        if found is None:
            continue
        row: list[Cell] = [group.label]
        for name in names:
            value, alike = getattr(found, name), not group.centralised or name == "client_megabytes"
            row += [value] if base is None else [value, times(value, getattr(base, name)) if alike else None]
        rows.append(row)
    columns = [Column("method")]
    for title in titles:
        columns += _columns(title, three_digits, base is not None)
    caption = (
        "Counted by the runs, mean of a round, all active clients together. A client holds its model and what the "
        "method keeps with it between rounds. Seconds are of training and aggregation, without evaluation and probes. "
    )
    return Table("costs", "Cost of a round", columns, rows, caption + _unit(comparison))


def to_targets(comparison: Comparison, targets: list[float]) -> Table:
    """Rounds, bytes and seconds up to a target, as in the paper's table 5.

    Args:
        comparison: The groups of runs that are compared.
        targets: Of the measure; accuracies as shares.
    """
    measure = comparison.measure
    rows: list[list[Cell]] = []
    base = comparison.baseline
    for target in map(measure.target, targets):
        unit = ledger.group_to_target(base, target).spent if base is not None else None
        for group in comparison.groups:
            found = ledger.group_to_target(group, target)
            row: list[Cell] = [f"{measure.scale * target:g}{measure.unit}", group.label, _reached(found, measure)]
            for name in ("rounds", "megabytes", "seconds"):
                value = getattr(found.spent, name, None)
                alike = name == "seconds" or not group.centralised  # a round of it is another thing
                row += [value] if base is None else [value, times(value, getattr(unit, name, None)) if alike else None]
            rows.append(row)
    columns = [Column("target"), Column("method"), Column("reached")]
    for title, show in (("rounds", whole), ("MB sent", three_digits), ("seconds", three_digits)):
        columns += _columns(title, show, base is not None)
    place = "below" if measure.smaller else "above"
    caption = f"Until the first evaluation at or {place} the target. Mean over seeds, if every seed reached it. "
    title = f"Cost to a target {comparison.evaluated_on} {measure.title}"
    return Table("to-target", title, columns, rows, caption + _unit(comparison))


def _reached(found: ledger.ToTarget, measure: Measure) -> str:
    if found.reached == found.seeds:
        return "yes" if found.seeds == 1 else f"by all {found.seeds} seeds"
    best = "never evaluated" if found.best is None else f"best {measure.show(found.best)}{measure.unit}"
    return f"never ({best})" if not found.reached else f"by {found.reached} of {found.seeds} seeds"


def _columns(title: str, show: Show, multiples: bool) -> list[Column]:
    return [Column(title, show), *([Column(f"{title} ×", by_fedavg)] if multiples else [])]


def _unit(comparison: Comparison) -> str:
    if comparison.baseline is None:
        return "FedAvg is not among the runs, so costs are not given as multiples of it."
    return f"×: times {comparison.baseline.label}, less is better."


def differences(comparison: Comparison) -> Table:
    """The settings in which the groups differ.

    Args:
        comparison: The groups of runs that are compared.
    """
    names = [name for name in comparison.varied if name != "algorithm"]
    rows: list[list[Cell]] = []
    for group in comparison.groups:
        own = [shown(group.settings[name], name) if name in group.settings else None for name in names]
        rows.append([group.label, ", ".join(map(str, sorted(group.seeds))), *own])
    columns = [Column("method"), Column("seeds"), *(Column(name) for name in names)]
    return Table("differences", "What differs", columns, rows)
