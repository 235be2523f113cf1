"""Why, on the frozen features: tables from the lines, and which measure goes with the gain."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

from scipy.stats import spearmanr

from reproduction.heads import HEADS
from reproduction.leaderboard import Board, trials
from reproduction.result_table import Block, Cell, ResultTable
from reproduction.why_features import DIVERGED, MEASURES, NAME, OF_ROUND, OF_STEP, SHOWS, Found

AT = 0.3
"""The rho of the table of arms: the largest at which none of them diverges."""
PRIVATE = "dp-fedsam"
"""Its accuracy is that of its noise."""
RULES = (
    "runs: the tuning seeds of claim-features again, CIFAR-10, Pathological 3, 15 images a client, the learning rates "
    "that were chosen there; every arm at every rho of the grid",
    "gain: points over the base on the held-out images, mean of the tuning seeds and of the last five evaluations",
    "steps of five active clients at a quarter, a half and three quarters of the rounds; change: the gradient of the "
    "client's samples at v + e less that at v; change / gradient: of the means of their norms; rise: of the loss from "
    "v to v + e",
    f"rank correlation: Spearman's, over all arms and rho, without those more than {DIVERGED:g} points below their "
    "base; cells of one arm or one seed are not independent, so it is a description, not a test",
    "predictions: d is the change of a step's gradient, or what a perturbation that is fixed for the round changes in "
    "a client's update, from the same model, memory and batches; H is the Hessian of the client's samples; share: "
    "1 - sum |d - p|^2 / sum |d|^2, pooled over clients, instants and seeds; it can be below 0",
    "u(w_before - w): the last global step taken back; FedLESAM's e is the step since the client's own last round",
)


def make(found: Found, board: Board) -> ResultTable:
    """The tables.

    Args:
        found: The runs.
        board: The leaderboard's lines; none makes no rows of it.
    """
    blocks = [_arms(found), _ranks(found), _predicted(found), _board(board)]
    notes = (*(f"rule: {text}" for text in RULES), f"lines: {len(found.lines)}")
    return ResultTable(NAME, SHOWS, tuple(block for block in blocks if block.rows), notes)


def rank(pairs: Sequence[tuple[float | None, float]]) -> float | None:
    """Spearman's correlation of those that have both values; None of fewer than four."""
    both = [(a, b) for a, b in pairs if a is not None]
    if len(both) < 4 or len({a for a, _ in both}) == 1:
        return None
    return float(spearmanr(*zip(*both, strict=True)).statistic)


def share(sums: tuple[float, ...]) -> tuple[float, float]:
    """What a prediction explains, and its cosine, from (d, d), (d, p) and (p, p)."""
    dd, dp, pp = sums
    return (2 * dp - pp) / dd, dp / sqrt(dd * pp) if pp else 0.0


def _arms(found: Found) -> Block:
    at = AT if AT in found.bench.rhos else found.bench.rhos[-1]
    rows = {}
    for arm, rho in found.cells():
        if rho == at:
            values = [found.measure(arm, rho, name) for name in MEASURES]
            cells = [Cell("-") if value is None else Cell(f"{value:.3g}") for value in values]
            rows[arm] = (Cell(found.gain(arm, rho)), *cells)
    return Block(f"every arm at rho {at:g}", ("gain", *MEASURES), rows)


def _ranks(found: Found) -> Block:
    gains = {cell: found.gain(*cell) for cell in found.cells()}
    sound = {cell: gain for cell, gain in gains.items() if gain > -DIVERGED}
    groups = {"all": list(sound)}
    groups |= {base: [c for c in sound if HEADS[c[0]].base == base] for base in ("fedavg", "scaffold", "feddyn")}
    rows = {}
    for name in MEASURES:
        values = [rank([(found.measure(*cell, name), sound[cell]) for cell in cells]) for cells in groups.values()]
        if any(value is not None for value in values):
            rows[name] = tuple(Cell("-") if value is None else Cell(value) for value in values)
    if rows:
        rows["rho"] = tuple(
            Cell("-") if (value := rank([(rho, sound[arm, rho]) for arm, rho in cells])) is None else Cell(value)
            for cells in groups.values()
        )
    columns = tuple(f"{name}, {len(cells)} cells" for name, cells in groups.items())
    out = len(gains) - len(sound)
    return Block(f"rank correlation with the gain; {out} cells that diverged are left out", columns, rows)


def _predicted(found: Found) -> Block:
    """How much of what e changes is curvature times e, and curvature times the last global step."""
    names, rows = (*OF_STEP, *OF_ROUND), {}
    for arm, rho in sorted(found.cells()):
        every = [found.sums(arm, rho, name) for name in names]
        size = found.sums(arm, rho, "size")
        if any(sums and sums[0] for sums in every):
            texts = ["{:.2f} ({:.2f})".format(*share(sums)) if sums and sums[0] else "-" for sums in every]
            changed = Cell(sqrt(size[0] / size[1])) if size and size[1] else Cell("-")
            rows[f"{arm}, rho {rho:g}"] = (*map(Cell, texts), changed)
    columns = (*(f"{name}: share (cosine)" for name in names), "norm(d) / norm(update)")
    return Block("what a perturbation changes, as curvature times a direction", columns, rows)


def _board(board: Board) -> Block:
    """Sharpness of the last model and accuracy, over the methods and over all their trials."""
    rows = {}
    methods = [name for name in board.methods if name != PRIVATE]
    means = [
        (fmean(line["sharpness"] for line in lines), fmean(tests.values()))
        for name in methods
        if (tests := board.tests(name))
        and (lines := [board.found[entry] for entry in board.results(name) if entry in board.found])
    ]
    tried = [
        (float(board.found[entry]["sharpness"]), accuracy)
        for name in methods
        for entry in trials(name)
        if (accuracy := board.accuracy(entry)) is not None
    ]
    for name, pairs in (("methods at their best, test images", means), ("all trials, held-out images", tried)):
        value = rank(pairs)
        if value is not None:
            rows[name] = (Cell(f"{len(pairs)}"), Cell(value))
    return Block(
        "the leaderboard: rank correlation of accuracy with the sharpness of the last model", ("n", "sharpness"), rows
    )
