"""A model that is not on the CPU, with what can be had without a GPU: the meta device, whose reads give zeros."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")

from elsewhere import ReadsGiveZeros
from flwr.app import ConfigRecord
from local_grid import LocalGrid
from scenes import QUICK, SEED, TIMEOUT, app, model

from fedlesam.algorithms import examples
from fedlesam.flower import Strategy

pytestmark = pytest.mark.extras


WITH_MEMORY = ("fedlesam", "scaffold", "feddyn", "fedsmoo", "fedlesam-s")


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_clients_elsewhere(name: str, tmp_path: Path) -> None:
    """The server's vectors and the memory, from Flower's state and then from files, reach the model's device."""
    grid = LocalGrid(app(make=lambda context: model().to("meta")), 2, memory=str(tmp_path))
    strategy = Strategy(model(), name, clients=2, seed=SEED, hyper=examples(name), **QUICK)
    with ReadsGiveZeros() as mode:
        strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
        grid.new_run()
        strategy.start(grid, num_rounds=3, timeout=TIMEOUT)
    assert mode.read, "the updates"
    assert mode.sent, "samples, model and memory"
    assert len(strategy.rounds) == 3
    assert not any(done.dropped or done.lost for done in strategy.rounds)


@pytest.mark.parametrize("folder", [False, True])
def test_the_server_elsewhere(folder: bool, tmp_path: Path) -> None:
    """Answers, and the sums of a client that lost its memory, reach the device of the server's model."""
    grid = LocalGrid(app(), 2)
    with ReadsGiveZeros():
        own = {"folder": tmp_path / "server"} if folder else {}
        strategy = Strategy(model().to("meta"), "fedlesam-s", clients=2, seed=SEED, **QUICK, **own)
        strategy.start(grid, num_rounds=2, timeout=TIMEOUT)
        grid.new_run()
        strategy.start(grid, num_rounds=3, timeout=TIMEOUT)
    assert [done.lost for done in strategy.rounds] == [[], [], [0, 1]]


def test_the_node_config_chooses_the_device() -> None:
    seen = []

    def make(context: Any) -> Any:
        seen.append(model().to("meta"))
        return seen[-1]

    grid = LocalGrid(app(make=make), 2, device="cpu")
    with pytest.raises(NotImplementedError, match="meta tensor"):  # it was moved, as asked
        grid.of(0).app(_order(grid), grid.of(0).context)
    for wrong, says in (("tpu", "expected auto, cpu, cuda"), ("cuda:99", "or use cpu")):
        grid = LocalGrid(app(), 2, device=wrong)
        assert says in str(grid.of(0).handle(_order(grid)).error.reason)


def _order(grid: LocalGrid) -> Any:
    strategy = Strategy(model(), "fedavg", clients=2, seed=SEED, **QUICK)
    (message, *_) = strategy.configure_train(1, strategy.arrays, ConfigRecord(), grid)
    message.metadata.__dict__["_message_id"] = "m"
    return message
