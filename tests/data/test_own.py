"""module:callable: what a user's function may return, and what is said when it returns something else."""

import sys
import types
from typing import Any

import pytest
import torch

from fedlesam.data import load
from fedlesam.data._check import check
from fedlesam.data.dataset import DataSet, Images

X = torch.randint(0, 256, (20, 3, 6, 6), dtype=torch.uint8)
Y = torch.arange(20) % 4
PART = Images(X, Y)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("my_data_for_tests")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def made(mine: types.ModuleType, value: Any) -> DataSet:
    mine.make = lambda: value  # type: ignore[attr-defined]
    return load("my_data_for_tests:make")


def test_bytes(mine: types.ModuleType) -> None:
    data = made(mine, ((X, Y.int()), (X[:5], Y[:5])))
    assert data.classes == ("0", "1", "2", "3")
    assert data.train.y.dtype == torch.int64
    normal = data.normalise(data.train.x)
    assert normal.mean().abs() < 1e-4
    assert data.fingerprint
    assert data.fingerprint != made(mine, ((X, Y), (X[:4], Y[:4]))).fingerprint
    assert check("my_data_for_tests:make").form == "python callable"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_floats_are_taken_as_they_are(mine: types.ModuleType, dtype: torch.dtype) -> None:
    x = torch.randn(20, 1, 4, 4).to(dtype)
    data = made(mine, [[x, Y], [x, Y]])
    assert torch.equal(data.normalise(data.train.x), x.float())
    assert torch.equal(data.shard(torch.arange(3)).tensors()[0], x[:3].float())


def test_a_data_set(mine: types.ModuleType) -> None:
    whole = DataSet("mine", PART, PART, ("a", "b", "c", "d"), (0.5,) * 3, (0.2,) * 3)
    data = made(mine, whole)
    assert data.name == "mine"
    assert data.fingerprint


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (None, "returned a NoneType; expected a DataSet or"),
        ((X, Y), "returned a tuple of 2 .Tensor, Tensor."),
        (((X, Y),), "returned a tuple of 1"),
        (((X.numpy(), Y), (X, Y)), "train x is a ndarray; expected a tensor"),
        (((X, Y), (X, Y.float())), "test is .*y torch.float32 .*; they must be alike"),
        (((X[:, 0], Y), (X, Y)), r"train is x torch.uint8 \(6, 6\).*they must be alike"),
        (((X, Y[:3]), (X, Y)), r"x has shape \(20, 3, 6, 6\) and y \(3,\); expected a row of both for each sample"),
        (((X[:0], Y[:0]), (X, Y)), "train has no samples"),
        (((X, Y - 1), (X, Y)), "label -1"),
        (((X, Y), (X, Y + 1)), "test: sample 3 has label 4"),
        (((X, Y), (X[:, :, :3], Y)), "they must be alike"),
        (((X, Y), (X.float(), Y)), "they must be alike"),
        (((X * float("nan"), Y), (X.float(), Y)), "not finite"),
        (DataSet("x", PART, PART, ("a",), (0.5,) * 3, (0.2,) * 3), "label 1, but the labels of 1 classes"),
        (DataSet("x", PART, PART, tuple("abcd"), (0.5,), (0.2,)), "expected 3 of each"),
        (DataSet("x", PART, PART, tuple("abcd"), (0.5,) * 3, (0.2, 0, 1)), "std above 0"),
        (DataSet("x", (X, Y), PART, tuple("abcd"), (0.5,) * 3, (0.2,) * 3), "expected Images"),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused(mine: types.ModuleType, value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        made(mine, value)


def test_not_there(mine: types.ModuleType) -> None:
    mine.number = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="has no 'absent'"):
        load("my_data_for_tests:absent")
    with pytest.raises(ValueError, match="is a int, not a callable"):
        load("my_data_for_tests:number")
    with pytest.raises(ValueError, match="cannot import"):
        load("no_such_module_for_tests:x")
