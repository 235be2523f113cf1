"""The controls of the claim: the released perturbation by hand, random directions that are the same every time."""

import pytest
import torch
from worlds import SCHEDULE, assert_same_bits, federation, mlp, play, snapshot, steps_in, training

from fedlesam.algorithms import Algorithm
from fedlesam.core.slots import TensorSpec
from fedlesam.federation import Federation
from fedlesam.probes.estimate import constant_perturbations
from fedlesam.rules import (
    ControlVariates,
    GlobalAscent,
    RandomRoundAscent,
    RandomStepAscent,
    ReleasedAscent,
    ShuffledAscent,
)


def test_the_released_perturbation_by_hand() -> None:
    """Three tensors of 1, 3 and 2 entries; G = (1, -4, 3, ...), so the shifts are -.5 * (1, -4, 3) / (8 + 1e-7)."""
    rule = ReleasedAscent(0.5).for_model([TensorSpec(str(n), torch.Size([n])) for n in (1, 3, 2)])
    old, anchor = torch.zeros(6).double(), torch.tensor([1.0, -4.0, 3.0, 70.0, 80.0, 90.0]).double()
    e = rule.round_perturbation(anchor, {}, {"old": old})
    assert e is not None
    shifts = torch.tensor([-1.0, 4.0, 4.0, 4.0, -3.0, -3.0]).double() * 0.5 / (8 + 1e-7)
    torch.testing.assert_close(e, shifts, atol=1e-15, rtol=0)
    assert rule.round_perturbation(anchor, {}, {}) is None, "nothing in the first round"


def test_the_released_perturbation_knows_the_tensors_of_the_model() -> None:
    """Also where some are frozen: only trainable ones have a number."""
    model = mlp()
    model[0].bias.requires_grad_(False)
    fed = play(federation(Algorithm(ReleasedAscent(0.3)), model=model), SCHEDULE[:2])
    before = fed.weights
    e = constant_perturbations(fed, [0])[0]
    pieces = e.split([20, 12, 3])
    assert [len(piece.unique()) for piece in pieces] == [1, 1, 1]
    assert float(sum(piece[0].abs() for piece in pieces)) == pytest.approx(0.3, rel=1e-4)
    assert torch.equal(fed.weights, before)


def test_ahead_is_the_opposite_of_back() -> None:
    anchor, old = torch.tensor([3.0, 4.0]), torch.zeros(2)
    back, ahead = (
        GlobalAscent(0.5, direction=d).round_perturbation(anchor, {"old": old}, {}) for d in ("back", "ahead")
    )
    assert back is not None
    assert ahead is not None
    torch.testing.assert_close(back, torch.tensor([-0.3, -0.4]))
    torch.testing.assert_close(ahead, -back)


def perturbations(fed: Federation, client: int) -> list[torch.Tensor]:
    return [step.e.clone() for step in steps_in(fed, client) if step.e is not None]


def test_one_random_direction_a_round() -> None:
    fed = federation(Algorithm(RandomRoundAscent(0.4)), local=training(epochs=2))
    here, other = perturbations(fed, 1), perturbations(fed, 2)
    assert len(here) == 6
    assert all(torch.equal(e, here[0]) for e in here)
    assert float(here[0].norm()) == pytest.approx(0.4)
    fed.round([0])
    for another in (other[0], perturbations(fed, 1)[0]):
        assert abs(float(another @ here[0])) < 0.7 * 0.4**2, "every client and round has its own"


def test_a_random_direction_a_step() -> None:
    fed = federation(Algorithm(RandomStepAscent(0.4)), local=training(epochs=2))
    drawn = perturbations(fed, 1)
    assert len(drawn) == 6
    assert [float(e.norm()) for e in drawn] == pytest.approx([0.4] * 6)
    gram = torch.stack(drawn) @ torch.stack(drawn).T
    assert float((gram - gram.diag().diag()).abs().max()) < 0.7 * 0.4**2


@pytest.mark.parametrize("rule", [RandomRoundAscent(0.4), RandomStepAscent(0.4)], ids=repr)
def test_what_others_draw_does_not_matter(rule: RandomRoundAscent | RandomStepAscent) -> None:
    ends = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        fed = federation(Algorithm(rule))
        before = torch.get_rng_state()
        ends.append(snapshot(play(fed, SCHEDULE[:3])))
        assert torch.equal(torch.get_rng_state(), before)
    assert_same_bits(*ends)
    assert not torch.equal(play(federation(Algorithm(rule), seed=8), SCHEDULE[:3]).weights, ends[0]["weights"])


def test_a_difference_of_two_earlier_models() -> None:
    """After four rounds of a pool of three: w_1 - w_2, w_1 - w_3 or w_2 - w_3, each drawn by some client."""
    fed = federation(Algorithm(ShuffledAscent(0.4, pool=3)))
    assert float(perturbations(fed, 1)[0].norm()) == 0, "the pool has one model yet"
    models = []
    for active in SCHEDULE[:4]:
        models.append(fed.weights)
        fed.round(active)
    pairs = [(1, 2), (1, 3), (2, 3)]
    allowed = torch.stack([0.4 * (models[a] - models[b]) / (models[a] - models[b]).norm() for a, b in pairs])
    drawn = set()
    for client in range(6):
        apart = (allowed - perturbations(fed, client)[0]).norm(dim=1)
        assert float(apart.min()) < 1e-12
        drawn.add(int(apart.argmin()))
    assert drawn == {0, 1, 2}


def test_the_estimate_looks_at_the_direction_that_will_be_used() -> None:
    fed = federation(Algorithm(RandomRoundAscent(0.4)))
    before = torch.get_rng_state()
    seen = constant_perturbations(fed, [0, 3])
    assert torch.equal(torch.get_rng_state(), before)
    for client, e in seen.items():
        assert torch.equal(perturbations(fed, client)[0], e)


def test_released_control_variates_turn_a_tenth() -> None:
    server_state, client_state = {"c": torch.tensor([3.0, 1.0])}, {"c": torch.tensor([1.0, 2.0])}
    turn = ControlVariates(scale=0.1).prepare(torch.zeros(2), client_state, server_state)
    assert turn.bias is not None
    torch.testing.assert_close(turn.bias, torch.tensor([0.2, -0.1]))


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="direction"):
        GlobalAscent(direction="sideways")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale"):
        ControlVariates(scale=-1.0)
