"""The experiment on frozen features, judged from its lines."""

from collections.abc import Callable, Sequence

from fedlesam.runs.stats import PairedDifferences, paired, seed_mean
from reproduction.heads import (
    CLAIMS,
    HEADS,
    NAME,
    SHARE,
    SHOWS,
    TESTABLE,
    Bench,
    Lines,
    known,
)
from reproduction.result_table import Block, Cell, ResultTable
from reproduction.significance import holm, p_value, t_test

ALPHA = 0.05
PERMUTED = 8
"""Seeds from which on p is the permutation test's."""
NO_CONTROL = "undecided: SAM does not help here either"
Judged = dict[tuple[str, str], tuple[PairedDifferences, float]]
"""Differences and Holm's p by claim."""
CONTROLS = (
    ("fedsam", "fedavg"),
    ("fedgamma", "scaffold"),
    ("fedsmoo", "feddyn"),
    ("freesam", "fedavg"),
    ("freesam-s", "scaffold"),
    ("freesam-d", "feddyn"),
    ("freesam", "fedsam"),
    ("freesam-s", "fedgamma"),
    ("freesam-d", "fedsmoo"),
    ("fedlesam-d", "fedsmoo"),
    ("scaffold-damped", "scaffold"),
    ("fedlesam-released-s", "scaffold"),
    ("fedlesam-released-s", "scaffold-damped"),
    ("fedlesam-ahead-s", "scaffold"),
    ("fedlesam-s", "shuffled-s"),
    ("shuffled-s", "scaffold"),
)
"""The second family: our questions."""


def rules(bench: Bench) -> list[str]:
    return [
        f"accuracy is the mean of the last {bench.last} evaluations, one every {bench.every} of {bench.rounds} rounds",
        f"every base's learning rate, which is its arms', is chosen from {_listed(bench.lrs)}; every arm's rho is "
        f"chosen from {_listed(bench.rhos)}, on {bench.held_out:,} held-out training images and {bench.tuning_seeds} "
        "tuning seeds",
        f"gate: FedGAMMA over SCAFFOLD by {bench.gate:g} point or more on the held-out images, before any other arm",
        f"{bench.seeds} seeds of the results, each with {bench.images:,} training images, a split and a first model of "
        "its own; differences are paired by seed; an arm whose seeds are not all there is in no verdict",
        f"95 % intervals are t-intervals; p is the {_test(bench)}, Holm's correction is over the family",
        "for: the interval's lower end is above 0 and Holm's p below .05",
        f"against: the interval's upper end is below {SHARE:g} of the gain that the paper prints for {bench.cell}",
        f"not testable: the paper prints less than {TESTABLE:g} points; undecided: anything else",
        *(() if bench.stops else ("a gate that fails does not end the work here, but then no claim is against",)),
    ]


def _test(bench: Bench) -> str:
    return "sign-flip permutation test's" if bench.seeds >= PERMUTED else "paired t-test's"


def make(bench: Bench, lines: Lines, name: str = NAME, shows: str = SHOWS) -> ResultTable:
    claims, ours = ([both for both in some if bench.has(*both)] for some in (CLAIMS, CONTROLS))
    title, helps = f"{bench.name}: the paper's claims, primary family", (lines.gate() or 0.0) >= (bench.gate or 0.0)
    blocks = [
        _gate(bench, lines),
        family(title, claims, judge(bench, lines, claims), bench.printed, helps),
        family(f"{bench.name}: our questions, second family", ours, judge(bench, lines, ours)),
    ]
    blocks += [_arms(bench, lines), _at_papers(bench, lines), _lrs(bench, lines), _rhos(bench, lines)]
    notes = [f"rule: {text}" for text in rules(bench)]
    done = sum(not trial.tuning for trial in lines.found)
    notes.append(f"lines: {len(lines.found) - done} runs of tuning, {done} of the results")
    return ResultTable(f"{name}, {bench.name}", shows, tuple(b for b in blocks if b.rows), tuple(notes))


def p_of(favour: PairedDifferences) -> float:
    """Of the permutation test, or of the t-test where its seeds are too few to decide a family of four."""
    return p_value(favour) if len(favour.values) >= PERMUTED else t_test(favour)


def verdict(favour: PairedDifferences, corrected: float, printed: float, helps: bool = True) -> str:
    """Of a claim, by the rule that was fixed beforehand.

    Args:
        favour: The differences.
        corrected: Holm's p.
        printed: The gain that the paper prints.
        helps: Whether SAM helps there: without a positive control nothing speaks against a claim.
    """
    low, high = favour.interval()
    if printed < TESTABLE:
        return "not testable here"
    above, below = low > 0 and corrected < ALPHA, high < SHARE * printed
    if above and below:
        return "above 0, but below a quarter of the printed gain"
    if below and not above and not helps:
        return NO_CONTROL
    return "for" if above else "against" if below else "undecided"


def judge(bench: Bench, lines: Lines, claims: Sequence[tuple[str, str]]) -> Judged:
    """Differences and Holm's p of the claims whose arms have all their seeds."""
    family = {}
    for left, right in claims:
        both = [lines.tests(arm) for arm in known((left, right))]
        if len(both) == 2 and all(len(values) == bench.seeds for values in both) and bench.seeds > 1:
            family[left, right] = paired(*both)
    waiting = [1.0] * (len(claims) - len(family))  # the family keeps its size while runs are missing
    ps = holm([*(p_of(favour) for favour in family.values()), *waiting])[: len(family)]
    return {claim: (favour, p) for (claim, favour), p in zip(family.items(), ps, strict=True)}


def _gate(bench: Bench, lines: Lines) -> Block:
    gate = lines.gate()
    if gate is None or bench.gate is None:
        return Block("", (), {})
    cells = (
        Cell(gate),
        Cell(bench.gate),
        Cell("passed" if gate >= bench.gate else _failed(bench)),
    )
    title = f"{bench.name}: the gate, held-out images, {bench.tuning_seeds} tuning seeds"
    return Block(title, ("points", "asked", ""), {"fedgamma over scaffold": cells})


def _failed(bench: Bench) -> str:
    return "failed: nothing is decided on this split" if bench.stops else "failed: no claim is against here"


def family(
    title: str,
    claims: Sequence[tuple[str, str]],
    judged: Judged,
    printed: Callable[[str, str], float] | None = None,
    helps: bool = True,
) -> Block:
    """A row a claim, with verdicts where the gains that the paper prints are given."""
    rows: dict[str, tuple[Cell, ...]] = {}
    for (left, right), (favour, p) in judged.items():
        low, high = favour.interval()
        cells = [
            Cell(favour.mean),
            Cell(f"{low:+.2f} to {high:+.2f}"),
            Cell(f"{p_of(favour):.4f}"),
            Cell(f"{p:.4f}"),
        ]
        if printed is not None:
            gain = printed(left, right)
            cells += [Cell(gain), Cell(verdict(favour, p, gain, helps))]
        rows[f"{left} over {right}"] = tuple(cells)
    columns = ("points", "95 %", "p", "Holm's p", *(("the paper prints", "verdict") if printed else ()))
    left_out = len(claims) - len(judged)
    more = f"; {left_out} of {len(claims)} wait for runs" if left_out else ""
    return Block(f"{title}{more}", columns, rows)


def _arms(bench: Bench, lines: Lines) -> Block:
    rows = {}
    for arm in (*bench.bases, *bench.tuned):
        tests = lines.tests(arm)
        value = seed_mean(list(tests.values()))
        if value is not None:
            rho = lines.rho(arm)
            texts = (f"{lines.lr(arm):g}", "-" if rho is None else f"{rho:g}", str(len(tests)))
            rows[arm] = (*map(Cell, texts), Cell(value.mean, value.spread))
    return Block(f"{bench.name}: test accuracy at the chosen settings", ("lr", "rho", "seeds", "test"), rows)


def _at_papers(bench: Bench, lines: Lines) -> Block:
    """Over the base, at the rho that the paper prints."""
    rows = {}
    for arm in bench.at_papers:
        rho = bench.papers_rho(arm, lines.lr(arm) or 0.0)
        over = paired(lines.tests(arm, rho), lines.tests(HEADS[arm].base))
        if len(over.values) == bench.seeds > 1:
            low, high = over.interval()
            rows[arm] = (Cell(f"{rho:g}"), Cell(over.mean), Cell(f"{low:+.2f} to {high:+.2f}"))
    return Block(f"{bench.name}: over the base at the paper's rho", ("rho", "points", "95 %"), rows)


def _lrs(bench: Bench, lines: Lines) -> Block:
    rows = {arm: tuple(_cell(lines.held_out(arm, None, lr)) for lr in bench.lrs) for arm in bench.bases}
    some = {arm: cells for arm, cells in rows.items() if any(cell.ours is not None for cell in cells)}
    return Block(
        f"{bench.name}: held-out accuracy over the learning rate", tuple(f"lr {lr:g}" for lr in bench.lrs), some
    )


def _rhos(bench: Bench, lines: Lines) -> Block:
    rows = {}
    for arm in bench.tuned:
        lr = lines.lr(arm)
        cells = tuple(_cell(None if lr is None else lines.held_out(arm, rho, lr)) for rho in bench.rhos)
        if any(cell.ours is not None for cell in cells):
            rows[arm] = cells
    return Block(f"{bench.name}: held-out accuracy over rho", tuple(f"rho {rho:g}" for rho in bench.rhos), rows)


def _cell(value: float | None) -> Cell:
    return Cell(missing="not run yet") if value is None else Cell(value)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
