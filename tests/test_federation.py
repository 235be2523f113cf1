"""The public class: participation, evaluation, the model it hands out, and a round as a transaction."""

import collections
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from worlds import SCHEDULE, assert_same_bits, federation, mlp, play, samples, snapshot, states, training

from fedlesam import Federation, LocalTraining
from fedlesam.core.reduction import Reduction
from fedlesam.federation import count_active


def test_the_quick_start() -> None:
    """Names and defaults a newcomer relies on."""
    clients = samples((8, 9, 10), dtype=torch.float32)
    fed = Federation(mlp(dtype=torch.float32), clients, "fedlesam", test=clients[0])
    records = list(fed.run(2))
    assert [record.round for record in records] == [0, 1]
    assert records[1].active == [0, 1, 2]
    assert records[1].as_dict()["test_accuracy"] == records[1].test_accuracy
    assert fed.local == LocalTraining()
    assert fed.state.round == 2


@pytest.mark.parametrize(
    ("active", "clients", "expected"),
    [
        *[(3, 10, 3), (1.0, 10, 10), (0.1, 100, 10), (0.01, 10, 1), (0.26, 10, 3), (1, 1, 1)],
        *[(np.int64(3), 10, 3), (np.uint8(2), 4, 2), (np.float32(0.5), 4, 2), (np.float64(0.5), 4, 2)],
    ],
)
def test_how_many_are_active(active: float, clients: int, expected: int) -> None:
    found = count_active(active, clients)
    assert (found, type(found)) == (expected, int)


def test_participation_is_uniform_without_replacement() -> None:
    fed = federation("fedavg", active=2)
    draws = [fed.draw_active(t) for t in range(600)]
    assert draws == [fed.draw_active(t) for t in range(600)]
    assert all(len(set(d)) == 2 and d == sorted(d) for d in draws)
    counts = collections.Counter(i for d in draws for i in d)
    assert set(counts) == set(range(6))
    assert max(abs(n - 200) for n in counts.values()) < 50
    pairs = collections.Counter(map(tuple, draws))
    assert len(pairs) == 15
    assert draws != [federation("fedavg", active=2, seed=8).draw_active(t) for t in range(600)]


def test_participation_does_not_depend_on_the_past() -> None:
    """An explicit round in between changes nothing about the draws."""
    fed = federation("fedavg", active=3)
    expected = fed.draw_active(1)
    fed.round([5])
    assert fed.round().active == expected


def test_weights_and_model_are_the_global_model() -> None:
    model = mlp()
    fed = federation("fedavg", model=model)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.equal(fed.weights, flat)
    fed.round([0, 1])
    given = fed.model
    assert not given.training
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in given.parameters()]), fed.weights)
    fed.weights.zero_()
    with torch.no_grad():
        given[0].weight.zero_()
    assert float(fed.weights.norm()) > 0
    assert not torch.equal(fed.model[0].weight, torch.zeros(4, 5))


def test_training_does_not_depend_on_who_looks() -> None:
    """Reading the model, the weights or the test data between rounds leaves the bits as they are."""
    one, other = federation("fedsmoo"), federation("fedsmoo", test=samples((20,))[0], evaluate_every=2)
    for active in SCHEDULE[:4]:
        one.round(active)
        other.round(active)
        assert other.model is not None
        assert other.draw_active(3)
    assert_same_bits(states(one), states(other))


def test_evaluation() -> None:
    """Of the new global model, on all test samples, every so many rounds."""
    x, y = samples((700,), seed=9)[0]
    fed = federation("fedavg", test=(x, y), evaluate_every=2)
    assert fed.round([0]).test_loss is None
    record = fed.round([1])
    scores = fed.model(x)
    assert record.test_loss == pytest.approx(nn.functional.cross_entropy(scores, y).item(), rel=1e-12)
    assert record.test_accuracy == int((scores.argmax(1) == y).sum()) / 700


def test_evaluation_uses_the_global_statistics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    x, y = samples((40,), seed=9)[0]
    fed = federation("fedavg", model=model, test=(x, y), clients=samples((8, 9)))
    record = fed.round([0, 1])
    assert record.test_loss == pytest.approx(nn.functional.cross_entropy(fed.model(x), y).item(), rel=1e-12)


def test_threads_are_given_back() -> None:
    fed = federation("fedavg", threads=2)
    before = torch.get_num_threads()
    fed.round([0])
    assert torch.get_num_threads() == before == 1


def test_epochs_from_a_range() -> None:
    """Drawn for each client and round, the same again for the same seed."""
    local = training(epochs=range(1, 5), batch_size=100)
    one, other = federation("fedavg", local=local), federation("fedavg", local=local)
    passes = [one.round([i]).backward_passes for i in range(6) for _ in range(5)]
    assert passes == [other.round([i]).backward_passes for i in range(6) for _ in range(5)]
    assert set(passes) == {1, 2, 3, 4}


@pytest.mark.parametrize("when", ["server step", "evaluation", "record"])
def test_an_interrupt_late_in_a_round_changes_nothing(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = play(federation("fedlesam-s", test=samples((9,))[0]), SCHEDULE[:2])
    before, memories = snapshot(fed), dict(fed.memories)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if when == "server step":
            patch.setattr("fedlesam.federation.server_step", stop)
        elif when == "evaluation":
            patch.setattr("fedlesam.engines.serial.score_batches", stop)
        else:
            patch.setattr(Reduction, "divergence", stop)
        with pytest.raises(KeyboardInterrupt):
            fed.round([0, 4])
    assert_same_bits(states(fed), before)
    assert fed.memories == memories
    fed.round([0, 4])
    assert_same_bits(states(fed), states(play(federation("fedlesam-s"), [*SCHEDULE[:2], [0, 4]])))


def test_run_stops_where_the_caller_stops() -> None:
    fed = federation("fedavg", active=2)
    for record in fed.run(10):
        if record.round == 1:
            break
    assert fed.state.round == 2


def test_tied_parameters_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(5, 5, bias=False)
            self.two = nn.Linear(5, 5, bias=False)
            self.two.weight = self.one.weight
            self.out = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.out(self.two(torch.tanh(self.one(x))))
            return result

    torch.manual_seed(0)
    fed = play(federation("fedlesam-s", model=Tied().double()), SCHEDULE[:3])
    assert fed.weights.numel() == 25 + 18
    model = fed.model
    assert model.one.weight is model.two.weight
    assert torch.equal(model.one.weight.detach().reshape(-1), fed.weights[:25])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "cuda"}, r"Federation has no argument device; give execution=fl\.Execution\(device=\.\.\.\)"),
        ({"lr": 0.1}, r"Federation has no argument lr; give local=fl\.LocalTraining\(lr=\.\.\.\)"),
        ({"dropout": 0.1}, r"Federation has no argument dropout; give failures=fl\.FailurePolicy\(dropout=\.\.\.\)"),
        ({"gpu": True}, "unexpected keyword argument 'gpu'"),
    ],
)
def test_an_argument_of_another_object(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Federation(mlp(), samples(), **given)
    assert "execution" in inspect.signature(Federation).parameters, "it keeps its signature"
