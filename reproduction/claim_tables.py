"""The claims of the paper and our own questions, judged; and the tables they follow from."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean

from fedlesam import algorithms
from fedlesam.runs import costs
from fedlesam.runs.stats import PairedDifferences, paired
from reproduction import plots
from reproduction.findings import MEASURES, Findings
from reproduction.result_table import Block, Cell, ResultTable
from reproduction.significance import detectable, holm, p_value
from reproduction.studies import ARMS, Study

RULES = (
    "accuracy is the mean of the evaluations in the last 20 rounds, in percent of the test images",
    "rho is the best of the grid by the mean over the tuning seeds on the held-out images; of equal ones the smaller",
    "differences are paired by seed: the same split, first model, active clients and batches",
    "95 % intervals are t-intervals of the mean difference over seeds",
    "p is that of the two-sided sign-flip permutation test, exact up to 16 seeds; Holm's correction is over the table",
    "confirmed: corrected p below .05 and the mean in favour of the claim; refuted: below .05 and the mean against it; "
    "not confirmed: anything else",
    "could be seen: the smallest true difference that a paired t-test on so many seeds finds with a probability of .8, "
    "without Holm's correction; it says nothing where the chosen rho is so small that an arm is nearly its base",
)


@dataclass(frozen=True)
class Claim:
    """That `left` has more of the measure than `right`, or less."""

    left: str
    right: str
    measure: str = "accuracy"

    @property
    def text(self) -> str:
        words = {
            "accuracy": "more accurate than",
            "sharpness": "global sharpness below",
            "relative_sharpness": "scale-invariant sharpness below",
            "drift": "perturbation drift below",
        }
        ours = " (ours, not the paper's)" if self == NOT_CLAIMED else ""
        return f"{self.left}: {words[self.measure]} {self.right}{ours}"

    def favour(self, found: Findings) -> PairedDifferences:
        left, right = found.of(self.left, self.measure), found.of(self.right, self.measure)
        return paired(left, right) if self.measure == "accuracy" else paired(right, left)


TWO_PASSES = (("fedlesam", "fedsam"), ("fedlesam-s", "fedgamma"), ("fedlesam-d", "fedsmoo"))
FREE = (("freesam", "fedsam"), ("freesam-s", "fedgamma"), ("freesam-d", "fedsmoo"))
BASES = (("fedlesam", "fedavg"), ("fedlesam-s", "scaffold"), ("fedlesam-d", "feddyn"))

MORE_ACCURATE = tuple(Claim(left, right) for left, right in (*BASES, *TWO_PASSES))
NOT_CLAIMED = Claim("fedlesam-d", "fedsmoo")
"""The paper's table 2 has D below in 12 of 16 cells. It stays in the family it was tested in: no verdict changes."""

PAPER = (
    *MORE_ACCURATE,
    *(Claim(*both, measure) for measure in ("sharpness", "relative_sharpness") for both in (*BASES, *TWO_PASSES)),
    *(Claim(*both, "drift") for both in TWO_PASSES),
)
"""What the paper claims of accuracy, sharpness and drift."""

OURS = (
    *(Claim(left, ARMS[left].base) for left in ("fedsam", "fedgamma", "fedsmoo")),
    Claim("fedlesam", "random-round"),
    Claim("fedlesam-ahead", "fedlesam"),
    Claim("fedlesam-previous", "fedlesam"),
    *(Claim(left, ARMS[left].base) for left in ("random-round", "random-step")),
    *(Claim(left, ARMS[left].base) for left in ("fedlesam-released", "fedlesam-released-s", "fedlesam-released-d")),
    *(Claim(left, ARMS[left].base) for left in ("freesam", "freesam-s", "freesam-d")),
    *(Claim(*both) for both in FREE),
    *(Claim(*both) for both in (("freesam", "fedlesam"), ("freesam-s", "fedlesam-s"), ("freesam-d", "fedlesam-d"))),
)
"""What else has to be known: does SAM help at all, does the estimate matter, is there a better free one."""

ALPHA = 0.05
JUDGED = ("in favour by", "95 % from", "to", "p", "Holm's p", "could be seen", "seeds", "verdict")


def make(study: Study, everything: Sequence[Findings], folder: Path, notes: tuple[str, ...]) -> ResultTable:
    blocks: list[Block] = []
    drawn: list[Path] = []
    for found in everything:
        if study.verdicts:
            blocks.append(judged(f"{found.condition.name}: the claims of the paper", PAPER, found, with_cost=True))
            alone = "accuracy alone, a family formed after the results were seen"
            blocks.append(judged(f"{found.condition.name}: {alone}", MORE_ACCURATE, found))
            blocks.append(judged(f"{found.condition.name}: our questions", OURS, found))
        if not found.condition.tuning_seeds:
            blocks += [same_rho(found, rho) for rho in found.condition.rhos]
            continue
        blocks.append(at_chosen(found))
        if found.condition.probed:
            blocks.append(geometry(found))
        if found.condition.curve:
            blocks += [over_rho(found, tuning=True), over_rho(found, tuning=False)]
            curves = {arm: _curve(found, arm) for arm in found.condition.arms}
            bases = dict.fromkeys(ARMS[arm].base for arm in found.condition.tuned)
            panels = {base: {arm: curves[arm] for arm in curves if base in (arm, ARMS[arm].base)} for base in bases}
            if any(curves.values()):
                drawn.append(plots.over_rho(panels, folder / f"{study.name}.png"))
    if len(everything) > 1:
        blocks[:0] = everywhere(everything)
    return ResultTable(study.name, study.shows, tuple(blocks), notes, tuple(drawn))


def judged(title: str, claims: Sequence[Claim], found: Findings, with_cost: bool = False) -> Block:
    """Claims about arms that were left out, or have fewer than two seeds in common, are not part of the family."""
    favours = {claim: claim.favour(found) for claim in claims}
    family = {claim: favour for claim, favour in favours.items() if len(favour.values) > 1}
    ps = {claim: p_value(favour) for claim, favour in family.items()}
    rows: dict[str, tuple[Cell, ...]] = {}
    for (claim, favour), corrected in zip(family.items(), holm(list(ps.values())), strict=True):
        low, high = favour.interval()
        figures = (favour.mean, low, high, ps[claim], corrected, detectable(favour))
        ending = (Cell(str(len(favour.values))), Cell(verdict(favour.mean, corrected)))
        rows[claim.text] = (*map(Cell, figures), *ending)
    if with_cost:
        for left, right in (*BASES, *TWO_PASSES):
            if {left, right} <= set(found.condition.arms):
                rows[_cost_text(left, right)] = _cost(left, right)
    return Block(title, JUDGED, rows, None)


def verdict(mean: float, corrected: float) -> str:
    """Of a claim that the mean difference is above 0."""
    if corrected >= ALPHA:
        return "not confirmed"
    return "confirmed" if mean > 0 else "refuted"


def _passes(arm: str) -> float:
    return costs.measure(algorithms.get(ARMS[arm].method, **ARMS[arm].hyper)).passes


def _cost_text(left: str, right: str) -> str:
    return f"{left}: backward passes {'as' if (left, right) in BASES else 'fewer than'} {right}'s"


def _cost(left: str, right: str) -> tuple[Cell, ...]:
    """Counted, so nothing is to be tested."""
    fewer = _passes(right) - _passes(left)
    holds = fewer == 0 if (left, right) in BASES else fewer > 0
    counted = [Cell("counted")] * 6
    return (Cell(fewer), *counted, Cell("confirmed" if holds else "refuted"))


def at_chosen(found: Findings) -> Block:
    columns = ("rho", "held out", "test", "over its base by", "95 % from", "to", "could be seen")
    rows = {}
    for arm in found.condition.arms:
        rho, base = found.chosen.get(arm), ARMS[arm].base
        test = found.test(arm, rho)
        if test is None:
            rows[arm] = tuple(Cell(missing="no run is finished") for _ in columns)
            continue
        held = found.validation(arm, rho) if rho is not None else None
        over = paired(found.of(arm), found.of(base))
        gain = (over.mean, *over.interval(), detectable(over)) if len(over.values) > 1 else ("-",) * 4
        rows[arm] = (
            Cell("-" if rho is None else f"{rho:g}"),
            Cell(held.mean, held.spread) if held else Cell("-"),
            Cell(test.mean, test.spread),
            *map(Cell, gain),
        )
    title = f"{found.condition.name}: accuracy at the rho chosen on held-out images, {found.condition.seeds} seeds"
    return Block(title, columns, rows)


def geometry(found: Findings) -> Block:
    rows = {}
    for arm in found.condition.arms:
        values = [found.mean(arm, name) for name in (*MEASURES, "seconds")]
        missing = Cell(missing="not measured") if ARMS[arm].base else Cell("-")
        rows[arm] = (*(missing if value is None else Cell(value) for value in values), Cell(_passes(arm)))
    columns = (
        *("sharpness", "scale-invariant", "norm of w", "drift", "cosine", "cosine of the last step taken back"),
        *("seconds per round", "passes per step"),
    )
    return Block(f"{found.condition.name}: measured at the chosen rho", columns, rows, None)


def same_rho(found: Findings, rho: float) -> Block:
    """Sharpness and accuracy where all arms have one rho; differences are those of the logarithm, as a factor."""
    columns = ("accuracy", "sharpness", "times its base's", "95 %", "times SAM's", "95 %", "scale-invariant")
    rows = {}
    for arm in found.condition.arms:
        base = ARMS[arm].base
        rival = dict((*TWO_PASSES, *FREE)).get(arm, "")
        mine = found.at(arm, rho if base else None)
        if not mine:
            rows[arm] = tuple(Cell(missing="no run is finished") for _ in columns)
            continue
        factors = [
            _factor(found, arm, other, rho) if other in found.condition.arms else ("-", "-") for other in (base, rival)
        ]
        numbers = [fmean(of.values[name] for of in mine.values()) for name in ("accuracy", *list(MEASURES)[:2])]
        rows[arm] = (Cell(numbers[0]), Cell(f"{numbers[1]:.4f}"), *(Cell(t) for pair in factors for t in pair))
        rows[arm] += (Cell(f"{numbers[2]:.4f}"),)
    return Block(f"{found.condition.name}, {rho:g}; {found.condition.seeds} seeds", columns, rows, None)


def _factor(found: Findings, left: str, right: str, rho: float) -> tuple[str, str]:
    """The ratio of sharpness, paired by seed: the geometric mean and its 95 % t-interval."""
    both = [found.at(arm, rho if ARMS[arm].base else None) for arm in (left, right)]
    over = paired(*({seed: log(of.values["sharpness"]) for seed, of in some.items()} for some in both))
    if len(over.values) < 2:
        return "-", "-"
    low, high = over.interval()
    return f"{exp(over.mean):.2f}", f"{exp(low):.2f} to {exp(high):.2f}"


def over_rho(found: Findings, tuning: bool) -> Block:
    columns = tuple(f"rho {rho:g}" for rho in found.condition.rhos)
    rows = {}
    for arm in found.condition.arms if not tuning else found.condition.tuned:
        if not ARMS[arm].base:
            base = found.test(arm, None)
            cell = Cell(base.mean, base.spread) if base else Cell(missing="no run is finished")
            rows[arm] = (cell,) + (Cell("same"),) * (len(columns) - 1)
            continue
        cells = []
        for rho in found.condition.rhos:
            value = found.validation(arm, rho) if tuning else found.test(arm, rho)
            cells.append(Cell(value.mean, value.spread) if value else Cell(missing="not all runs are finished"))
        rows[arm] = tuple(cells)
    what = "held-out images, from which rho is chosen" if tuning else "test images, not used for choosing"
    return Block(f"{found.condition.name}: accuracy over rho on {what}", columns, rows)


def everywhere(everything: Sequence[Findings]) -> list[Block]:
    """Gains in every condition, at the rho chosen there: over the base, and of the free ascent over SAM's."""
    arms = tuple(dict.fromkeys(arm for found in everything for arm in found.condition.tuned))
    over_base = [(arm, ARMS[arm].base) for arm in arms]
    free = [both for both in FREE if set(both) <= set(arms)]
    return [
        _gains("accuracy over the base", over_base, everything),
        *([_gains("accuracy of one pass over that of two", free, everything)] if free else []),
    ]


def _gains(title: str, compared: Sequence[tuple[str, str]], everything: Sequence[Findings]) -> Block:
    rows = {}
    for left, right in compared:
        cells = []
        for found in everything:
            over = paired(found.of(left), found.of(right))
            if len(over.values) < 2:
                asked = {left, right} <= set(found.condition.arms)
                cells.append(Cell(missing="no two runs to compare") if asked else Cell("-"))
                continue
            low, high = over.interval()
            cells.append(Cell(f"{over.mean:+.2f} [{low:+.2f}, {high:+.2f}]"))
        rows[f"{left} - {right}"] = tuple(cells)
    columns = tuple(found.condition.name.partition(", ")[2] for found in everything)
    return Block(f"{title}, points, 95 % interval", columns, rows)


def _curve(found: Findings, arm: str) -> list[tuple[float, float, float]]:
    """(rho, mean, spread); an arm without rho has one point at 0."""
    rhos = found.condition.rhos if ARMS[arm].base else (None,)
    numbers = [(rho or 0.0, found.test(arm, rho)) for rho in rhos]
    return [(rho, value.mean, value.spread or 0.0) for rho, value in numbers if value is not None]
