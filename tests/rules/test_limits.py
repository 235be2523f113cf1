"""Where two methods must meet: exactly, unless the arithmetic differs."""

import pytest
import torch
from worlds import SCHEDULE, federation, play, samples, states, training

from fedlesam import algorithms
from fedlesam.algorithms import SLOW_DECAY, Algorithm, fedavg, feddyn, fedlesam, fedprox, freesam, scaffold
from fedlesam.rules import (
    Adam,
    Average,
    ClientMomentum,
    ControlVariates,
    DualMean,
    Dynamic,
    DynamicRegulariser,
    GlobalAscent,
    LocalAscent,
    Nesterov,
    Privacy,
    ReleasedNesterov,
    SentDual,
    ShiftedDynamic,
    WeightedMomentum,
)

WITHOUT_RHO: dict[str, str | Algorithm] = {
    "fedsam": "fedavg",
    "mofedsam": "fedcm",
    "fedgamma": "scaffold",
    "fedsmoo": "feddyn",
    "fedlesam": "fedavg",
    "fedlesam-s": "scaffold",
    "fedlesam-d": "feddyn",
    "fedlesam-m": "fedcm",
    "freesam": "fedavg",
    "freesam-s": "scaffold",
    "freesam-d": "feddyn",
    "fedlesam-released": "fedavg",
    "fedlesam-released-s": Algorithm(correction=ControlVariates(scale=0.1)),
    "fedlesam-released-d": "feddyn",
    "random-round": "fedavg",
    "random-step": "fedavg",
    "shuffled-s": "scaffold",
    "fedspeed": Algorithm(correction=SentDual(), server=DualMean(), lr_decay=SLOW_DECAY),
    "fedasam": "fedavg",
    "fedgloss": Algorithm(correction=DynamicRegulariser(), server=ShiftedDynamic(), lr_decay=SLOW_DECAY),
    "fednsam": Algorithm(server=Nesterov()),
    "fedsol": "fedavg",
    "dp-fedsam": Algorithm(privacy=Privacy()),
    "fedwmsam": Algorithm(correction=WeightedMomentum()),
    "msam": "fedavg",
    "fedspeed-released": "feddyn",
    "fedsmoo-released": "feddyn",
    "fednsam-released": Algorithm(server=ReleasedNesterov()),
}


@pytest.mark.parametrize("scope", ["loss", "corrected"])
@pytest.mark.parametrize("method", WITHOUT_RHO)
def test_without_rho_the_base_is_left(method: str, scope: str) -> None:
    local = training(clip_scope=scope)
    one = play(federation(algorithms.get(method, rho=0.0), local=local))
    other = play(federation(WITHOUT_RHO[method], local=local))
    assert torch.equal(one.weights, other.weights)
    for slot in ("correction", "server"):
        mine, theirs = getattr(one.state, slot), getattr(other.state, slot)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_every_method_with_rho_is_listed() -> None:
    from fedlesam.algorithms import CATALOGUE

    known = {name for name in CATALOGUE if "rho" in algorithms.hyperparameters(name)}
    assert known == {*WITHOUT_RHO, "fedgf"}, "which has a second radius, rho_g"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (algorithms.get("fedcm", alpha=1.0), fedavg()),
        (algorithms.get("mofedsam", alpha=1.0, rho=0.2), algorithms.get("fedsam", rho=0.2)),
        (algorithms.get("fedlesam-m", alpha=1.0, rho=0.2), fedlesam(rho=0.2)),
        (fedprox(prox=0.0), fedavg()),
        (feddyn(lam=0.0), Algorithm(server=Dynamic())),
        (Algorithm(correction=DynamicRegulariser(0.0)), fedavg()),
        (algorithms.get("fedlesam-d", lam=0.0), Algorithm(GlobalAscent(0.1), server=Dynamic())),
        (Algorithm(LocalAscent(0.1), ClientMomentum(1.0), Adam()), Algorithm(LocalAscent(0.1), server=Adam())),
    ],
    ids=lambda algorithm: repr(algorithm),
)
@pytest.mark.parametrize("scope", ["loss", "corrected"])
def test_a_correction_that_is_switched_off(one: Algorithm, other: Algorithm, scope: str) -> None:
    local = training(clip_scope=scope)
    assert torch.equal(play(federation(one, local=local)).weights, play(federation(other, local=local)).weights)


@pytest.mark.parametrize("method", ["scaffold", "fedlesam", "fedlesam-s", "fedlesam-released"])
def test_the_first_round_is_fedavg(method: str) -> None:
    """c, c_i and old_i are not there yet."""
    one, other = federation(method), federation("fedavg")
    one.round([0, 2])
    other.round([0, 2])
    assert torch.equal(one.weights, other.weights)
    one.round([0, 2])
    other.round([0, 2])
    assert not torch.allclose(one.weights, other.weights, atol=1e-4)


def test_the_first_round_of_feddyn_is_fedprox_with_another_landing() -> None:
    dyn, prox = federation(feddyn(lam=0.3)), federation(fedprox(prox=0.3))
    start = dyn.weights
    dyn.round([0, 2])
    prox.round([0, 2])
    d = prox.weights - start
    torch.testing.assert_close(dyn.weights, start + d + 2 / 6 * d, atol=1e-14, rtol=0)


def test_a_single_client_needs_no_control_variate() -> None:
    """c equals c_i to the resolution of the server's sums, 2^-40, so SCAFFOLD is FedAvg but for that."""
    clients = samples((9,))
    one, other = (federation(method, clients=clients) for method in ("scaffold", "fedavg"))
    play(one, [[0]] * 5)
    play(other, [[0]] * 5)
    torch.testing.assert_close(one.weights, other.weights, atol=1e-11, rtol=0)
    assert float(one.state.correction["c"].norm()) > 0.01


@pytest.mark.parametrize(("method", "base"), [(freesam, fedavg), (algorithms.find("freesam-s"), scaffold)])
def test_one_step_a_round_has_no_previous_step(method: type[Algorithm], base: type[Algorithm]) -> None:
    local = training(epochs=1, batch_size=100)
    one, other = federation(method(rho=0.5), local=local), federation(base(), local=local)
    assert torch.equal(play(one).weights, play(other).weights)


def test_adam_without_memory_is_a_soft_sign() -> None:
    one, other = federation(Algorithm(server=Adam(0.1, 0.0, 0.0, 0.01))), federation("fedavg")
    start = one.weights
    one.round([0, 1])
    other.round([0, 1])
    d = other.weights - start
    torch.testing.assert_close(one.weights, start + 0.1 * d / (d.abs() + 0.01), atol=1e-14, rtol=0)


def test_dynamic_landing_of_full_participation_sums_the_updates() -> None:
    fed = federation(Algorithm(server=Dynamic()))
    everyone, total = range(6), torch.zeros_like(fed.weights)
    for _ in range(3):
        before = fed.weights
        beside = federation(Algorithm(server=Average()))
        beside.state = type(fed.state)(fed.state.round, before, {}, {}, {}, {})
        beside.round(everyone)
        d = beside.weights - before
        total = total + d
        fed.round(everyone)
        torch.testing.assert_close(states(fed)["server.H"], total, atol=1e-13, rtol=0)
        torch.testing.assert_close(fed.weights, before + d + total, atol=1e-13, rtol=0)


def test_no_clip_is_a_very_large_clip() -> None:
    one, other = (federation("fedlesam-d", local=training(clip=clip)) for clip in (None, 1e9))
    assert torch.equal(play(one, SCHEDULE[:3]).weights, play(other, SCHEDULE[:3]).weights)
