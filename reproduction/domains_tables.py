"""The claims on left-out domains, judged from the lines: paired by seed, averaged over the targets."""

from collections.abc import Sequence
from statistics import fmean

from fedlesam.runs.stats import paired, seed_mean
from reproduction.domains import NAME, PAPERS, SHOWS, DomainBench
from reproduction.heads import CLAIMS, HEADS, SHARE, TESTABLE, Lines
from reproduction.heads_tables import family, judge
from reproduction.result_table import Block, Cell, ResultTable

CONTROLS = (("fedsam", "fedavg"), ("fedgamma", "scaffold"), ("fedsmoo", "feddyn"), ("fedlesam-d", "fedsmoo"))
"""The second family: our questions."""
SAM = CONTROLS[:2]
"""The positive controls."""


class Averaged(Lines):
    """The lines of all targets as one: a seed's accuracy is the mean over them, where all have it."""

    def __init__(self, every: Sequence[Lines]) -> None:
        super().__init__(every[0].bench)
        self.every = every

    def tests(self, arm: str, rho: float | None = None) -> dict[int, float]:
        return mean_of([lines.tests(arm, rho) for lines in self.every])

    def at_papers(self, arm: str) -> dict[int, float]:
        """At the paper's rho / lr, each target with its learning rate."""
        return mean_of(
            [
                lines.tests(arm, lines.bench.papers_rho(arm, lr) if (lr := lines.lr(arm)) else None)
                for lines in self.every
            ]
        )


def mean_of(tests: Sequence[dict[int, float]]) -> dict[int, float]:
    """By seed, of the seeds that all have."""
    return {seed: fmean(some[seed] for some in tests) for seed in set.intersection(*map(set, tests))}


def rules(bench: DomainBench) -> list[str]:
    lrs, ratios = (", ".join(f"{value:g}" for value in values) for values in (bench.lrs, bench.ratios))
    return [
        f"every domain is the test in turn, with all its images; clients per other domain: {bench.clients}, "
        f"active ones: {bench.active}; components, centre and scale of the features are those of the source domains",
        f"accuracy is the mean of the last {bench.last} evaluations, one every {bench.every} of {bench.rounds} rounds",
        f"for every target anew: a base's learning rate, which is its arms', is chosen from {lrs}; an arm's rho / lr "
        f"from {ratios}, on {bench.share:.0%} of the source domains' images, {bench.tuning_seeds} tuning seeds",
        f"{bench.seeds} seeds of the results, each with held-out images, clients, a first model and batches of its own",
        "differences are paired by seed and averaged over the four targets, then 95 % t-intervals over seeds; p is the "
        "sign-flip permutation test's, Holm's correction is over the family",
        "the paper prints: the mean gain over the ten targets of its table 3, 10 clients per domain; none is of PACS",
        "for: the interval's lower end is above 0 and Holm's p below .05",
        f"against: the interval's upper end is below {SHARE:g} of the printed gain, and SAM helps: the interval of "
        "FedSAM over FedAvg or of FedGAMMA over SCAFFOLD is above 0; without that it is undecided",
        f"not testable: the paper prints less than {TESTABLE:g} points; undecided: anything else",
    ]


def make(benches: Sequence[DomainBench], every: Sequence[Lines]) -> ResultTable:
    first, average = benches[0], Averaged(every)
    helps = any(favour.interval()[0] > 0 for favour, _ in judge(first, average, SAM).values())
    title = "the paper's claims, mean of four targets"
    blocks = [
        family(title, CLAIMS, judge(first, average, CLAIMS), first.printed, helps),
        family("our questions, mean of four targets", CONTROLS, judge(first, average, CONTROLS)),
        _at_papers(first, average),
        _targets(benches, every),
        *(_tuning(bench, lines) for bench, lines in zip(benches, every, strict=True)),
    ]
    done = sum(not trial.tuning for lines in every for trial in lines.found)
    total = sum(len(lines.found) for lines in every)
    notes = [
        *(f"rule: {text}" for text in rules(first)),
        f"lines: {total - done} runs of tuning, {done} of the results",
    ]
    plural = "s" if first.clients > 1 else ""
    title = f"{NAME}, {first.clients} client{plural} per domain"
    return ResultTable(title, SHOWS, tuple(block for block in blocks if block.rows), tuple(notes))


def _at_papers(bench: DomainBench, average: Averaged) -> Block:
    rows = {}
    for arm in bench.at_papers:
        over = paired(average.at_papers(arm), average.tests(HEADS[arm].base))
        if len(over.values) == bench.seeds > 1:
            low, high = over.interval()
            rows[arm] = (Cell(over.mean), Cell(f"{low:+.2f} to {high:+.2f}"))
    return Block(f"over the base at the paper's rho / lr of {PAPERS:g}, mean of four targets", ("points", "95 %"), rows)


def _targets(benches: Sequence[DomainBench], every: Sequence[Lines]) -> Block:
    """Test accuracy of every arm on every target, with all seeds that are there."""
    rows = {}
    for arm in (*benches[0].bases, *benches[0].tuned):
        tests = [list(lines.tests(arm).values()) for lines in every]
        means = [seed_mean(values) for values in [*tests, list(Averaged(every).tests(arm).values())]]
        if any(tests):
            count = "/".join(map(str, dict.fromkeys(map(len, tests))))
            cells = [Cell(missing="not run yet") if mean is None else Cell(mean.mean, mean.spread) for mean in means]
            rows[arm] = (Cell(count), *cells)
    return Block("test accuracy by target", ("seeds", *(bench.split for bench in benches), "mean"), rows)


def _tuning(bench: DomainBench, lines: Lines) -> Block:
    """What was chosen, and the accuracy on held-out images over the grid: learning rates of bases, rho / lr of arms."""
    rows = {}
    for arm in (*bench.bases, *bench.tuned):
        lr = lines.lr(arm)
        if HEADS[arm].base:
            chosen = lines.rho(arm)
            named = dict(zip(bench.ratios, bench.grid(lr or 0.0), strict=True))
            some = {ratio: None if lr is None else lines.held_out(arm, rho, lr) for ratio, rho in named.items()}
            text = f"rho {chosen:g}" if chosen is not None else "-"
        else:
            some = {rate: lines.held_out(arm, None, rate) for rate in bench.lrs}
            text = f"lr {lr:g}" if lr is not None else "-"
        if any(value is not None for value in some.values()):
            listed = "; ".join(f"{key:g}: {'-' if value is None else f'{value:.2f}'}" for key, value in some.items())
            rows[arm] = (Cell(text), Cell(listed))
    title = f"{bench.split} left out: held-out images of the others"
    return Block(title, ("chosen", "lr, or rho / lr: accuracy"), rows, folded=True)
