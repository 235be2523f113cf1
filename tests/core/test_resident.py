"""Samples on a device, checked without one: what is sent to the meta device, how often, and from which memory."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worlds import Listed, samples, training

from fedlesam import algorithms
from fedlesam.core import batches, seeds, staging
from fedlesam.core.batches import Batches, ClientData
from fedlesam.core.client import local_update
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.hold_out import part_of
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import Broadcast, Memory
from fedlesam.data import dataset
from fedlesam.data.augment import flip, flip_and_crop, other_view
from fedlesam.data.dataset import DataSet, Images, Shard
from fedlesam.engines._feed import Gathered, Member

CPU, META = torch.device("cpu"), torch.device("meta")
COUNT, SIDE, MINE = 40, 8, 9
MOMENTS = 2 * 3 * 4
"""Bytes: mean and standard deviation of three channels."""


class Sent(TorchDispatchMode):
    """The bytes of each tensor that leaves the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim]
        if {t.device.type for t in given} == {"cpu"} and isinstance(out, Tensor) and out.is_meta:
            self.bytes.append(given[0].nbytes)
        return out


def pictures() -> DataSet:
    draw = torch.Generator().manual_seed(3)

    def some(count: int) -> Images:
        x = torch.randint(256, (count, 3, SIDE, SIDE), generator=draw, dtype=torch.uint8)
        return Images(x, torch.randint(4, (count,), generator=draw))

    return DataSet("made", some(COUNT), some(10), tuple("abcd"), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def shard(data: DataSet, client: int) -> Shard:
    return data.shard(torch.arange(client * MINE, (client + 1) * MINE))


@pytest.fixture(autouse=True)
def anew() -> None:
    dataset._moments_there.cache_clear()


def sent_in_round(data: ClientData, local: LocalTraining) -> tuple[list[int], list[int]]:
    """Bytes of what is sent up to the first step of a client's round, and from then on. The meta device is not read."""
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 4)).to("meta"))
    broadcast = Broadcast(1, model.weights, {}, {}, {})
    steps = local_update(model, data, algorithms.example("fedavg"), local, broadcast, Memory(), client=0, seed=7)
    with Sent() as first:
        next(steps)
    with Sent() as later:
        for _ in range(2):
            next(steps)
    steps.close()
    return first.bytes, later.bytes


def order(size: int) -> int:
    return 8 * size


ONE_EPOCH = training(epochs=1, batch_size=3)


def test_pixels_and_labels_are_sent_once_for_all_clients_and_rounds() -> None:
    data = pictures()
    first, later = sent_in_round(shard(data, 0), ONE_EPOCH)
    pixels = COUNT * 3 * SIDE * SIDE
    which = order(MINE)
    """Where the client's samples are: for the client, and for its epoch."""
    assert sorted(first) == sorted([pixels, 8 * COUNT, which, MOMENTS // 2, MOMENTS // 2, which])
    assert later == []
    assert sent_in_round(shard(data, 1), ONE_EPOCH) == ([which, which], [])
    mine = shard(data, 2)
    sent_in_round(mine, ONE_EPOCH)
    assert sent_in_round(mine, ONE_EPOCH) == ([which], []), "the order of the epoch"


def test_an_epoch_is_one_copy() -> None:
    mine = shard(pictures(), 0)
    Batches(mine, META)
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 4)).to("meta"))
    local = training(epochs=3, batch_size=3)
    broadcast = Broadcast(1, model.weights, {}, {}, {})
    steps = local_update(model, mine, algorithms.example("fedavg"), local, broadcast, Memory(), client=0, seed=7)
    with Sent() as mode:
        for _ in range(3 * 3):
            next(steps)
    steps.close()
    assert mode.bytes == [order(MINE)] * 3


def test_copies_go_with_the_data_set() -> None:
    gc.collect()
    before = len(staging._copies.get(META, {}))
    data = pictures()
    held = Batches(data.shard(torch.arange(5)), META)
    assert len(staging._copies[META]) == before + 3, "pixels, labels, and which are the client's"
    del held
    gc.collect()
    assert len(staging._copies[META]) == before + 2
    del data
    gc.collect()
    assert len(staging._copies[META]) == before


def test_a_large_client_is_indexed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches are normalised one by one there."""
    monkeypatch.setattr(dataset, "STREAMED", 0)
    held = Batches(shard(pictures(), 0), META)
    assert held.tensors is None
    assert held.home == META
    held.fetch(torch.arange(3, device=META), 0)
    with Sent() as mode:
        x, y = held.fetch(torch.arange(3, device=META), 0)
    assert mode.bytes == []
    assert (x.shape, x.dtype, x.device, y.device) == ((3, 3, SIDE, SIDE), torch.float32, META, META)


def test_held_out_samples_are_those_on_the_device() -> None:
    data = pictures()
    whole = shard(data, 1)
    part = part_of(whole, torch.tensor([4, 1]))
    for one, other in zip(part.tensors(), whole.tensors(), strict=True):
        assert torch.equal(one, other[[4, 1]])
    Batches(whole, META)
    with Sent() as mode:
        Batches(part, META)
    assert mode.bytes == [order(2)]


def test_stacks_gather_on_the_device() -> None:
    data = pictures()
    members = [Member(i, Batches(shard(data, i), META), MINE, 3, 7, 1, ()) for i in range(2)]
    x, y = Gathered(members, 3, 2, fill=True)(0, 2)
    assert (x.shape, x.dtype, x.device) == ((2, 3, 3, SIDE, SIDE), torch.float32, META)
    assert (y.shape, y.device) == ((2, 3), META)


def test_a_data_set_stays_as_a_whole_or_not_at_all() -> None:
    data = pictures()
    size = (COUNT + 10) * (3 * SIDE * SIDE + 8)
    for mine in (shard(data, 1), data.test_shard()):
        assert (mine.stays(size), mine.stays(size - 1)) == (size, 0)


def test_moments_may_be_lists() -> None:
    data = replace(pictures(), mean=[0.5, 0.4, 0.3], std=[0.2, 0.3, 0.4])  # type: ignore[arg-type]
    x, _ = Batches(shard(data, 0), META).fetch(slice(None), 0)
    assert x.is_meta


@pytest.mark.parametrize("room", [0, 1 << 30])
def test_the_same_numbers(room: int) -> None:
    """The path of a device, taken on the CPU, which can be read."""
    mine = shard(pictures(), 1)
    stored = mine.on(CPU, room)
    assert (stored is mine) == (room == 0)
    for one, other in zip(stored.inputs(stored.raw(slice(None))), mine.tensors(), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


FORMS: dict[str, Callable[[], tuple[ClientData, list[int]]]] = {
    "pictures": lambda: (shard(pictures(), 0), [3 * 3 * SIDE * SIDE, 3 * 8]),
    "pair": lambda: (samples((MINE,))[0], [3 * 5 * 8, 3 * 8]),
    "one by one": lambda: (Listed(*samples((MINE,))[0]), [3 * 5 * 8, 3 * 8]),
}


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_is_sent_batch_by_batch(form: str, cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy for each tensor of a batch, pictures as their pixels; pinned first where CUDA is available."""
    pinned: list[int] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(batches, "RESIDENT", 10)
    data, expected = FORMS[form]()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: cuda)
        patch.setattr(Tensor, "pin_memory", pin)
        with Sent() as begun:
            held = Batches(data, META)
    assert begun.bytes == []
    assert held.home is None
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    held.fetch(torch.tensor([0, 1, 2]), 0)  # sends mean and deviation, too
    pinned.clear()
    for _ in range(2):
        with Sent() as mode:
            batch = held.fetch(torch.tensor([3, 1, 2]), 0)
        assert mode.bytes == expected
        assert all(tensor.is_meta for tensor in batch)
    assert pinned == (expected * 2 if cuda else [])


def test_on_the_cpu_nothing_of_this_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Shard, "on", never)
    monkeypatch.setattr("fedlesam.core.batches.Staging", never)
    mine = shard(pictures(), 0)
    held = Batches(mine, CPU)
    assert (held.stored, held.staging) == (None, None)
    for one, other in zip(held.fetch(slice(None), 0), mine.tensors(), strict=True):
        assert torch.equal(one, other)


# a GPU, as far as it can be played


class Played:
    """What PyTorch's streams and events are asked for, in order."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Played") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> "Played":
        return Played(f"event {sum(line.endswith('for copies') for line in self.log)} of {self.name}", self.log)

    def synchronize(self) -> None:
        self.log.append(f"Python waits for {self.name}")

    def __enter__(self) -> None:
        self.log.append("copies begin")

    def __exit__(self, *_: object) -> None:
        self.log.append("copies end")


def test_copies_have_their_own_stream_and_python_is_one_batch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Played("steps", log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(staging, "_stream", lambda device: Played("copies", log))
    monkeypatch.setattr(staging, "move", lambda batch, device: log.append("sent") or batch)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: log.append(f"used by {stream.name}"))
    send = staging.Staging(torch.device("cuda", 0))
    one = ["copies begin", "sent", "copies end", "steps waits for copies", "used by steps", "used by steps"]
    for _ in range(3):
        send((torch.ones(2), torch.ones(2)))
    assert log == [*one, *one, "Python waits for event 1 of steps", *one, "Python waits for event 2 of steps"]


class Graph:
    """An object that moves itself, whose memory nobody else knows."""

    def to(self, device: torch.device) -> "Graph":
        return self


@pytest.mark.parametrize("leaf", [Graph(), torch.zeros(2, device=META), torch.eye(2).to_sparse()])
def test_what_cannot_be_pinned_is_sent_as_before(leaf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: Tensor) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    send = staging.Staging(META)
    monkeypatch.setattr(Tensor, "pin_memory", never)
    x, other = send((torch.ones(2), leaf))
    assert x.is_meta
    assert type(other) is type(leaf)


@pytest.mark.gpu
@pytest.mark.parametrize("room", [10, batches.RESIDENT])
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu(form: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches are those of the CPU, also where copies go on beside long steps."""
    monkeypatch.setattr(batches, "RESIDENT", room)
    data, _ = FORMS[form]()
    here, there = Batches(data, CPU), Batches(data, torch.device("cuda", 0))
    busy = torch.randn(2000, 2000, device="cuda")
    draw = torch.Generator().manual_seed(0)
    orders = [torch.randperm(MINE, generator=draw)[:3] for _ in range(50)]
    found = []
    for chosen in orders:
        batch = there.fetch(chosen if there.home is None else chosen.cuda(), 0)
        for _ in range(5):
            busy = busy @ busy / 50
        found.append([tensor * 1 for tensor in batch])
        del batch
    for chosen, batch in zip(orders, found, strict=True):
        for one, other in zip(batch, here.fetch(chosen, 0), strict=True):
            torch.testing.assert_close(one.cpu(), other)


# augmentation


class OnMeta(torch.Generator):
    """There are no generators for the meta device: one of the CPU that says it is there, as one of a GPU does."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return META


@pytest.mark.parametrize("augment", [flip, flip_and_crop])
def test_augmentation_sends_nothing(augment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device | None] = []
    plain = seeds.generator

    def generator(*args: Any, device: torch.device | None = None) -> torch.Generator:
        asked.append(device)
        return plain(*args) if device is None else OnMeta()

    monkeypatch.setattr(seeds, "generator", generator)
    data = pictures()
    sent_in_round(shard(data, 0), training(epochs=1, batch_size=3, augment=augment))
    first, later = sent_in_round(shard(data, 1), training(epochs=1, batch_size=3, augment=augment))
    assert first == [order(MINE)] * 2
    assert later == []
    assert asked == [None, META] * 2


def test_the_views_are_chosen_on_the_device() -> None:
    with Sent() as mode:
        other_view(torch.empty(4, 1, 2, 3, device=META), OnMeta())
    assert mode.bytes == []


def test_a_stack_draws_where_its_samples_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "generator", lambda *_, device=None: OnMeta() if device == META else torch.Generator())
    mine = shard(pictures(), 0)
    there, here = (Member(0, Batches(mine, device), MINE, 3, 7, 1, ()) for device in (META, CPU))
    assert there.augment_rng.device == META
    assert here.augment_rng is here.rng
