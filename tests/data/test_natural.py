"""Data sets with clients of their own: speaking roles, writers, LEAF's users."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from text_files import speeches, write_leaf, write_lines, write_roles, write_writers

from fedlesam.data import load
from fedlesam.data._check import check
from fedlesam.data._schemes import natural
from fedlesam.data.dataset import DataSet, Images, Owners, select
from fedlesam.data.download import fetch
from fedlesam.data.formats.shakespeare import VOCABULARY, places
from fedlesam.data.splits import load_split, make_split, save_split


def letters(data: DataSet, row: torch.Tensor) -> str:
    return "".join(data.vocabulary[token] for token in row.tolist())


# Shakespeare


def test_samples_are_80_characters_and_the_next_one(tmp_path: Path) -> None:
    """Against LEAF's rule, on strings: windows of the text with spaces for line breaks, cut by position."""
    write_roles(tmp_path, {"HAMLET": 30, "OPHELIA": 14, "GHOST": 3})
    data = load("shakespeare:stride=7", tmp_path)
    assert data.owners is not None
    assert data.owners.test is not None
    assert data.owners.names == ("Hamlet: HAMLET", "Hamlet: OPHELIA")  # the ghost has fewer than 1,000 characters
    assert data.train.x.dtype == torch.int32
    for number, (seed, count) in enumerate(((0, 30), (1, 14))):
        text = " ".join(speeches(seed, count)).replace("\n", " ")
        samples = len(text) - 80
        trained = int(0.8 * samples)
        wanted = {"train": range(0, trained, 7), "test": range(trained + 79, samples, 7)}
        for part, of in (("train", data.owners.of), ("test", data.owners.test)):
            images = getattr(data, part)
            mine = np.flatnonzero(of == number)
            said = [(letters(data, images.x[i]), data.classes[int(images.y[i])]) for i in mine]
            assert said == [(text[i : i + 80], text[i + 80]) for i in wanted[part]]


@given(st.integers(0, 3000), st.integers(1, 100))
def test_no_test_character_was_trained_on(characters: int, stride: int) -> None:
    """Neither as a target nor inside a sample, but for the one before the first test sample's end."""
    train, test = places(characters, stride)
    if len(train) and len(test):
        assert train[-1] + 80 <= test[0]
        assert test[-1] + 80 < characters
    assert all(start + 80 < characters for start in train)


def test_other_characters_are_one(tmp_path: Path) -> None:
    write_lines(tmp_path / "roles.jsonl", [{"play": "P", "role": "R", "speeches": ["naïve £ " * 200]}])
    data = load("shakespeare", tmp_path)
    assert set(letters(data, data.train.x[0])) == set("nave �")
    assert data.tokens == len(data.classes) == 81


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "of 0 roles none has"),
        (b'{"play": "P", "role": "R"', "line 1: is not JSON"),
        (b"[1]\n", "line 1: is a list, and an object"),
        (b'{"play": "P", "speeches": []}', "line 1: 'role' must be a text, and is missing"),
        (b'\n{"play": "P", "role": " ", "speeches": []}', "line 2: the role has no name"),
        (b'{"play": "P", "role": "R", "speeches": "x"}', "'speeches' must be a list of texts"),
        (b'{"play": "P", "role": "R", "speeches": []}', "of 1 roles none has 1,000 characters"),
    ],
)
def test_bad_roles(content: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / "roles.jsonl.gz").write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=match):
        load("shakespeare", tmp_path)


def test_a_damaged_archive_of_roles(tmp_path: Path) -> None:
    (tmp_path / "roles.jsonl.gz").write_bytes(b"\x1f\x8b\x08 not gzip at all")
    with pytest.raises(ValueError, match=r"truncated or damaged .*; get it again"):
        load("shakespeare", tmp_path)


def test_missing_files_and_bad_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"put roles\.jsonl\.gz .* into .*shakespeare"):
        load("shakespeare", tmp_path)
    with pytest.raises(ValueError, match="unknown option 'size'; shakespeare takes stride, least"):
        load("shakespeare:size=3", tmp_path)
    with pytest.raises(ValueError, match="stride must be a whole number from 1 to 1,000,000, got '0'"):
        load("shakespeare:stride=0", tmp_path)
    with pytest.raises(ValueError, match="is not downloaded"):
        fetch("shakespeare", tmp_path)


# the split


def test_natural_clients_have_their_samples_and_their_test_samples(tmp_path: Path) -> None:
    write_roles(tmp_path, {"HAMLET": 30, "OPHELIA": 14})
    data = load("shakespeare:stride=7", tmp_path)
    assert data.owners is not None
    split = make_split("natural", data, None, 0)
    assert split.scheme == "natural"
    assert split.tests is not None
    for number, (own, test) in enumerate(zip(split, split.tests, strict=True)):
        assert (data.owners.of[own] == number).all()
        assert (data.owners.test[test] == number).all()
    assert sum(map(len, split.tests)) == len(data.test)
    save_split(split, data, tmp_path / "s.safetensors")
    again = load_split(tmp_path / "s.safetensors", data)
    assert again.hash == split.hash
    assert again.tests is not None
    assert all(np.array_equal(*pair) for pair in zip(again.tests, split.tests, strict=True))


def test_clients_without_samples_are_none() -> None:
    owners = Owners(("a", "b", "c"), np.array([2, 0, 2]), np.array([1, 2, -1, 0, 2]))
    split = natural(owners)
    assert [part.tolist() for part in split] == [[1], [0, 2]]
    assert [part.tolist() for part in split.tests or []] == [[3], [1, 4]]


def test_natural_needs_owners_and_takes_no_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split natural: digits has no clients of its own"):
        make_split("natural", load("digits"), None, 0)
    write_roles(tmp_path, {"HAMLET": 30})
    with pytest.raises(ValueError, match="split natural: has 1 clients, not 5; leave the number out"):
        make_split("natural", load("shakespeare", tmp_path), 5, 0)


def test_fewer_samples_and_samples_held_out_keep_their_owners() -> None:
    numbers = torch.arange(60)
    images = Images(numbers[:, None], numbers % 3)
    owners = Owners(("a", "b"), numbers.numpy() % 2, np.full(60, -1))
    whole = DataSet("mine", images, images, ("x", "y", "z"), (), (), owners=owners)
    part = select(whole, 30, 0.2).owners
    held = select(whole, 30, 0.2)
    assert part is not None
    assert part.test is not None
    assert part.of.tolist() == (held.train.x[:, 0] % 2).tolist()
    assert part.test.tolist() == (held.test.x[:, 0] % 2).tolist()
    fewer = select(whole, 30, None).owners
    assert fewer is not None
    assert fewer.test is owners.test


# writers


def test_writers_are_clients(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = [(digit, 100 + digit % 3) for digit in range(10)] * 2
    write_writers(tmp_path / "mnist_writers", rows, [(1, 7), (2, 8)])
    data = load("mnist-writers", tmp_path)
    split = make_split("natural", data, None, 0)
    assert data.owners is not None
    assert data.owners.names == ("writer 100", "writer 101", "writer 102")
    assert split.sizes.tolist() == [8, 6, 6]
    assert split.tests is None, "the test pictures are of other writers"
    assert [int(x[0, 0, 0]) // 20 for x in data.train.x] == data.train.y.tolist()
    text = "\n".join(check("mnist-writers", tmp_path).lines())
    assert "clients: 3, 6 to 8 training samples" in text
    assert "the test samples are of others than the clients" in text


def test_bad_writers(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = [(digit, None if digit == 3 else 1) for digit in range(10)]
    write_writers(tmp_path, rows, rows)
    with pytest.raises(ValueError, match="column 'writer' is empty in 1 rows; every sample needs a client"):
        load("mnist-writers", tmp_path)
    write_writers(tmp_path, rows, rows, column="who")
    with pytest.raises(ValueError, match=r"has no column 'writer'; its columns are img, label, who"):
        load("mnist-writers", tmp_path)
    (tmp_path / "test.parquet").unlink()
    with pytest.raises(ValueError, match=r"is incomplete: missing .*test\.parquet"):
        load("mnist-writers", tmp_path)


# LEAF


def pictures(*labels: int) -> dict[str, Any]:
    return {"x": [[label / 255] * 784 for label in labels], "y": list(labels)}


def test_femnist_in_leafs_layout(tmp_path: Path) -> None:
    train = {"w2": pictures(61, 3), "w1": pictures(0, 1, 2), "w3": pictures(5), "empty": {"x": [], "y": []}}
    write_leaf(tmp_path / "femnist" / "data", train, {"w1": pictures(9), "stranger": pictures(8)})
    data = load("femnist", tmp_path)
    split = make_split("natural", data, None, 0)
    assert data.owners is not None
    assert (data.shape, len(data.classes), data.owners.names) == ((1, 28, 28), 62, ("w1", "w2", "w3"))
    assert [data.train.y[part].tolist() for part in split] == [[0, 1, 2], [61, 3], [5]]
    assert torch.equal(data.train.x[:, 0, 0, 0].long(), data.train.y)
    assert [data.test.y[part].tolist() for part in split.tests or []] == [[9], [], []]
    assert torch.equal(load(f"leaf:{tmp_path}/femnist/data", None).train.x, data.train.x)


def test_leafs_other_kinds(tmp_path: Path) -> None:
    """Its characters are those of the data set shakespeare; other rows stay numbers."""
    write_leaf(tmp_path / "a", {"u": {"x": ["To be", "o be,"], "y": [",", " "]}}, {"u": {"x": ["be, o"], "y": ["r"]}})
    data = load(f"leaf:{tmp_path / 'a'}")
    assert [letters(data, row) for row in data.train.x] == ["To be", "o be,"]
    assert [data.classes[y] for y in data.train.y.tolist()] == [",", " "]
    write_leaf(tmp_path / "b", {"u": {"x": [[0.5, 2.0]], "y": [1]}}, {"v": {"x": [[1.0, 3.0]], "y": [0]}})
    data = load(f"leaf:{tmp_path / 'b'}")
    assert data.train.x.tolist() == [[0.5, 2.0]]
    assert data.tokens == 0
    assert make_split("natural", data, None, 0).tests is None


@pytest.mark.parametrize(
    ("user", "match"),
    [
        ({"x": [[0.0] * 784], "y": [62]}, "sample 0 has label 62, but the labels of 62 classes are 0 to 61"),
        ({"x": [[0.0] * 784], "y": []}, "user 'u': has 1 samples and 0 labels"),
        ({"x": [[2.0] * 784], "y": [1]}, "a picture's values are from 0 to 1, got 2 to 2"),
        ({"x": [[0.0], [0.0, 1.0]], "y": [1, 1]}, "a sample must be a row of numbers or a text"),
        ({"x": [[0.0] * 784], "y": [1.5]}, "a label must be a class number, or one character"),
        ({"x": []}, r"expected \{x: \[...\], y: \[...\]\}"),
        ({"x": [], "y": []}, "no user has a sample"),
        ({"x": ["ab", "abc"], "y": ["d", "e"]}, "its texts have several lengths"),
        ({"x": [""], "y": ["d"]}, "user 'u': its texts are empty"),
        ({"x": [[]], "y": [0]}, "a sample must be a row of finite numbers"),
        ({"x": [[10**400]], "y": [0]}, "a sample must be a row of numbers or a text"),
        ({"x": [[0.0]], "y": [2**70]}, "has the label 1180591620717411303424, and class numbers are from 0 to 999,999"),
        ({"x": [[0.0]], "y": [-1]}, "has the label -1, and class numbers"),
    ],
)
def test_bad_leaf(user: Any, match: str, tmp_path: Path) -> None:
    root = tmp_path / "train"
    root.mkdir()
    (tmp_path / "test").mkdir()
    for part in ("train", "test"):
        (tmp_path / part / "a.json").write_text(json.dumps({"users": ["u"], "user_data": {"u": user}}))
    with pytest.raises(ValueError, match=match):
        load("femnist", tmp_path) if "62" in match else load(f"leaf:{tmp_path}")


def test_labels_of_leaf_are_of_one_kind(tmp_path: Path) -> None:
    letters, numbers = {"x": ["To be", "o be,"], "y": [",", " "]}, {"x": ["be, o", "e, or"], "y": [0, 1]}
    write_leaf(tmp_path / "a", {"u": letters, "v": numbers}, {"u": letters})
    with pytest.raises(ValueError, match=r"user 'v': its labels are class numbers, those of 'u' characters; give"):
        load(f"leaf:{tmp_path / 'a'}")
    write_leaf(tmp_path / "b", {"u": letters}, {"u": numbers})
    with pytest.raises(ValueError, match=r"its labels are class numbers, those of .* characters"):
        load(f"leaf:{tmp_path / 'b'}")
    write_leaf(tmp_path / "c", {"u": numbers}, {"u": numbers})
    data = load(f"leaf:{tmp_path / 'c'}")
    assert data.classes == ("0", "1") and data.tokens == len(VOCABULARY)


def test_leaf_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"leaf:.*: not found in .*; put train/\*\.json"):
        load(f"leaf:{tmp_path}")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.json").write_text('{"users": ["u"]')
    with pytest.raises(ValueError, match=r"is incomplete: missing .*test/\*\.json"):
        load(f"leaf:{tmp_path}")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json: is not JSON"):
        load(f"leaf:{tmp_path}")
    (tmp_path / "train" / "a.json").write_text('{"users": ["u"]}')
    with pytest.raises(ValueError, match=r"a\.json: is not LEAF's"):
        load(f"leaf:{tmp_path}")
    with pytest.raises(ValueError, match="expected leaf:PATH"):
        load("leaf:")
