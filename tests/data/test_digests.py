"""The same bits as ever: a change of any digest here changes the results of every run that is repeated."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from data_files import images, write_binary, write_python
from domain_files import write_domains

from fedlesam.data import DataSet, Split, load, split

DIGITS = load("digits")

SPLITS = {
    ("iid", 40): ("4c87b0ab45f30668", "75f86f17d0193e14", "2b438b7c3ef8d5f0"),
    ("pooled", 1): ("195a97183d8d56bd", "195a97183d8d56bd", "195a97183d8d56bd"),
    ("dirichlet:0.1", 40): ("71c7f0afab5ab198", "b7762da76509c472", "6085cbbc47cffc80"),
    ("dirichlet:0.6,repeat", 40): ("0f279422bd688321", "c6552dd41bde77cc", "82b1eac7b47bbe9e"),
    ("dirichlet:1e-3", 5): ("6777b3626723cc21", "37143f83635ba03b", "a8a059aca0ab4d5c"),
    ("dirichlet-by-class:0.3", 40): ("dafad50dbfc65c94", "a6fba0f7671069e1", "62935fec4aea9345"),
    ("pathological:2", 40): ("4b582c9a58a71218", "a576f2b3c2d9bc6f", "c73f48fb9f7d3fb0"),
    ("pathological:3,repeat", 40): ("9f862c166bf88c69", "9d465c7d767d25d3", "6090c23cb8d2adc3"),
}
"""The beginnings of the hashes of seeds 0, 1 and 7."""

CIFAR = {
    "cifar10": "17a6f14302e58564a999fa0f3e8571bb97a6e82b9ca65959e8c9e981e29e69ba",
    "cifar100": "d31d24e55036100abefb0bed713377c303379df4fb5c7f85ecadee417c345491",
}
"""Of the small archives that the tests make."""


def start(made: Split) -> str:
    return made.hash[:16]


@pytest.mark.parametrize(("spec", "clients"), SPLITS)
def test_splits(spec: str, clients: int) -> None:
    for labels in (DIGITS, DIGITS.train.y, DIGITS.train.y.tolist(), DIGITS.train.y.numpy().astype(np.int32)):
        found = [start(split(spec, labels, clients, seed)) for seed in (0, 1, 7)]
        assert found == list(SPLITS[spec, clients])


def test_leave_out(tmp_path: Path) -> None:
    data = load(f"domains:{write_domains(tmp_path)},size=12")
    found = [start(split("leave-out:ink,2", data, seed=seed)) for seed in (0, 1, 7)]
    assert found == ["3b5478afd080850d", "bddb3c1b691b3196", "053d63185413694c"]


@pytest.mark.parametrize("name", CIFAR)
@pytest.mark.parametrize("write", [write_python, write_binary])
def test_cifar(name: str, write: object, tmp_path: Path) -> None:
    write(tmp_path, images(name), packed=True)  # type: ignore[operator]
    assert load(name, tmp_path).fingerprint == CIFAR[name]


def digest(data: DataSet) -> str:
    total = hashlib.sha256()
    for part in (data.train, data.test):
        total.update(part.x.numpy().tobytes())
        total.update(part.y.numpy().tobytes())
    total.update(data.normalise(data.train.x).numpy().tobytes())
    return total.hexdigest()


def test_digits() -> None:
    assert digest(DIGITS) == "f4f33342c11598756ad1e049ae17c3b74f4fd1bfdbcad17b64d7242931cdc501"
