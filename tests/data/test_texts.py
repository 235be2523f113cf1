"""Texts with classes: what is stripped, the vocabulary, both layouts, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_files import write_lines

from fedlesam.data import count_words, encode, load
from fedlesam.data._check import check
from fedlesam.data.formats.texts import strip_post
from fedlesam.data.splits import make_split

POST = """From: a@b.org (Somebody)
Subject: Re: hockey
Organization: The Hockey League

Archive-name: hockey/faq
Version: 1.0

In article <1@b.org> c@d.org writes:
> the old goalie
: another quote
I saw the game.

    An indented line stays: really.
c@d.org (Other) wrote:
Yes!
--
Somebody, rec.sport.hockey
"""


def test_a_post_without_what_gives_it_away() -> None:
    assert strip_post(POST).split() == [
        "I",
        "saw",
        "the",
        "game.",
        "An",
        "indented",
        "line",
        "stays:",
        "really.",
        "Yes!",
    ]
    assert strip_post("From: x\nSubject: all header") == ""


def test_the_vocabulary_is_of_the_training_texts_alone() -> None:
    """Words by the number of texts that have them, then by letter."""
    vocabulary = count_words(["b b b b a", "A c!", "c, a"], words=5)
    assert vocabulary == ("<padding>", "<unknown>", "a", "c", "!")
    rows = encode(["A B c", "", "zebra c! a a"], vocabulary, length=4)
    assert rows.dtype == np.int32
    assert rows.tolist() == [[2, 1, 3, 0], [1, 0, 0, 0], [1, 3, 4, 2]]


ROWS: list[dict[str, Any]] = [
    {"text": "what a good film", "label": "positive", "client": "ann"},
    {"text": "what a bad film", "label": 0, "client": "bob"},
    {"text": "good, good!", "label": 1, "client": "ann"},
]


def test_lines_with_clients(tmp_path: Path) -> None:
    write_lines(tmp_path / "sst2" / "train.jsonl.gz", ROWS)
    write_lines(tmp_path / "sst2" / "test.jsonl.gz", [{"text": "zebra good", "label": 1, "client": "bob"}])
    data = load("sst2:length=4", tmp_path)
    split = make_split("natural", data, None, 0)
    assert data.classes == ("negative", "positive")
    assert data.train.y.tolist() == [1, 0, 1]
    assert "zebra" not in data.vocabulary
    assert [[data.vocabulary[i] for i in row] for row in data.test.x.tolist()] == [
        ["<unknown>", "good", "<padding>", "<padding>"]
    ]
    assert [part.tolist() for part in split] == [[0, 2], [1]]
    assert [part.tolist() for part in split.tests or []] == [[], [0]]
    text = "\n".join(check("sst2:length=4", tmp_path).lines())
    assert "3 training and 1 test samples, 2 classes, 4" in text
    assert "vocabulary: 8 tokens, 4 of a sample are read" in text


def test_ones_own_texts_bring_their_classes(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"text": "a b", "label": "x"}, {"text": "c", "label": "w"}])
    write_lines(tmp_path / "test.jsonl", [{"text": "c", "label": "x"}])
    data = load(f"texts:{tmp_path},words=3")
    assert (data.classes, data.vocabulary[2:], data.owners) == (("w", "x"), ("a",), None)
    before = data.fingerprint
    (tmp_path / "classes.txt").write_text("x\nw\nv\n")
    data = load(f"texts:{tmp_path},words=3")
    assert (data.classes, data.train.y.tolist()) == (("x", "w", "v"), [0, 1])
    assert data.fingerprint != before


def test_folders_of_texts(tmp_path: Path) -> None:
    """As 20 newsgroups are published."""
    for part, number in (("train", 3), ("test", 1)):
        for group in ("alt.atheism", "sci.space"):
            folder = tmp_path / "20news-bydate" / f"20news-bydate-{part}" / group
            folder.mkdir(parents=True)
            for i in range(number):
                (folder / str(i)).write_bytes(f"From: x\nNewsgroups: {group}\n\nnumber \xe9 {i}\n".encode("latin-1"))
    data = load("20newsgroups", tmp_path)
    assert data.train.y.tolist() == [0] * 3 + [14] * 3
    assert not {"newsgroups", "atheism", "from"} & set(data.vocabulary)
    assert torch.equal(data.train.x[:3], data.train.x[3:])


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([{"text": "a", "label": 2}], r"line 1: unknown label 2; the 2 classes are negative, positive \(0 to 1\)"),
        ([{"text": "a", "label": "fine"}], "unknown label 'fine'"),
        ([{"text": "a", "label": -1}], "unknown label -1"),
        ([{"text": "a"}], "'label' must be a class number or a class name, and is None"),
        ([{"text": 3, "label": 1}], "line 1: 'text' must be a text, and is 3"),
        ([{"label": 1}], "'text' must be a text, and is missing; it has label"),
        ([{"text": "a", "label": 1, "client": "c"}, {"text": "a", "label": 1}], "line 2: has no 'client'"),
        ([{"text": "a", "label": 1, "client": []}], "'client' must be a text or a whole number"),
        ([{"text": "...", "label": 1}], "the training texts have no word"),
        ([], "there are no train texts"),
    ],
)
def test_bad_texts(rows: list[Any], match: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", rows)
    write_lines(tmp_path / "test.jsonl", [{"text": "a", "label": 0}])
    with pytest.raises(ValueError, match=match):
        load("sst2", tmp_path)


def test_missing_texts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sst2: not found in .*; put train\.jsonl\.gz and test\.jsonl\.gz .* into"):
        load("sst2", tmp_path)
    write_lines(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"is incomplete: missing .*test\.jsonl"):
        load(f"texts:{tmp_path}")
