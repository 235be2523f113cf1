"""What the demo shows, in two sentences with its numbers."""

from fedlesam.report.ranking import Row, rank
from fedlesam.runs.read import Run

MEASURED = "https://github.com/fedlesam/fedlesam/tree/main/docs/results/claim"

TIE = 0.5
"""Points of accuracy, below which two methods of the demo tie."""


def story(runs: list[Run]) -> list[str]:
    """What FedAvg, FedSAM, SCAFFOLD, FedLESAM and FedLESAM-S did, and an explanation of FedLESAM's place.

    Args:
        runs: The demo's runs: all methods with the same seeds and rho, and with the sharpness probe.
    """
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    rows = rank(methods.items())
    named, best = {row.algorithm: row for row in rows}, rows[0]
    base, sam = named["fedavg"], named["fedsam"]
    reading = methods["fedsam"][0].series("sharpness")[-1]
    flatter, rise = "flatter" if _rise(sam) < _rise(base) else "sharper", f"{_rise(sam):.3f}"
    seen = (
        f"{best.algorithm} ends highest, {100 * _end(best):.1f} % to fedavg's {100 * _end(base):.1f} %; fedsam is "
        f"{_points(sam, base)} fedavg for two backward passes a step, and {flatter}: within a radius of "
        f"{reading.metadata['radius']:g} its training loss rises by {rise}, fedavg's by {_rise(base):.3f}."
    )
    pairs = [("fedlesam", "fedavg"), ("fedlesam-s", "scaffold")]
    placed = " and ".join(_beside(named[name], named[other]) for name, other in pairs)
    rho = methods["fedlesam"][0].config.hyper["rho"]
    why = (
        f"{placed}; an explanation, which this demo does not test, is that FedLESAM's perturbation is constant while "
        f"a client trains, so it only shifts the start of the client's round by rho = {rho:g}, while fedsam's follows "
        f"the client's own gradient at every step (where both point was measured: {MEASURED})."
    )
    return [seen, why]


def _end(row: Row) -> float:
    assert row.mean_of_last is not None, "every run of the demo is evaluated"
    return row.mean_of_last


def _rise(row: Row) -> float:
    assert row.sharpness is not None, "every run of the demo is probed"
    return row.sharpness.mean


def _points(row: Row, other: Row) -> str:
    gain = 100 * (_end(row) - _end(other))
    return f"{abs(gain):.1f} points {'above' if gain > 0 else 'below'}"


def _beside(row: Row, other: Row) -> str:
    gain = 100 * (_end(row) - _end(other))
    if abs(gain) < TIE:
        return f"{row.algorithm} ties with {other.algorithm} ({gain:+.1f} points)"
    return f"{row.algorithm} is {_points(row, other)} {other.algorithm}"
