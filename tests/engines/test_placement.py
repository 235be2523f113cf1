"""Which worker computes where, and how it is started; and that what clients keep leaves the device."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from worlds import SCHEDULE, assert_same_bits, federation, play, samples, states

from fedlesam import Execution, Federation
from fedlesam.core.batches import Batches, batch_indices
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.messages import Memory
from fedlesam.engines import host as hosts
from fedlesam.engines import settings
from fedlesam.engines.host import HostMemory, to_host
from fedlesam.engines.placement import Placement, environment, place
from fedlesam.engines.world import World, start_local

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "gpus", "workers", "threads", "platform", "expected"),
    [
        (CPU, 0, 4, 1, "linux", Placement("fork", None)),
        (CPU, 8, 4, 1, "linux", Placement("fork", None)),
        (CPU, 0, 4, 2, "linux", Placement("spawn", None)),
        (CPU, 0, 4, None, "linux", Placement("spawn", None)),
        (CPU, 0, 4, 1, "darwin", Placement("spawn", None)),
        (GPU, 1, 3, 1, "linux", Placement("spawn", [0, 0, 0])),
        (GPU, 2, 2, 1, "linux", Placement("spawn", [0, 1])),
        (GPU, 4, 2, 1, "linux", Placement("spawn", [0, 1])),
        (GPU, 2, 5, None, "linux", Placement("spawn", [0, 1, 0, 1, 0])),
        (torch.device("cuda", 1), 2, 3, 1, "linux", Placement("spawn", [1, 0, 1])),
    ],
)
def test_where_workers_compute(
    device: torch.device, gpus: int, workers: int, threads: int | None, platform: str, expected: Placement
) -> None:
    assert place(device, gpus, workers, threads, platform) == expected


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"the model is on cuda:0, and this machine has no GPU; use --device cpu"):
        place(GPU, 0, 2, 1)


def test_a_worker_sees_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = Placement("spawn", [0, 1])
    assert environment(two, 1) == {"CUDA_VISIBLE_DEVICES": "1", "LOCAL_RANK": "0"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8932f937")
    assert environment(two, 1)["CUDA_VISIBLE_DEVICES"] == "GPU-8932f937"
    assert environment(Placement("fork", None), 1) == {}


def test_ranks_share_gpus_where_there_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert settings.find_device("cuda") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="PyTorch sees 2 GPUs: use a number below 2, or use cpu"):
        settings.find_device("cuda:2")


def look_around(world: World) -> None:
    """What a worker on a GPU finds in its environment."""
    world.gather({name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK")})
    total = torch.full((3,), world.rank)
    world.add_up(total)


def test_workers_on_gpus_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of two GPUs, without any: processes are spawned, each with its own, and sums come together."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    world = start_local(3, 1, look_around, device=GPU)
    try:
        found = [message for message, _ in world.gather({})]
        total = torch.zeros(3, dtype=torch.int64)
        world.add_up(total)
    finally:
        world.close()
    assert [place.get("CUDA_VISIBLE_DEVICES") for place in found] == [None, "1", "0"]
    assert total.tolist() == [3, 3, 3]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot be sent: .*top level of a module, or start the run with torchrun"):
        start_local(2, 2, lambda world: None)


def test_models_and_batches_are_sent() -> None:
    flat = FlatModel(nn.Linear(5, 3).double())
    again: FlatModel = pickle.loads(pickle.dumps(flat))
    assert torch.equal(again.weights, flat.weights)
    assert again.weights.data_ptr() != flat.weights.data_ptr()
    batches: Batches = pickle.loads(pickle.dumps(Batches(samples()[0], CPU)))
    assert (len(batches), batches.device) == (7, CPU)


# What clients keep


def test_memories_leave_the_gpu() -> None:
    """Fake tensors know devices: all of a state is on the CPU, and the received model is moved once."""
    with FakeTensorMode():
        received, own = torch.empty(5, device="cuda"), torch.empty(5, device="cuda")
        host = HostMemory(received)
        one = host.keep(Memory({"old": received}, {"c": own}))
        two = host.keep(Memory({"old": received}))
        assert {t.device.type for t in (*one.flatten().values(), *two.flatten().values())} == {"cpu"}
        assert one.perturbation["old"] is two.perturbation["old"] is host.anchor


def test_on_the_cpu_nothing_is_copied() -> None:
    received = torch.ones(3)
    memory, host = Memory({"old": received}), HostMemory(received)
    assert host.keep(memory) is memory
    assert host.anchor is received
    assert to_host(received) is received


@pytest.mark.parametrize("budget", [None, 0, 300])
def test_the_store_is_given_what_is_on_the_host(
    budget: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the model were elsewhere: everything that is kept has been moved, and the bits are the same."""
    expected = states(play(federation("fedlesam-s"), SCHEDULE[:4]))
    moved: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        new = tensor.clone()
        moved[id(new)] = new
        return new

    def keep(self: HostMemory, memory: Memory) -> Memory:
        return Memory.unflatten({name: self._moved(tensor) for name, tensor in memory.flatten().items()})

    monkeypatch.setattr(hosts, "to_host", copy)
    monkeypatch.setattr(HostMemory, "keep", keep)
    more: dict[str, Any] = {} if budget is None else {"memory": budget, "folder": tmp_path / "memory"}
    fed = play(federation("fedlesam-s", **more), SCHEDULE[:4])
    assert_same_bits(expected, states(fed))
    resident = [t for memory in fed.memories._resident.values() for t in memory.flatten().values()]
    assert all(id(tensor) in moved for tensor in resident)
    if budget is None:
        kept = len(fed.memories) + len(set(fed.memories.rounds.values()))
        assert fed.memories.nbytes == kept * fed.weights.nbytes, "the received model once for the clients of a round"


@pytest.mark.parametrize("cuda", [False, True])
def test_what_comes_to_the_host_and_goes_back_is_pinned_where_there_is_a_gpu(
    cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only from such memory does a copy go on beside the computation."""
    asked: list[Any] = []
    empty, meta = torch.empty, torch.device("meta")

    def made(*shape: Any, pin_memory: bool = False, **kinds: Any) -> Tensor:
        asked.append(pin_memory)
        return empty(*shape, **kinds)

    def to(tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        asked.append(("to", non_blocking))
        return empty(tensor.shape, device=device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(Tensor, "copy_", lambda into, _: into)
    assert to_host(empty(3, device="meta")).device == CPU
    assert asked == [cuda]
    asked.clear()
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: asked.append("pinned") or tensor)
    monkeypatch.setattr(Tensor, "to", to)
    memory = Memory({}, {"c": empty(3)}).to(meta)
    first, last = batch_indices(4, 2, 1, False, torch.Generator(), meta)
    assert isinstance(first, Tensor) and isinstance(last, Tensor) and first._base is last._base
    assert memory.correction["c"].is_meta
    assert asked == (["pinned"] if cuda else []) * 1 + [("to", True)] + (["pinned"] if cuda else []) + [("to", True)]


@pytest.mark.parametrize(
    ("how", "method", "graphs", "reorder"),
    [
        ({}, "fedlesam-s", True, True),
        ({"cuda_graphs": False}, "fedlesam-s", False, True),
        ({"compile": True}, "fedlesam-s", False, True),
        ({"engine": "stacked"}, "fedlesam-s", False, False),
        ({"stack_runs": 8}, "fedlesam-s", False, False),
        ({}, "fedsmoo-released", True, False),
    ],
)
def test_graphs_and_channels_last_are_on_where_they_can_be(
    how: dict[str, Any], method: str, graphs: bool, reorder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a federation asks for, and what a model on a GPU does about it."""
    asked: list[tuple[bool, bool]] = []

    class Asked(FlatModel):
        def __init__(
            self, module: nn.Module, precision: Any, compile: bool, graphs: bool = False, reorder: bool = False
        ) -> None:
            asked.append((graphs, reorder))
            super().__init__(module, precision, compile, graphs, reorder)

    def convolution() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 3))

    data = [(torch.randn(4, 1, 3, 3), torch.zeros(4).long())] * 2
    monkeypatch.setattr("fedlesam.federation.FlatModel", Asked)
    Federation(convolution(), data, method, execution=Execution(**how))
    assert asked[0] == (graphs, reorder)
    monkeypatch.setattr(FlatModel, "device", GPU)
    there = FlatModel(convolution(), "fp32", False, *asked[0])
    assert (there.graphs is not None, there.order is not None) == (graphs, reorder)
    monkeypatch.setattr(FlatModel, "device", CPU)
    here = FlatModel(convolution(), "fp32", False, *asked[0])
    assert here.graphs is here.order is None
