"""Deployment equals simulation: every method, through the Message objects of Flower, to the bit."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")

from local_grid import LocalGrid
from scenes import CLIENTS, QUICK, SEED, TIMEOUT, app, assert_same_memories, assert_same_state, model, scene, simulation
from seven_tasks import KINDS
from worlds import training

from fedlesam import Federation, algorithms
from fedlesam.algorithms import CATALOGUE, Algorithm, fedsam
from fedlesam.flower import Strategy, client_app
from fedlesam.rules import Adam, DynamicRegulariser, GlobalAscent

pytestmark = pytest.mark.extras


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "dp-fedsam"])  # it is for simulations
def test_the_catalogue(name: str) -> None:
    """Weights, server state, client memory, traffic and participation."""
    strategy, grid = scene(name, active=3)
    result = strategy.start(grid, num_rounds=8, timeout=TIMEOUT)
    fed = simulation(name, active=3)
    ledger = list(fed.run(8))
    assert_same_state(strategy, fed)
    assert_same_memories(strategy, grid, fed)
    for ours, theirs in zip(strategy.rounds, ledger, strict=True):
        for column in ("round", "active", "train_loss", "lr", "bytes_down", "bytes_up"):
            near = column == "lr" and fed.algorithm.lr_floor != 1  # it is computed back from the clients' means
            expected = getattr(theirs, column)
            assert getattr(ours, column) == (pytest.approx(expected, rel=1e-8) if near else expected), column
        assert not ours.dropped
        assert not ours.lost
    loaded = model()
    loaded.load_state_dict(result.arrays.to_torch_state_dict())
    assert torch.equal(nn.utils.parameters_to_vector(loaded.parameters()), fed.weights)


def test_hyper_parameters_reach_the_clients() -> None:
    strategy, grid = scene("fedlesam-s", hyper={"rho": 0.7})
    strategy.start(grid, num_rounds=3, timeout=TIMEOUT)
    fed = simulation(algorithms.get("fedlesam-s", rho=0.7))
    list(fed.run(3))
    assert_same_state(strategy, fed)


def test_a_method_of_ones_own() -> None:
    own = Algorithm(GlobalAscent(0.2, reference="previous-round"), DynamicRegulariser(0.05), Adam(0.1))
    strategy, grid = scene(own)
    strategy.start(grid, num_rounds=3, timeout=TIMEOUT)
    fed = simulation(own)
    list(fed.run(3))
    assert_same_state(strategy, fed)


@pytest.mark.parametrize("kind", ["classification", "multilabel"])
@pytest.mark.parametrize("name", ["fedsam", "fedlesam-s"])
def test_batches_that_are_dicts_and_nested_tuples(name: str, kind: str) -> None:
    """Two passes, and a shifted start with control variates; of several inputs."""
    world, local = KINDS[kind](), training(epochs=1)
    hyper = {"rho": 0.1}
    app = client_app(
        lambda context: copy.deepcopy(world.model),
        lambda context: world.clients[context.node_config["partition-id"]],
        local,
        task=world.task,
        threads=1,
    )
    clients = len(world.clients)
    strategy = Strategy(world.model, name, clients=clients, seed=SEED, hyper=hyper, **QUICK)
    strategy.start(LocalGrid(app, clients), num_rounds=3, timeout=TIMEOUT)
    fed = Federation(world.model, world.clients, algorithms.get(name, **hyper), local, task=world.task, seed=SEED)
    list(fed.run(3))
    assert_same_state(strategy, fed)


def test_a_method_that_the_clients_do_not_have_is_said() -> None:
    strategy = Strategy(model(), fedsam(0.3), clients=CLIENTS, patience=0, attempts=1)
    for other, says in ((None, "not in the catalogue"), (fedsam(0.4), "install the same version")):
        grid = LocalGrid(app(other), CLIENTS)
        with pytest.raises(RuntimeError, match="fewer than 3 answers"):
            strategy.start(grid, num_rounds=1, timeout=TIMEOUT)
        reply = grid.of(0).handle(next(iter(strategy.configure_train(1, strategy.arrays, {}, grid))))
        assert says in str(reply.error.reason)


def test_a_message_cannot_make_a_node_import_anything() -> None:
    strategy, grid = scene("fedavg")
    (message, *_) = strategy.configure_train(1, strategy.arrays, {}, grid)
    message.content.config_records["config"]["name"] = "os:getcwd"
    message.metadata.__dict__["_message_id"] = "m"
    assert "not in the catalogue" in str(grid.of(0).handle(message).error.reason)


def test_node_ids_do_not_matter() -> None:
    """Batches derive from the partition id: the same nodes under other names, in another order."""
    ends = []
    for renamed in (False, True):
        strategy, grid = scene("fedsmoo", active=4)
        if renamed:
            nodes = list(grid.nodes.values())
            grid.nodes = {}
            for place, node in enumerate(reversed(nodes)):
                node.context.node_id = 5 + 11 * place
                grid.nodes[node.context.node_id] = node
        strategy.start(grid, num_rounds=3, timeout=TIMEOUT)
        ends.append(strategy.state.weights)
    assert torch.equal(*ends)


def batch_norm() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def test_buffers_are_averaged_and_counted() -> None:
    first = batch_norm()
    grid = LocalGrid(app(make=lambda context: copy.deepcopy(first)), CLIENTS)
    strategy = Strategy(first, "fedlesam", clients=CLIENTS, seed=SEED, active=4)
    result = strategy.start(grid, num_rounds=3, timeout=TIMEOUT)
    fed = simulation("fedlesam", model=first, active=4)
    ledger = list(fed.run(3))
    assert_same_state(strategy, fed)
    assert [r.bytes_up for r in strategy.rounds] == [r.bytes_up for r in ledger]
    assert [r.bytes_down for r in strategy.rounds] == [r.bytes_down for r in ledger]
    assert result.arrays.to_torch_state_dict()["1.num_batches_tracked"] == fed.state.buffers["1.num_batches_tracked"]


def test_frozen_parameters_are_not_sent() -> None:
    def frozen(context: Any = None) -> nn.Module:
        made = model()
        next(made.parameters()).requires_grad = False
        return made

    grid = LocalGrid(app(make=frozen), CLIENTS)
    strategy = Strategy(frozen(), "scaffold", clients=CLIENTS, seed=SEED)
    result = strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
    fed = simulation("scaffold", model=frozen())
    ledger = list(fed.run(2))
    assert_same_state(strategy, fed)
    assert [r.bytes_up for r in strategy.rounds] == [r.bytes_up for r in ledger]
    assert result.arrays.to_torch_state_dict().keys() == frozen().state_dict().keys()


def test_weighting_by_examples() -> None:
    strategy, grid = scene("fedsam", weighting="examples")
    strategy.start(grid, num_rounds=3, timeout=TIMEOUT)
    fed = simulation("fedsam", weighting="examples")
    list(fed.run(3))
    assert_same_state(strategy, fed)
    with pytest.raises(ValueError, match="ControlVariates"):
        scene("scaffold", weighting="examples")


def test_another_first_model() -> None:
    from flwr.app import ArrayRecord

    other = model()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    strategy, grid = scene("fedlesam-d")
    strategy.start(grid, ArrayRecord(other.state_dict()), num_rounds=2, timeout=TIMEOUT)
    fed = simulation("fedlesam-d", model=other)
    list(fed.run(2))
    assert_same_state(strategy, fed)


def test_evaluation_is_called_before_and_after() -> None:
    from flwr.app import MetricRecord

    strategy, grid = scene("fedavg")
    seen = []

    def evaluate(rounds: int, arrays: Any) -> MetricRecord:
        seen.append((rounds, next(iter(arrays.values())).numpy().sum()))
        return MetricRecord({"rounds": rounds})

    result = strategy.start(grid, num_rounds=2, timeout=TIMEOUT, evaluate_fn=evaluate)
    assert [rounds for rounds, _ in seen] == [0, 1, 2]
    assert len({value for _, value in seen}) == 3, "each time another model"
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2]
    assert sorted(result.train_metrics_clientapp) == [1, 2]


def test_flowers_own_loop_works_too() -> None:
    """`Strategy.start` of Flower, which its wrappers use."""
    from flwr.serverapp.strategy import Strategy as FlowerStrategy

    strategy, grid = scene("fedlesam-s", active=3)
    FlowerStrategy.start(strategy, grid, strategy.arrays, num_rounds=4, timeout=TIMEOUT)
    fed = simulation("fedlesam-s", active=3)
    list(fed.run(4))
    assert_same_state(strategy, fed)
