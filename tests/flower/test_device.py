"""A model that is not on the CPU, with what can be had without a GPU: the meta device, whose reads give zeros."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")

from flwr.app import ConfigRecord
from local_grid import LocalGrid
from scenes import QUICK, SEED, TIMEOUT, app, model

from fedlesam.algorithms import examples
from fedlesam.flower import Strategy

pytestmark = pytest.mark.extras


class ReadsGiveZeros(TorchDispatchMode):
    """What is copied from the meta device to the host is zeros. All else is as there: no CPU tensor may be mixed in."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        on_meta = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_meta]
        if name == "aten._local_scalar_dense.default" and on_meta:
            self.read += 1
            return torch.zeros((), dtype=on_meta[0].dtype).item()
        if name == "aten._to_copy.default" and on_meta and torch.device(kwargs.get("device") or "meta").type == "cpu":
            self.read += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        out = func(*args, **kwargs)
        self.sent += not on_meta and isinstance(out, Tensor) and out.is_meta and bool(tree_leaves(args))
        return out


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
    for wrong, says in (("tpu", "expected auto, cpu, cuda"), ("cuda:99", "GPUs; use cpu")):
        grid = LocalGrid(app(), 2, device=wrong)
        assert says in str(grid.of(0).handle(_order(grid)).error.reason)


def _order(grid: LocalGrid) -> Any:
    strategy = Strategy(model(), "fedavg", clients=2, seed=SEED, **QUICK)
    (message, *_) = strategy.configure_train(1, strategy.arrays, ConfigRecord(), grid)
    message.metadata.__dict__["_message_id"] = "m"
    return message
