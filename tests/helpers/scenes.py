"""Small deployments without processes, and what has to hold in all of them."""

from pathlib import Path
from typing import Any

import torch
from local_grid import LocalGrid
from torch import Tensor, nn
from worlds import federation, mlp, samples, training

from fedlesam.algorithms import Algorithm, examples
from fedlesam.core.messages import Memory
from fedlesam.federation import Federation
from fedlesam.flower import Strategy, client_app
from fedlesam.flower.memory import Memories

CLIENTS, SEED = 6, 7
QUICK: dict[str, Any] = {"patience": 0.0}
TIMEOUT = 0.01


def model() -> nn.Sequential:
    return mlp(dtype=torch.float32)


def app(algorithm: Algorithm | None = None, make: Any = None, **settings: Any) -> Any:
    data = samples(dtype=torch.float32)
    return client_app(
        make or (lambda context: model()),
        lambda context: data[context.node_config["partition-id"]],
        training(),
        algorithm=algorithm,
        threads=1,
        **settings,
    )


def scene(name: str | Algorithm, memory: Path | None = None, **settings: Any) -> tuple[Strategy, LocalGrid]:
    """With `memory` the nodes keep theirs in files, too."""
    own = name if isinstance(name, Algorithm) else None
    if isinstance(name, str):
        settings = {"hyper": examples(name), **settings}
    config = {"memory": str(memory)} if memory else {}
    grid = LocalGrid(app(own), CLIENTS, **config)
    return Strategy(model(), name, clients=CLIENTS, seed=SEED, **{**QUICK, **settings}), grid


def simulation(name: str | Algorithm, **settings: Any) -> Federation:
    return federation(name, dtype=torch.float32, seed=SEED, **settings)


def counted(strategy: Strategy, grid: LocalGrid, client: int) -> Memory:
    """The memory of a client that counts: the one made for its last answer that was used."""
    if client not in strategy.used:
        return Memory()
    found = Memories(grid.of(client).context.state, None, client).find(strategy.used[client])
    assert found is not None
    return found


def mean_of(strategy: Strategy, grid: LocalGrid, name: str) -> Tensor:
    """Over all N clients; one that was never active has zero."""
    zero = torch.zeros_like(strategy.state.weights)
    kept = [counted(strategy, grid, client).correction.get(name, zero) for client in range(CLIENTS)]
    return torch.stack(kept).double().mean(0).float()


def assert_sums_hold(strategy: Strategy, grid: LocalGrid) -> None:
    """SCAFFOLD's c is the mean of the c_i, FedDyn's H that of the h_i."""
    state = strategy.state
    if "c" in state.correction:
        assert state.correction["c"].norm() > 0.01, "or the comparison shows nothing"
        torch.testing.assert_close(state.correction["c"], mean_of(strategy, grid, "c"), atol=1e-6, rtol=1e-4)
    if "H" in state.server:
        assert state.server["H"].norm() > 0.01
        torch.testing.assert_close(state.server["H"], mean_of(strategy, grid, "h"), atol=1e-6, rtol=1e-4)


def assert_same_state(strategy: Strategy, fed: Federation) -> None:
    assert strategy.state.round == fed.state.round
    assert torch.equal(strategy.state.weights, fed.state.weights)
    for slot in ("buffers", "perturbation", "correction", "server"):
        ours, theirs = getattr(strategy.state, slot), getattr(fed.state, slot)
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), (slot, key)


def assert_same_memories(strategy: Strategy, grid: LocalGrid, fed: Federation) -> None:
    for client in range(CLIENTS):
        ours, theirs = counted(strategy, grid, client), fed.memories.get(client, Memory())
        for slot in ("perturbation", "correction"):
            left, right = getattr(ours, slot), getattr(theirs, slot)
            assert left.keys() == right.keys(), (client, slot)
            for key in left:
                assert torch.equal(left[key], right[key]), (client, slot, key)
