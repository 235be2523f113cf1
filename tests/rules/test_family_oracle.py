"""The family's oracle itself: where it must meet the other oracle, and that each mistake would show."""

from typing import Any

import pytest
import torch
from agreement import SETTINGS
from family_loop import FedAvg
from family_oracle import METHODS, DPFedSAM, FedDyn, FedSMOOReleased, FedWMSAM, Sam
from family_worlds import ends, oracle, world
from oracle import Oracle
from torch import Tensor
from worlds import SCHEDULE, epochs, mlp, samples

SCOPES = ("loss", "corrected")


def other(method: str, scope: str = "loss", momentum: float = 0.0, **hyper: float) -> Tensor:
    told = {**SETTINGS, "clip_scope": scope, "momentum": momentum, **hyper}
    plain = Oracle(method, mlp(), samples(), epochs, seed=7, **told)
    for active in SCHEDULE:
        plain.round(active)
    return plain.states()["weights"]


def far(one: Tensor, another: Tensor) -> float:
    return float((one - another).abs().max())


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("kind", "method", "hyper", "wrong"),
    [
        (FedAvg, "fedavg", {}, ""),
        (Sam, "fedsam", {"rho": 0.15}, ""),
        (FedDyn, "feddyn", {"lam": 0.2}, ""),
        (FedSMOOReleased, "fedsmoo", {"rho": 0.15, "lam": 0.2}, "cut rightly"),
    ],
    ids=["fedavg", "fedsam", "feddyn", "fedsmoo"],
)
def test_the_two_oracles_agree(
    kind: type[FedAvg], method: str, hyper: dict[str, float], wrong: str, scope: str, momentum: float
) -> None:
    mine = kind(world(clip_scope=scope, momentum=momentum), wrong, **hyper).play(SCHEDULE)[-1]
    assert far(mine, other(method, scope, momentum, **hyper)) < 1e-12


@pytest.mark.parametrize(
    ("method", "change", "base", "hyper"),
    [
        ("fednsam", {"gamma": 0.0}, "fedsam", {"rho": 0.15}),
        ("fednsam-released", {"gamma": 0.0}, "fedsam", {"rho": 0.15}),
        ("fedgf", {"threshold": float("inf")}, "fedsam", {"rho": 0.15}),
        ("dp-fedsam", {"clip": float("inf")}, "fedsam", {"rho": 0.15}),
        ("fedswa", {"floor": 1.0, "lr_g": 1.0}, "fedavg", {}),
        ("msam", {"rho": 0.0}, "fedavg", {}),
        ("msam", {"beta": 0.0}, "freesam", {"rho": 0.15}),
        ("fedsol", {"rho": 0.0}, "fedavg", {}),
        ("fedgloss", {"rho": 0.0, "rho_s": 0.0}, "feddyn", {"lam": 0.2}),
        ("fedspeed-released", {"rho": 0.0}, "feddyn", {"lam": 0.2}),
        ("fedsmoo-released", {"rho": 0.0}, "feddyn", {"lam": 0.2}),
    ],
)
def test_limits(method: str, change: dict[str, Any], base: str, hyper: dict[str, Any]) -> None:
    assert far(ends(method, **change)[-1], other(base, **hyper)) < 1e-12


def test_without_teacher_and_lam_fedgmt_is_fedavg() -> None:
    """But for H, which FedDyn's server adds whatever lam is."""
    free = FedDyn(world(), lam=0.0).play(SCHEDULE)[-1]
    assert far(ends("fedgmt", strength=0.0, lam=0.0)[-1], free) < 1e-12


def test_fedspeed_without_g0_differs_from_the_released_one_by_the_server_alone() -> None:
    right, released = ends("fedspeed", alpha=1.0), ends("fedspeed-released")
    assert far(right[-1], released[-1]) > 1e-3
    everybody = [range(6)] * 3
    one, two = (
        oracle(name, **more).play(everybody) for name, more in (("fedspeed", {"alpha": 1.0}), ("fedspeed-released", {}))
    )
    assert far(one[-1], two[-1]) < 1e-12  # S is everybody


def test_fednsam_with_a_first_round_alone_is_the_released_one() -> None:
    """Their first two rounds are the same but for where the second lands: 1 + gamma times its d."""
    right, released = ends("fednsam"), ends("fednsam-released")
    assert far(right[0], released[0]) < 1e-15
    assert far(right[1], released[1]) > 1e-3


MISTAKES = (
    ("fednsam", "decay on the unshifted start"),
    ("fednsam-released", "decay on the unshifted start"),
    ("fedgloss", "decay on the unshifted start"),
    ("fedgf", "c over the whole window"),
    ("fedgf", "N for K"),
    ("fedmoswa", "lr for the mean lr_k"),
    ("fedmoswa", "N for K"),
    ("fedspeed", "N for K"),
    ("fedspeed", "clipped before mixing"),
    ("fedwmsam", "N for K"),
    ("fedwmsam", "the next m"),
    ("fedasam", "T on every tensor"),
    ("fedsol", "the norm of the whole tensor"),
    ("fedgmt", "the anchor teaches"),
    ("fedgmt", "the old w is averaged"),
    ("fedgmt", "without tau^2"),
    ("fedgmt", "with the pull"),
    ("fedsmoo-released", "cut rightly"),
)


@pytest.mark.parametrize(("method", "wrong"), MISTAKES)
def test_a_mistake_shows(method: str, wrong: str) -> None:
    """Ten thousand times as much as the comparison with the package forgives."""
    assert far(ends(method, wrong)[-1], ends(method)[-1]) > 1e-6


def test_n_for_k_shows_in_the_noise() -> None:
    def draw(t: int) -> Tensor:
        return torch.randn(39, generator=torch.Generator().manual_seed(t), dtype=torch.float64)

    one, two, none = (
        ends("dp-fedsam", wrong, noise=s, draw=draw)[-1] for wrong, s in (("", 1.0), ("N for K", 1.0), ("", 0.0))
    )
    assert far(one, two) > 1e-3
    assert far(none, ends("dp-fedsam")[-1]) < 1e-15


@pytest.mark.parametrize("method", METHODS)
def test_the_problem_is_hard_enough(method: str) -> None:
    """Clipped steps and others; no two methods alike."""
    played = oracle(method)
    last = played.play(SCHEDULE)[-1]
    assert 0.1 * played.taken < played.clipped < played.taken
    assert all(far(last, ends(another)[-1]) > 1e-3 for another in METHODS if another != method)


def test_the_states_that_have_few_values_take_several() -> None:
    gf, wm, dp = oracle("fedgf"), oracle("fedwmsam"), oracle("dp-fedsam")
    seen: dict[str, set[float]] = {"c": set(), "q": set(), "clipped": set()}
    assert isinstance(wm, FedWMSAM)
    assert isinstance(dp, DPFedSAM)
    for active in SCHEDULE:
        before = wm.alpha
        seen["clipped"] |= {float(dp.train(i).d.norm()) > 0.2 for i in active}
        for played in (gf, wm, dp):
            played.round(active)
        seen["c"].add(vars(gf)["c"])
        seen["q"].add(round((wm.alpha - 0.99 * before) / 0.01, 6))
    assert len(seen["c"]) >= 3
    assert len(seen["q"]) >= 2
    assert seen["clipped"] == {False, True}


@pytest.mark.parametrize("method", METHODS)
def test_nobody_answered(method: str) -> None:
    played = oracle(method)
    played.play(SCHEDULE[:3])
    before = {key: value for key, value in vars(played).items() if key != "t"}
    played.round([])
    assert {key: value for key, value in vars(played).items() if key != "t"} == before
    assert played.t == 4
