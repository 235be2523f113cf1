"""The local loop as a generator of steps."""

import copy
import math

import pytest
import torch
from oracle import Oracle
from torch import Tensor, nn
from worlds import SCHEDULE, answer_of, epochs, federation, mlp, play, samples, steps_in, training

from fedlesam import algorithms
from fedlesam.core.client import drain
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.messages import ClientResult


def dropout_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 3)).double()


def norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)).double()


def assert_same_answer(one: ClientResult, other: ClientResult) -> None:
    assert one.result.steps == other.result.steps
    assert one.loss == other.loss
    assert torch.equal(one.result.update, other.result.update)
    for name in ("perturbation", "correction", "buffers"):
        client_state, theirs = getattr(one, name), getattr(other, name)
        assert client_state.keys() == theirs.keys()
        assert all(torch.equal(client_state[key], theirs[key]) for key in client_state)


@pytest.mark.parametrize("make", [mlp, dropout_net, norm_net])
@pytest.mark.parametrize("method", ["fedavg", "fedlesam-s", "fedsam", "fedsmoo", "freesam-d"])
def test_interleaved_clients_answer_as_if_alone(method: str, make: type[nn.Module]) -> None:
    """Clients in lockstep on models of their own, as the drift probe runs them; one ends before the other."""
    fed = federation(method, model=make())
    play(fed, SCHEDULE[:3])
    alone = [drain(steps_in(fed, i)) for i in (1, 4)]
    pair = [steps_in(fed, i) for i in (1, 4)]
    together: dict[int, ClientResult] = {}
    taken = [0, 0]
    while len(together) < 2:
        for k, steps in enumerate(pair):
            if k in together:
                continue
            try:
                next(steps)
                taken[k] += 1
            except StopIteration as end:
                together[k] = end.value
    assert taken[0] != taken[1]
    for k in range(2):
        assert together[k].result.steps == taken[k]
        assert_same_answer(alone[k], together[k])


@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedsmoo", "fedlesam", "fedlesam-s", "fedlesam-d", "freesam-s"])
def test_a_step_shows_v_and_e_of_the_direct_form(method: str) -> None:
    hyper = {
        key: value for key, value in {"rho": 0.15, "lam": 0.2}.items() if key in algorithms.hyperparameters(method)
    }
    oracle = Oracle(
        method,
        mlp(),
        samples(),
        epochs,
        seed=7,
        lr=0.2,
        lr_decay=0.9,
        batch_size=4,
        weight_decay=0.05,
        clip=0.6,
        clip_scope="loss",
        **hyper,
    )
    fed = federation(algorithms.get(method, **hyper))
    for active in SCHEDULE[:4]:
        for i in active:
            shown = [
                (step.weights(), torch.zeros_like(step.round.v) if step.e is None else step.e.clone())
                for step in steps_in(fed, i)
            ]
            before = len(oracle.trace)
            beside = copy.deepcopy(oracle)
            beside.train(i)
            expected = beside.trace[before:]
            assert len(shown) == len(expected)
            for (v, e), (_, _, v_direct, e_direct) in zip(shown, expected, strict=True):
                torch.testing.assert_close(v, v_direct, atol=1e-10, rtol=0)
                torch.testing.assert_close(e, e_direct, atol=1e-10, rtol=0)
        fed.round(active)
        oracle.round(active)


def test_weights_of_a_step_are_a_copy() -> None:
    fed = play(federation("fedlesam"), [[0, 1]])
    for client in (0, 2):
        steps = steps_in(fed, client)
        step = next(steps)
        v = step.weights()
        v.fill_(math.nan)
        next(steps)
        assert bool(step.weights().isfinite().all())


def test_a_step_is_yielded_with_its_gradient_before_the_weights_move() -> None:
    fed = federation("fedavg", local=training(epochs=1, batch_size=100, clip=None, weight_decay=0.0))
    steps = steps_in(fed, 0)
    step = next(steps)
    assert torch.equal(step.weights(), fed.weights)
    g = step.round.g
    with pytest.raises(StopIteration) as end:
        next(steps)
    torch.testing.assert_close(end.value.value.result.update, -0.2 * g, atol=1e-15, rtol=0)


def test_the_answer_belongs_to_nobody_else() -> None:
    """Training another client on the same model does not change an answer already given."""
    fed = play(federation("fedsmoo"), SCHEDULE[:2])
    flat = FlatModel(copy.deepcopy(fed.model))
    answer = drain(steps_in(fed, 1, flat))
    kept = copy.deepcopy(answer)
    drain(steps_in(fed, 2, flat))
    assert_same_answer(answer, kept)
    assert torch.equal(answer.memory.perturbation["mu"], kept.memory.perturbation["mu"])
    assert torch.equal(answer.memory.correction["h"], kept.memory.correction["h"])


def test_loss_is_the_mean_over_the_steps() -> None:
    fed = federation("fedlesam")
    losses = [step.loss.item() for step in steps_in(fed, 1)]
    assert len(losses) == 6
    assert answer_of(fed, 1).loss == pytest.approx(sum(losses) / len(losses), abs=1e-15)


@pytest.mark.parametrize("method", ["fedsam", "fedsmoo", "fedgamma"])
def test_both_passes_of_a_step_see_one_mask(method: str) -> None:
    masks: list[Tensor] = []

    class Spy(nn.Dropout):
        def forward(self, input: Tensor) -> Tensor:
            output = super().forward(input)
            if self.training:
                masks.append(output.ne(0))
            return output

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 40), Spy(0.5), nn.Linear(40, 3)).double()
    fed = federation(method, model=model, local=training(epochs=2, batch_size=3))
    fed.round([2])
    assert len(masks) == 2 * 4
    for k in range(0, len(masks), 2):
        assert torch.equal(masks[k], masks[k + 1])
    assert not torch.equal(masks[0], masks[4])
    assert any(not torch.equal(masks[0], masks[k]) for k in (2, 4) if masks[k].shape == masks[0].shape)
    fed.round([2])
    assert not torch.equal(masks[0], masks[8])


def test_batch_norm_is_updated_by_the_descent_pass_only() -> None:
    """One full-batch SAM step: the running mean is that of the activations at v + e."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    clients = samples((9,))
    fed = federation(
        algorithms.get("fedsam", rho=0.8),
        model=model,
        clients=clients,
        local=training(epochs=1, batch_size=9),
    )
    x, y = clients[0]
    beside = copy.deepcopy(model).train()
    g0 = torch.autograd.grad(nn.functional.cross_entropy(beside(x), y), list(beside.parameters()))
    length = torch.cat([g.reshape(-1) for g in g0]).norm() + 1e-7
    weight, bias = model[0].weight + 0.8 * g0[0] / length, model[0].bias + 0.8 * g0[1] / length
    fed.round()
    activations = (x @ weight.T + bias).detach()
    torch.testing.assert_close(fed.state.buffers["1.running_mean"], 0.1 * activations.mean(0), atol=1e-14, rtol=0)
    torch.testing.assert_close(fed.state.buffers["1.running_var"], 0.9 + 0.1 * activations.var(0), atol=1e-14, rtol=0)
    assert int(fed.state.buffers["1.num_batches_tracked"]) == 1


def test_a_parameter_the_loss_ignores_only_decays() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(5, 3), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.used(x)
            return output

    local = training(epochs=1, batch_size=100, weight_decay=0.1, lr_decay=1.0)
    fed = federation("fedsam", model=Spare().double(), local=local)
    fed.round([0])
    torch.testing.assert_close(fed.model.get_parameter("spare"), torch.full((2,), 0.98, dtype=torch.float64))
