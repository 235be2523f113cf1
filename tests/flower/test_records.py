"""Our messages as Flower's records: nothing changes on the way, and nothing is believed."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedlesam.core.flat_model import FlatModel
from fedlesam.core.messages import Broadcast, ClientResult, Memory
from fedlesam.core.slots import LocalResult
from fedlesam.flower import records

pytestmark = pytest.mark.extras

SHAPES = st.lists(st.integers(0, 4), max_size=3)


@given(shape=SHAPES, dtype=st.sampled_from(sorted(records.DTYPES)), seed=st.integers(0, 99))
def test_a_tensor_comes_back_bit_for_bit(shape: list[int], dtype: str, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    sent = (torch.randn(shape, generator=draw) * 50).to(records.DTYPES[dtype])
    packed = records.array(sent)
    back = records.tensor(packed)
    assert len(packed.data) == sent.nbytes
    assert (back.shape, back.dtype) == (sent.shape, sent.dtype)
    assert torch.equal(back, sent)


def test_special_values_and_strides_survive() -> None:
    sent = torch.tensor([[float("nan"), -0.0], [float("inf"), 1e-45]]).T
    back = records.tensor(records.array(sent))
    assert torch.equal(back.view(torch.int32), sent.contiguous().view(torch.int32))


def test_flowers_own_arrays_are_read() -> None:
    sent = torch.randn(3, 2)
    assert torch.equal(records.tensor(Array(sent.numpy())), sent)


def npy(values: np.ndarray, **options: bool) -> bytes:
    file = io.BytesIO()
    np.save(file, values, **options)
    return file.getvalue()


def forged() -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"shape": (10**12,), "fortran_order": False, "descr": "<f4"})
    return file.getvalue() + b"1234"


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (Array("float32", (3,), records.RAW, b"1234"), "are not"),
        (Array("float32", (-1,), records.RAW, b""), "are not"),
        (Array("float32", (10**12,), records.RAW, b"1234"), "are not"),
        (Array("object", (1,), records.RAW, b"1234"), "dtype 'object'"),
        (Array("float32", (1,), "pickle", b"1234"), "serialisation 'pickle'"),
        (Array("float32", (1,), records.NUMPY, b"no npy at all"), "magic"),
        (Array("float32", (5,), records.NUMPY, npy(np.zeros(4, np.float32))), "it is said to be"),
        (Array("float32", (10**12,), records.NUMPY, forged()), "4 bytes are not"),
        (Array("int64", (1,), records.NUMPY, npy(np.array([{}], object), allow_pickle=True)), "object is not"),
    ],
    ids=["short", "negative", "huge", "object", "pickle", "no-npy", "other-shape", "forged-header", "pickled-npy"],
)
def test_what_is_not_an_array(array: Array, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        records.tensor(array)


def test_no_code_unpickles() -> None:
    import ast
    from pathlib import Path

    import fedlesam.flower

    for path in Path(fedlesam.flower.__file__).parent.glob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"pickle", "loads_pickle", "dill"}, path
        assert "import pickle" not in path.read_text()


# Orders and answers


def model() -> FlatModel:
    return FlatModel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))


def order(flat: FlatModel, **change: object) -> records.Order:
    w = torch.randn_like(flat.weights)
    sent = Broadcast(4, w, flat.buffers(), {"s": w + 1}, {"c": w + 2})
    values = {
        "ticket": "a" * 32,
        "used": "b" * 32,
        "seed": 7,
        "algorithm": "X",
        "name": "fedavg",
        "hyper": {"lr_g": 0.5},
    }
    return records.Order(sent, **{**values, **change})  # type: ignore[arg-type]


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def test_an_order_comes_back() -> None:
    flat = model()
    sent = order(flat)
    content = records.order_content(sent, records.arrays(sent.broadcast.flatten()), {"clipping_norm": 1.0})
    back = records.read_order(content, flat)
    assert records.payload(content) == sent.broadcast.nbytes, "the bytes of the cost ledger"
    assert content.config_records["config"]["clipping_norm"] == 1.0
    for name in ("ticket", "used", "seed", "algorithm", "name", "hyper", "as_model"):
        assert getattr(back, name) == getattr(sent, name)
    assert back.broadcast.round == 4
    assert same(back.broadcast.weights, sent.broadcast.weights)
    for slot in ("buffers", "perturbation", "correction"):
        left, right = getattr(back.broadcast, slot), getattr(sent.broadcast, slot)
        assert left.keys() == right.keys()
        assert all(same(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ticket": "../../etc/passwd"}, "32 hexadecimal"),
        ({"used": "x"}, "32 hexadecimal"),
        ({"seed": "7"}, "'seed' must"),
    ],
)
def test_orders_that_are_refused(change: dict[str, object], says: str) -> None:
    flat = model()
    sent = order(flat, **change)
    with pytest.raises(ValueError, match=says):
        records.read_order(records.order_content(sent, records.arrays(sent.broadcast.flatten()), {}), flat)


def test_another_model_is_refused() -> None:
    sent = order(model())
    content = records.order_content(sent, records.arrays(sent.broadcast.flatten()), {})
    with pytest.raises(ValueError, match="both apps must make the same model"):
        records.read_order(content, FlatModel(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="record 'arrays' is missing"):
        records.read_order(RecordDict({"config": ConfigRecord()}), model())


def answer(flat: FlatModel) -> ClientResult:
    d = torch.randn_like(flat.weights)
    return ClientResult(
        3, 11, LocalResult(d, 5, 0.1), 1.5, {"mu": d + 1}, {"change": d + 2}, flat.buffers(), Memory({"mu": d})
    )


def expected(flat: FlatModel) -> records.Expected:
    made = answer(flat)
    named = {"update": made.result.update, "perturbation/mu": flat.weights, "correction/change": flat.weights}
    named |= {f"buffers/{name}": value for name, value in made.buffers.items()}
    return records.Expected(flat, {name: (value.shape, value.dtype) for name, value in named.items()}, False)


def test_an_answer_comes_back_without_the_memory() -> None:
    flat = model()
    made = answer(flat)
    content = records.answer_content(made, True, flat.weights, None)
    back, lost = records.read_answer(content, 3, flat.weights, expected(flat))
    assert records.payload(content) == made.nbytes, "the bytes of the cost ledger"
    assert lost
    assert back.memory == Memory(), "it stays on the node"
    assert same(back.result.update, made.result.update)
    assert (back.result.steps, back.result.lr, back.examples, back.loss) == (5, 0.1, 11, 1.5)
    for slot in ("buffers", "perturbation", "correction"):
        left, right = getattr(back, slot), getattr(made, slot)
        assert left.keys() == right.keys()
        assert all(same(left[name], right[name]) for name in left)


def test_a_memory_comes_back() -> None:
    w = torch.randn(5)
    memory = Memory({"old": w, "mu": w}, {"c": w + 1})
    back = Memory.unflatten(records.tensors(records.arrays(memory.flatten())))
    assert same(back.perturbation["old"], w)
    assert same(back.perturbation["mu"], w)
    assert same(back.correction["c"], w + 1)
    assert Memory.unflatten(records.tensors(ArrayRecord())) == Memory()
