"""The leaderboard from its lines: a table, verdicts, and a picture of accuracy against cost."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from fedlesam import algorithms
from fedlesam.report.pictures import save
from fedlesam.runs import costs
from fedlesam.runs.costs import Cost
from fedlesam.runs.stats import paired, seed_mean
from reproduction.leaderboard import CLAIMS, DYNAMIC_LR, LR, NAME, SHOWS, Board, trials
from reproduction.result_table import Block, Cell, ResultTable
from reproduction.significance import holm, t_test

ALPHA = 0.05
RULES = (
    "every method has six trials of rho and its main parameter, one tuning seed, 5,000 held-out images",
    f"learning rate {LR:g}, in FedDyn's family {DYNAMIC_LR:g}, as claim-features chose for the bases",
    "accuracy is the mean of the last five evaluations on the test images; ± is the deviation over seeds",
    "over fedavg: paired by seed, 95 % t-intervals, without a correction for so many methods",
    "sharpness: the largest rise of the training loss within radius .1 found by ten steps of ascent, last model",
    "passes, down, up: backward passes per step, vectors of the model's size per client and round; client and server: "
    "vectors kept; all counted, not timed",
    "front: no other method is as accurate for fewer passes (p), or for fewer vectors sent and received (v)",
    "claims: p of the paired t-test, Holm's correction over all; supported: below .05 and above 0; contradicted: below "
    ".05 and below 0; undecided: anything else",
    "dp-fedsam adds noise for privacy, the others have none: its row is what that costs here",
)


@cache
def cost(method: str) -> Cost:
    """What a method computes, sends and keeps, counted on a small model."""
    return costs.measure(algorithms.example(method))


def make(board: Board, folder: Path | None = None) -> ResultTable:
    """The tables; the picture goes into `folder`.

    Args:
        board: With its lines.
        folder: Where the picture goes; None makes none.
    """
    means = {name: fmean(tests.values()) for name in board.methods if (tests := board.tests(name))}
    order = sorted(means, key=lambda name: -means[name])
    blocks = [_ranking(board, order, means), _claims(board), _trials(board)]
    drawn = (picture(means, folder / f"{NAME}.png"),) if folder is not None and means else ()
    done = sum(not entry.tuning for entry in board.found)
    notes = (*(f"rule: {text}" for text in RULES), f"lines: {len(board.found) - done} trials, {done} results")
    return ResultTable(NAME, SHOWS, tuple(block for block in blocks if block.rows), notes, drawn)


def front(means: Mapping[str, float], costs_of: Mapping[str, float]) -> set[str]:
    """The methods than which no other is as good for less, or better for as much.

    Args:
        means: Accuracy by method.
        costs_of: Cost by method.
    """
    return {
        name
        for name in means
        if not any(
            (means[other] >= means[name] and costs_of[other] < costs_of[name])
            or (means[other] > means[name] and costs_of[other] <= costs_of[name])
            for other in means
        )
    }


def _sent(method: str) -> float:
    return cost(method).down + cost(method).up


def _ranking(board: Board, order: list[str], means: Mapping[str, float]) -> Block:
    cheap, small = ({name: of(name) for name in order} for of in (lambda name: cost(name).passes, _sent))
    passes, vectors = front(means, cheap), front(means, small)
    base, rows = board.tests("fedavg"), {}
    for name in order:
        tests, best, counted = board.tests(name), board.best(name), cost(name)
        assert best is not None
        value, over = seed_mean(list(tests.values())), paired(tests, base)
        assert value is not None
        low, high = over.interval() if len(over.values) > 1 else (0.0, 0.0)
        gain = f"{over.mean:+.2f} [{low:+.2f}, {high:+.2f}]" if len(over.values) > 1 and name != "fedavg" else "-"
        sharp = [line["sharpness"] for entry in board.results(name) if (line := board.found.get(entry)) is not None]
        numbers = (counted.passes, counted.down, counted.up, counted.stored, counted.server)
        rows[name] = (
            Cell(", ".join(f"{key} {number:g}" for key, number in best.settings)),
            Cell(f"{len(tests)}"),
            Cell(value.mean, value.spread),
            Cell(gain),
            Cell(f"{fmean(sharp):.4f}"),
            *(Cell(f"{number:g}") for number in numbers),
            Cell("p" * (name in passes) + "v" * (name in vectors) or "-"),
        )
    columns = ("settings", "seeds", "test", "over fedavg", "sharpness", "passes", "down", "up", "client", "server")
    return Block("by accuracy", (*columns, "front"), rows)


def _claims(board: Board) -> Block:
    both = {(left, right): paired(board.tests(left), board.tests(right)) for left, right in CLAIMS}
    whole = {claim: over for claim, over in both.items() if len(over.values) == board.seeds > 1}
    ps = [t_test(over) for over in whole.values()]
    rows = {}
    for ((left, right), over), p, corrected in zip(whole.items(), ps, holm(ps), strict=True):
        low, high = over.interval()
        said = "undecided" if not corrected < ALPHA else "supported" if over.mean > 0 else "contradicted"
        cells = (f"{low:+.2f} to {high:+.2f}", f"{p:.4f}", f"{corrected:.4f}", said)
        rows[f"{left} over {right}"] = (Cell(over.mean), *map(Cell, cells))
    return Block("methods over what they extend", ("points", "95 %", "p", "Holm's p", "verdict"), rows)


def _trials(board: Board) -> Block:
    """The accuracy of all six trials on the held-out images, in the grid's order."""
    rows = {}
    for name in board.methods:
        values = [(entry, board.accuracy(entry)) for entry in trials(name)]
        if any(value is not None for _, value in values):
            texts = [
                f"{' / '.join(f'{number:g}' for _, number in e.settings)}: {'-' if v is None else f'{v:.2f}'}"
                for e, v in values
            ]
            rows[name] = (Cell(" / ".join(key for key, _ in values[0][0].settings)), Cell("; ".join(texts)))
    return Block("six trials, held-out images, one seed", ("parameters", "value: accuracy"), rows, folded=True)


SHOWN = 2.5
"""Points below the best method that the picture shows."""


def picture(means: Mapping[str, float], path: Path) -> Path:
    """Accuracy against backward passes and against vectors sent, with the fronts; names apart from each other.

    Args:
        means: Accuracy by method.
        path: Where it goes.
    """
    figure = Figure(figsize=(12, 7), layout="constrained")
    kinds = {"backward passes per step": lambda name: cost(name).passes, "vectors sent and received": _sent}
    lowest = max(means.values()) - SHOWN
    left_out = ", ".join(f"{name} ({mean:.1f})" for name, mean in means.items() if mean < lowest)
    for axes, (label, of) in zip(figure.subplots(1, 2, sharey=True), kinds.items(), strict=True):
        some = {name: of(name) for name in means}
        best = sorted(front(means, some), key=lambda name: some[name])
        axes.step([some[n] for n in best], [means[n] for n in best], where="post", color="0.6", linewidth=1)
        for place in sorted(set(some.values())):
            free = means[best[-1]] + SHOWN
            for name in sorted((n for n in means if some[n] == place and means[n] >= lowest), key=lambda n: -means[n]):
                free = min(means[name], free - SHOWN / 34)
                axes.plot(place, means[name], "o", color="#1f77b4" if name in best else "0.7", markersize=4)
                axes.annotate(
                    name,
                    (place, means[name]),
                    xytext=(place + 0.07, free),
                    fontsize=8,
                    va="center",
                    fontweight="bold" if name in best else "normal",
                    arrowprops={"arrowstyle": "-", "color": "0.8", "linewidth": 0.5},
                )
        ticks = sorted(set(some.values()))
        axes.set(xlabel=label, ylabel="test accuracy (%)", xticks=ticks, xlim=(ticks[0] - 0.1, ticks[-1] + 0.6))
        axes.set_ylim(lowest - 0.2, max(means.values()) + 0.1)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    if left_out:
        figure.supxlabel(f"bold: on the front. Below the picture: {left_out}", fontsize=9)
    return save(figure, path)
