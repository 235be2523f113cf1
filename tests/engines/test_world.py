"""Messages between processes: what goes in comes out, and nothing is unpickled."""

import io
import os
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from worlds import SCHEDULE, assert_same_bits, federation, play, snapshot

from fedlesam.engines.world import World, _pack, _unpack, from_environment, start_local

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
)
SHAPES = ((), (0,), (3,), (2, 0), (2, 3))


def content(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).abs().to(dtype)


EVERYTHING = {f"{dtype}/{shape}": content(dtype, shape) for dtype in DTYPES for shape in SHAPES}


@given(about=JSON, names=st.lists(st.sampled_from(sorted(EVERYTHING)), unique=True, max_size=6))
def test_a_message_is_what_was_said(about: Any, names: list[str]) -> None:
    tensors = {name: EVERYTHING[name] for name in names}
    heard, got = _unpack(_pack(about, tensors))
    assert heard == about
    assert type(heard) is type(about)
    assert sorted(got) == sorted(tensors)
    assert all(got[name].shape == tensors[name].shape for name in names)
    assert_same_bits(tensors, got)


def test_views_and_repeats_can_be_sent() -> None:
    """Tensors that share memory, and a part of a larger one."""
    whole = torch.arange(12.0).view(3, 4)
    tensors = {"one": whole, "again": whole, "row": whole[1], "column": whole[:, 2], "spread": whole[0, :1].expand(5)}
    assert_same_bits(tensors, _unpack(_pack(None, tensors))[1])


def echo(world: World) -> None:
    """Gives back what it hears, with its rank."""
    while True:
        about, tensors = world.broadcast()
        if about == "stop":
            return
        world.gather({"rank": world.rank, "heard": about}, {**tensors, "rank": torch.tensor(world.rank)})
        world.add_up(torch.arange(5) * (world.rank + 1))


def test_messages_between_processes() -> None:
    world = start_local(3, 1, echo)
    try:
        for about in ({"do": [1, 2.5, None]}, "text", 7):
            world.broadcast(about, EVERYTHING)
            answers = world.gather("mine")
            assert answers[0] == ("mine", {})
            for rank in (1, 2):
                said, tensors = answers[rank]
                assert said == {"rank": rank, "heard": about}
                assert_same_bits({**EVERYTHING, "rank": torch.tensor(rank)}, tensors)
            total = torch.arange(5)
            world.add_up(total)
            assert total.tolist() == [0, 6, 12, 18, 24]
        world.broadcast("stop")
    finally:
        world.close()
    assert not torch.distributed.is_initialized()


def test_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in this process and not in a forked one, which inherits the trap."""
    alone = snapshot(play(federation("fedlesam-s", threads=1), SCHEDULE[:3]))

    def trap(*_: Any, **__: Any) -> None:
        raise AssertionError("something is unpickled")

    for module, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, trap)
    with pytest.raises(AssertionError):
        torch.load(io.BytesIO())
    with federation("fedlesam-s", threads=1, workers=2) as several:
        assert_same_bits(alone, snapshot(play(several, SCHEDULE[:3])))


def test_no_world_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert from_environment() is None


def test_the_hook_for_exceptions_is_left_alone() -> None:
    import sys

    before = sys.excepthook
    world = start_local(2, 1, echo)
    after = sys.excepthook
    world.broadcast("stop")
    world.close()
    assert after is before
    world.close()
    assert all(not child.is_alive() for child in world.children)
    assert os.getpid() not in {child.pid for child in world.children}
