"""The embedded data set is scikit-learn's, parted once and for all."""

import numpy as np
import sklearn.datasets
import torch

from fedlesam.data import load


def test_the_digits_are_scikit_learns() -> None:
    theirs = sklearn.datasets.load_digits()
    ours = load("digits")
    x = torch.cat([ours.train.x, ours.test.x]).reshape(-1, 64).numpy()
    y = torch.cat([ours.train.y, ours.test.y]).numpy()
    assert x.dtype == np.uint8
    mine = sorted((label, tuple(map(int, row))) for label, row in zip(y.tolist(), x, strict=True))
    known = sorted((int(label), tuple(map(int, row))) for label, row in zip(theirs.target, theirs.data, strict=True))
    assert mine == known


def test_parts_and_sizes() -> None:
    data = load("digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.shape == (1, 8, 8)
    assert data.classes == tuple("0123456789")
    assert data.train.y.dtype == torch.int64
    assert data.train.y.bincount().min() > 120, "all classes in the training set"
    assert data.test.y.bincount().min() > 20
    assert data.augment is None
    assert data.fingerprint


def test_always_the_same_parts_whatever_the_global_seed() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = load("digits")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    other = load("digits")
    for part in ("train", "test"):
        for axis in "xy":
            assert torch.equal(getattr(getattr(one, part), axis), getattr(getattr(other, part), axis))
    assert one.fingerprint == other.fingerprint


def test_inputs_are_normalised() -> None:
    data = load("digits")
    x, y = data.shard(torch.arange(len(data.train))).tensors()
    assert x.dtype == torch.float32
    assert x.shape == (1437, 1, 8, 8)
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.std()) - 1) < 0.01
    raw = data.train.x[5, 0, 3, 3].item()
    assert abs(float(x[5, 0, 3, 3]) - (raw / 16 - 0.305) / 0.376) < 1e-6
    assert torch.equal(y, data.train.y)


def test_a_shard_has_its_own_samples() -> None:
    data = load("digits")
    shard = data.shard(torch.tensor([7, 3]))
    x, y = shard.tensors()
    everything, labels = data.shard(torch.arange(10)).tensors()
    assert len(shard) == 2
    assert torch.equal(x, everything[[7, 3]])
    assert torch.equal(y, labels[[7, 3]])
    assert torch.equal(shard.labels(), y)
    assert len(data.test_shard()) == 360
    assert torch.equal(data.test_shard().labels(), data.test.y)
