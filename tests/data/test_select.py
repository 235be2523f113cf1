"""Fewer training samples, and training samples held out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlesam.data import dataset, load
from fedlesam.runs.build import load_data
from fedlesam.runs.config import RunConfig


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_every_beginning_of_the_order_has_the_classes_in_proportion(labels: list[int], data: st.DataObject) -> None:
    y = np.array(labels)
    order = dataset._order(y)
    assert sorted(order) == list(range(len(y)))
    n = data.draw(st.integers(0, len(y)))
    for label in set(labels):
        share = (y == label).sum() * n / len(y)
        assert abs((y[order[:n]] == label).sum() - share) <= len(set(labels))


def test_the_same_samples_whatever_else_is_asked_for() -> None:
    """What is held out does not depend on how many are trained on, and nobody gets a sample twice."""
    whole = load("digits")
    some, more = dataset.select(whole, 300, 0.2), dataset.select(whole, 1000, 0.2)
    rows = lambda images: {(x.numpy().tobytes(), int(y)) for x, y in zip(images.x, images.y, strict=True)}  # noqa: E731
    assert len(some.train) == 300 and len(more.train) == 1000 and len(some.test) == round(0.2 * 1437)
    assert rows(some.test) == rows(more.test)
    assert rows(some.train) < rows(more.train)
    assert not rows(some.test) & rows(more.train), "the digits have no two equal pictures"
    assert not rows(some.test) & rows(whole.test)
    assert rows(some.test) | rows(dataset.select(whole, None, 0.2).train) == rows(whole.train)


def test_fewer_samples_keep_the_test_data() -> None:
    whole, some = load("digits"), load_data(RunConfig(samples=100))
    assert some.test is not None and len(some.test) == len(whole.test)
    assert some.fingerprint != whole.fingerprint, "a saved split must know which samples it divides"
    counts = np.bincount(some.train.y.numpy(), minlength=10)
    assert counts.min() >= 9 and counts.max() <= 11


@pytest.mark.parametrize(
    ("samples", "held_out", "why"),
    [
        (1438, None, "1,438 training samples were asked for, it has 1,437"),
        (0, None, "0 training samples"),
        (1300, 200, "it has 1,237 beside the 200 held out"),
        (None, 1437, "expected a count from 1 to 1,436"),
        (None, 0, "--held-out 0"),
        (None, 1.5, "--held-out 1.5"),
        (None, 0.0001, "--held-out 0.0001"),
    ],
)
def test_what_cannot_be(samples: int | None, held_out: float | None, why: str) -> None:
    with pytest.raises(ValueError) as error:
        dataset.select(load("digits"), samples, held_out)
    assert why in str(error.value)
