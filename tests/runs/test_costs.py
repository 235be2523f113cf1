"""Every method's costs, as its description in the specification adds up to."""

import sys

import pytest

from fedlesam.algorithms import CATALOGUE, Algorithm, example
from fedlesam.core import privacy
from fedlesam.rules import GlobalAscent, LocalAscent
from fedlesam.runs.costs import measure

COSTS = {
    #              passes, down, up, stored
    "fedavg": (1, 1, 1, 1),
    "fedadam": (1, 1, 1, 1),  # the moments stay at the server
    "scaffold": (1, 2, 2, 2),  # w and c down; d_i and the change of c_i up; c_i kept
    "fedcm": (1, 2, 1, 1),  # w and m down
    "feddyn": (1, 1, 1, 2),  # h_i kept
    "fedsam": (2, 1, 1, 1),
    "mofedsam": (2, 2, 1, 1),
    "fedgamma": (2, 2, 2, 2),
    "fedsmoo": (2, 2, 2, 3),  # w and s down; d_i and mu_i up; mu_i and h_i kept
    "fedlesam": (1, 1, 1, 2),  # the last model received kept
    "fedlesam-s": (1, 2, 2, 3),
    "fedlesam-d": (1, 1, 1, 3),  # algorithms.md, the sources' mistake 15
    "fedprox": (1, 1, 1, 1),
    "fedlesam-m": (1, 2, 1, 2),
    "freesam": (1, 1, 1, 1),
    "freesam-s": (1, 2, 2, 2),
    "freesam-d": (1, 1, 1, 2),
    "fedspeed": (2, 1, 2, 2),
    "fedasam": (2, 1, 1, 1),
    "fedgf": (2, 2, 1, 1),
    "fedgloss": (2, 1, 1, 2),
    "fednsam": (2, 1, 1, 1),
    "fedswa": (1, 1, 1, 1),
    "fedmoswa": (1, 2, 2, 2),
    "fedgmt": (1, 2, 1, 2),
    "fedsol": (2, 1, 1, 1),
    "fedwmsam": (1, 3, 2, 2),
    "dp-fedsam": (2, 1, 1, 1),
    "msam": (1, 1, 1, 1),
    "fedavgm": (1, 1, 1, 1),
    "fedyogi": (1, 1, 1, 1),
    "fedadagrad": (1, 1, 1, 1),
    "fedlesam-released": (1, 2, 1, 1),  # w and the last one down
    "fedlesam-released-s": (1, 3, 2, 2),
    "fedlesam-released-d": (1, 2, 1, 2),
    "random-round": (1, 1, 1, 1),
    "random-step": (1, 1, 1, 1),
    "shuffled-s": (1, 12, 2, 2),  # w, c and the ten models before it down
    "scaffold-damped": (1, 2, 2, 2),
    "fedspeed-released": (2, 1, 1, 2),
    "fedsmoo-released": (2, 2, 2, 3),
    "fednsam-released": (2, 1, 1, 1),
}


def test_the_whole_catalogue_is_here() -> None:
    assert list(CATALOGUE) == list(COSTS)


@pytest.mark.parametrize("name", COSTS)
def test_costs(name: str) -> None:
    cost = measure(example(name))
    assert (cost.passes, cost.down, cost.up, cost.stored) == COSTS[name]
    assert cost.shared == ("lesam" in name and "released" not in name), "only FedLESAM's keep the received model itself"


def test_a_new_combination_is_measured_too() -> None:
    assert measure(Algorithm(LocalAscent(0.1))).passes == 2
    assert measure(Algorithm(GlobalAscent(0.1))).stored == 2


def test_costs_need_no_accountant(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """`fedlesam list algorithms` measures all methods; who lists them did not ask for epsilon."""
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    privacy._epsilon.cache_clear()
    privacy._say_once.cache_clear()
    measure(example("dp-fedsam"))
    assert caplog.messages == []
