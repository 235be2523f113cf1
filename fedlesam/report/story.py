"""What the demo shows, in two sentences with its numbers."""

from statistics import fmean

from fedlesam.report.ranking import Row, last_rise, rank
from fedlesam.runs.read import Run
from fedlesam.runs.stats import paired

MEASURED = "https://github.com/fedlesam/fedlesam/tree/main/docs/results/claim"

TIE = 0.5
"""Points of accuracy, below which two methods of the demo tie."""


def story(runs: list[Run]) -> list[str]:
    """What FedAvg, FedSAM, SCAFFOLD, FedLESAM and FedLESAM-S did, and an explanation of FedLESAM's place.

    Args:
        runs: The demo's runs: all methods with the same seeds, two or more, and rho, and with the sharpness probe.
    """
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    rows = rank(methods.items())
    named, best = {row.algorithm: row for row in rows}, rows[0]
    base, sam = named["fedavg"], named["fedsam"]
    seen = (
        f"{best.algorithm} ends highest, {100 * _end(best):.1f} % to fedavg's {100 * _end(base):.1f} %; fedsam is "
        f"{_points(sam, base)} fedavg for two backward passes a step{_flatness(methods['fedsam'], methods['fedavg'])}."
    )
    pairs = [("fedlesam", "fedavg"), ("fedlesam-s", "scaffold")]
    placed = " and ".join(_beside(named[name], named[other]) for name, other in pairs)
    rho = methods["fedlesam"][0].config.hyper["rho"]
    why = (
        f"{placed}; an explanation, which this demo does not test, is that FedLESAM's perturbation is constant while "
        f"a client trains, so it only shifts the start of the client's round by rho = {rho:g}, while fedsam's follows "
        f"the client's own gradient at every step (where each of the two perturbations points was measured: "
        f"{MEASURED})."
    )
    return [seen, why]


def _end(row: Row) -> float:
    assert row.mean_of_last is not None, "every run of the demo is evaluated"
    return row.mean_of_last


def _flatness(runs: list[Run], base: list[Run]) -> str:
    """Flatter or sharper than FedAvg, if the seeds tell."""
    rises, others = ({run.config.seed: _rise(run) for run in some} for some in (runs, base))
    over, radius = paired(rises, others), runs[0].series("sharpness")[-1].metadata["radius"]
    low, high = over.interval()
    measured = (
        f"within a radius of {radius:g} its training loss rises by {fmean(rises.values()):.3f}, fedavg's by "
        f"{fmean(others.values()):.3f}"
    )
    interval = f"95 % interval of the difference, over {len(over.values)} seeds: {low:+.3f} to {high:+.3f}"
    if not (low > 0 or high < 0):
        order = "lower" if over.mean < 0 else "higher"
        return f"; {measured}: its mean is {order}, but the seeds do not tell whether it is flatter ({interval})"
    return f", and {'flatter' if high < 0 else 'sharper'}: {measured} ({interval})"


def _rise(run: Run) -> float:
    rise = last_rise(run)
    assert rise is not None, "every run of the demo is probed"
    return rise


def _points(row: Row, other: Row) -> str:
    gain = 100 * (_end(row) - _end(other))
    return f"{abs(gain):.1f} points {'above' if gain > 0 else 'below'}"


def _beside(row: Row, other: Row) -> str:
    gain = 100 * (_end(row) - _end(other))
    if abs(gain) < TIE:
        shown = f"{gain:+.1f}" if abs(gain) >= 0.05 else "0.0"
        return f"{row.algorithm} ties with {other.algorithm} ({shown} points)"
    return f"{row.algorithm} is {_points(row, other)} {other.algorithm}"
