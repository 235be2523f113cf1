"""Every split ends, is what it says it is, and counts itself right."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedlesam.data import _schemes
from fedlesam.data._schemes import Split

Labels = NDArray[np.int64]
BETAS = st.floats(-4, 4).map(lambda power: 10.0**power)
SUPPLIES = st.lists(st.one_of(st.integers(0, 30), st.sampled_from([0, 1, 300])), min_size=1, max_size=8).filter(any)
"""Samples of each class number: one class, missing numbers, very unequal ones."""


def labels_of(supply: list[int], seed: int = 0) -> Labels:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(supply)), supply))


def draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def check(split: Split, labels: Labels, clients: int, *, equal: bool, repeat: bool) -> None:
    """What holds for every scheme, counted one by one."""
    assert len(split.clients) == clients
    assert split.samples == len(labels)
    given_out: Counter[int] = Counter()
    for part in split.clients:
        assert part.dtype == np.int64
        assert len(part) >= 1
        given_out.update(part.tolist())
    assert min(given_out) >= 0
    assert max(given_out) < len(labels)
    assert split.sizes.tolist() == [len(part) for part in split.clients]
    assert split.dropped == sum(1 for i in range(len(labels)) if i not in given_out)
    assert split.repeats == sum(times - 1 for times in given_out.values())
    if equal:
        assert len(set(split.sizes.tolist())) == 1
    if not repeat:
        assert split.repeats == 0
        assert max(given_out.values()) == 1


def refilled_only_when_used_up(split: Split, labels: Labels) -> bool:
    """No sample of a class is given k + 1 times before all of its class were given k times, at every client's turn."""
    times = np.zeros(len(labels), dtype=int)
    for part in split.clients:
        np.add.at(times, part, 1)
        for c in np.unique(labels):
            of_class = times[labels == c]
            if of_class.max() - of_class.min() > 1:
                return False
    return True


@given(supply=SUPPLIES, share=st.floats(0, 1), beta=BETAS, repeat=st.booleans(), seed=st.integers(0, 99))
@example(supply=[300], share=1.0, beta=1e-4, repeat=False, seed=0)
@example(supply=[1, 0, 300], share=1.0, beta=1e-4, repeat=False, seed=0)
@example(supply=[300, 1, 1], share=0.0, beta=1e4, repeat=True, seed=0)
@settings(max_examples=150)
def test_dirichlet_has_equal_sizes(supply: list[int], share: float, beta: float, repeat: bool, seed: int) -> None:
    labels = labels_of(supply)
    clients = max(1, int(share * len(labels)))
    split = _schemes.dirichlet(labels, clients, draw(seed), beta=beta, repeat=repeat)
    check(split, labels, clients, equal=True, repeat=repeat)
    assert split.sizes[0] == len(labels) // clients
    assert split.drawn is not None
    assert np.allclose(split.drawn.sum(1), 1)
    assert (split.drawn[:, np.bincount(labels) == 0] == 0).all()
    if repeat:
        assert refilled_only_when_used_up(split, labels)
    else:
        assert split.dropped == len(labels) - clients * (len(labels) // clients)


@given(supply=SUPPLIES, share=st.floats(0, 1), beta=BETAS, seed=st.integers(0, 99))
@example(supply=[300], share=1.0, beta=1e-4, seed=0)
@example(supply=[1, 0, 300], share=1.0, beta=1e-4, seed=0)
@settings(max_examples=150)
def test_dirichlet_by_class_gives_everything_out(supply: list[int], share: float, beta: float, seed: int) -> None:
    labels = labels_of(supply)
    clients = max(1, int(share * len(labels)))
    split = _schemes.dirichlet_by_class(labels, clients, draw(seed), beta=beta)
    check(split, labels, clients, equal=False, repeat=False)
    assert split.dropped == 0
    assert split.deviation(labels) is None


@given(supply=SUPPLIES, clients=st.integers(1, 40), a=st.integers(1, 8), repeat=st.booleans(), seed=st.integers(0, 99))
@example(supply=[6, 3, 3], clients=6, a=2, repeat=False, seed=0)
@example(supply=[300, 1, 1], clients=10, a=2, repeat=False, seed=0)
@settings(max_examples=300)
def test_pathological_has_exactly_a_classes(supply: list[int], clients: int, a: int, repeat: bool, seed: int) -> None:
    labels = labels_of(supply)
    present = sum(n > 0 for n in supply)
    assume(a <= present)
    # Gale and Ryser: every client can have `a` different classes exactly when the classes have room for all of them
    possible = sum(min(n, clients) for n in supply) >= a * clients
    if not (repeat or possible):
        with pytest.raises(ValueError, match=f"cannot serve {clients} clients") as refusal:
            _schemes.pathological(labels, clients, draw(seed), a=a)
        assert f"pathological:{a},repeat" in str(refusal.value)
        most = int(re.search(r"at most (\d+) clients", str(refusal.value))[1])  # type: ignore[index]
        assert 1 <= most < clients
        assert _schemes.pathological(labels, most, draw(seed), a=a).dropped >= 0
        with pytest.raises(ValueError, match="cannot serve"):
            _schemes.pathological(labels, most + 1, draw(seed), a=a)
        return
    split = _schemes.pathological(labels, clients, draw(seed), a=a, repeat=repeat)
    check(split, labels, clients, equal=True, repeat=repeat)
    for part in split.clients:
        held = Counter(labels[part].tolist())
        assert len(held) == a
        assert len(set(held.values())) == 1
    if repeat:
        assert refilled_only_when_used_up(split, labels)
    assert split.deviation(labels) is None


def test_pathological_uses_what_there_is() -> None:
    labels = labels_of([100] * 10)
    split = _schemes.pathological(labels, 20, draw(), a=3)
    assert split.dropped <= 100, "balanced classes leave little over"


@given(supply=SUPPLIES, share=st.floats(0, 1), seed=st.integers(0, 99))
@settings(max_examples=50)
def test_iid_has_equal_sizes(supply: list[int], share: float, seed: int) -> None:
    labels = labels_of(supply)
    clients = max(1, int(share * len(labels)))
    split = _schemes.iid(labels, clients, draw(seed))
    check(split, labels, clients, equal=True, repeat=False)
    assert split.sizes[0] == len(labels) // clients
    assert split.dropped == len(labels) % clients


def test_iid_mixes_a_sorted_data_set() -> None:
    labels = np.repeat(np.arange(10), 500)
    counts = _schemes.iid(labels, 5, draw()).class_counts(labels, 10)
    assert counts.min() > 60
    assert counts.max() < 140, "100 of each class are expected, with a standard deviation of 9"


@pytest.mark.parametrize("beta", [1e-4, 0.1, 1e4])
@pytest.mark.parametrize("repeat", [False, True])
def test_ten_thousand_clients_by_dirichlet(beta: float, repeat: bool) -> None:
    labels = labels_of([5000, 3000, 0, 2000, 1000, 900, 99, 1])
    split = _schemes.dirichlet(labels, 10_000, draw(), beta=beta, repeat=repeat)
    check(split, labels, 10_000, equal=True, repeat=repeat)


def test_ten_thousand_clients_by_the_other_schemes() -> None:
    labels = labels_of([5000, 3000, 0, 2000, 1000, 900, 99, 1])
    check(_schemes.iid(labels, 10_000, draw()), labels, 10_000, equal=True, repeat=False)
    for beta in (1e-4, 1e4):
        split = _schemes.dirichlet_by_class(labels, 10_000, draw(), beta=beta)
        check(split, labels, 10_000, equal=False, repeat=False)
    check(_schemes.pathological(labels, 10_000, draw(), a=1), labels, 10_000, equal=True, repeat=False)
    check(_schemes.pathological(labels, 10_000, draw(), a=3, repeat=True), labels, 10_000, equal=True, repeat=True)
    with pytest.raises(ValueError, match="cannot serve 10000 clients"):
        _schemes.pathological(labels, 10_000, draw(), a=3)


@given(seed=st.integers(0, 99), clients=st.integers(2, 12))
@settings(max_examples=40)
def test_proportions_yield_only_where_a_class_is_used_up(seed: int, clients: int) -> None:
    """At a tiny beta every client wants one class: it gets nothing else as long as there is enough of it."""
    labels = labels_of([120] * 4)
    split = _schemes.dirichlet(labels, clients, draw(seed), beta=1e-4)
    assert split.drawn is not None
    assert split.drawn.max(1).min() > 0.999
    favourite, size = split.drawn.argmax(1), len(labels) // clients
    counts = split.class_counts(labels, 4)
    for c in range(4):
        wanting = np.flatnonzero(favourite == c)
        if len(wanting) * size <= 110:  # some room for a stray sample of a client whose draw was not quite 0 elsewhere
            assert (counts[wanting, c] == size).all()
        elif len(wanting) * size >= 120:
            assert counts[wanting, c].sum() >= 118, "used up by those who want it"


@pytest.mark.parametrize("repeat", [False, True])
def test_handed_out_proportions_are_the_drawn_ones(repeat: bool) -> None:
    """Where the supply allows: at a large beta (equal classes, equal wishes), and always with repeats."""
    labels = labels_of([2000] * 5)
    split = _schemes.dirichlet(labels, 5, draw(3), beta=1e4 if not repeat else 0.5, repeat=repeat)
    assert split.drawn is not None
    wanted = split.drawn * 2000
    noise = np.sqrt(wanted * (1 - split.drawn)) + 1
    assert (np.abs(split.class_counts(labels, 5) - wanted) < 6 * noise).all()


@given(supply=SUPPLIES, clients=st.integers(1, 9), beta=BETAS, repeat=st.booleans())
@settings(max_examples=40)
def test_deviation_counts_right(supply: list[int], clients: int, beta: float, repeat: bool) -> None:
    labels = labels_of(supply)
    assume(clients <= len(labels))
    split = _schemes.dirichlet(labels, clients, draw(1), beta=beta, repeat=repeat)
    assert split.drawn is not None
    total = 0.0
    for part, row in zip(split.clients, split.drawn, strict=True):
        held = Counter(labels[part].tolist())
        total += sum(abs(held[c] / len(part) - float(p)) for c, p in enumerate(row)) / 2
    assert split.deviation(labels) == pytest.approx(total / clients, abs=1e-12)


@pytest.mark.parametrize("beta", [0.05, 0.5, 5.0])
def test_drawn_proportions_have_dirichlets_moments(beta: float) -> None:
    """Mean 1 / C, variance (1 / C)(1 - 1 / C) / (C beta + 1)."""
    classes, clients = 8, 4000
    drawn = _schemes.dirichlet(labels_of([500] * classes), clients, draw(5), beta=beta).drawn
    assert drawn is not None
    variance = (1 / classes) * (1 - 1 / classes) / (classes * beta + 1)
    assert np.abs(drawn.mean(0) - 1 / classes).max() < 5 * np.sqrt(variance / clients)
    assert drawn.var(0).mean() == pytest.approx(variance, rel=0.08)


def test_the_smaller_beta_the_fewer_classes_a_client_has() -> None:
    labels = labels_of([400] * 10)
    for scheme in (_schemes.dirichlet, _schemes.dirichlet_by_class):
        held = [
            float((scheme(labels, 40, draw(2), beta=beta).class_counts(labels, 10) > 0).sum(1).mean())
            for beta in (0.01, 0.1, 1.0, 100.0)
        ]
        assert held == sorted(held)
        assert held[0] < 4
        assert held[-1] > 9.9


def test_dirichlet_by_class_divides_each_class_by_its_own_draw() -> None:
    labels = labels_of([1000] * 4)
    even = _schemes.dirichlet_by_class(labels, 5, draw(), beta=1e4).class_counts(labels, 4)
    assert even.min() > 130
    assert even.max() < 270, "200 of each are expected"
    skewed = _schemes.dirichlet_by_class(labels, 5, draw(), beta=1e-3).class_counts(labels, 4)
    assert (skewed.max(0) > 990).all(), "each class with one client"
    assert len(set(skewed.argmax(0))) > 1, "and not all with the same one"


def test_class_counts_count() -> None:
    labels = np.array([0, 2, 2, 1])
    split = Split("x", [np.array([0, 1]), np.array([1, 2, 3])], 4)
    assert split.class_counts(labels, 4).tolist() == [[1, 0, 1, 0], [0, 1, 2, 0]]
    assert (split.repeats, split.dropped) == (1, 0)
    assert Split("x", [np.array([3, 3])], 4).repeats == 1
    assert Split("x", [np.array([3, 3])], 4).dropped == 3


def test_hash_tells_splits_apart() -> None:
    parts = [np.array([0, 1]), np.array([2])]
    same = [part.astype(np.int32) for part in parts]
    others = [[np.array([0]), np.array([1, 2])], [np.array([1, 0]), np.array([2])], [np.array([0, 1, 2])]]
    ours = Split("x", parts, 3).hash
    assert Split("y", same, 3).hash == ours
    assert len({ours, *(Split("x", other, 3).hash for other in others)}) == 4


@pytest.mark.parametrize("scheme", [_schemes.iid, _schemes.dirichlet, _schemes.dirichlet_by_class])
def test_more_clients_than_samples_are_refused(scheme: object) -> None:
    options = {} if scheme is _schemes.iid else {"beta": 1.0}
    with pytest.raises(ValueError, match="11 clients are more than the 10 training samples"):
        scheme(labels_of([5, 5]), 11, draw(), **options)  # type: ignore[operator]


def test_more_classes_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="pathological:4 gives every client 4 classes, but the data set has only 3"):
        _schemes.pathological(labels_of([9, 0, 9, 9]), 2, draw(), a=4)
    with pytest.raises(ValueError, match="only 3"):
        _schemes.pathological(labels_of([9, 0, 9, 9]), 2, draw(), a=4, repeat=True)


def test_pooled_is_one_client_with_everything() -> None:
    labels = labels_of([3, 4])
    split = _schemes.pooled(labels, 1, draw())
    assert [part.tolist() for part in split.clients] == [list(range(7))]
    with pytest.raises(ValueError, match="pooled has 1 client, got 3"):
        _schemes.pooled(labels, 3, draw())


def test_owners_in_their_order() -> None:
    split = _schemes.by_owner(["b", "a", "b", "c"], "x")
    assert [part.tolist() for part in split.clients] == [[1], [0, 2], [3]]
    assert [part.tolist() for part in _schemes.by_owner([10, 9, 10], "x").clients] == [[1], [0, 2]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([], "returned no clients"),
        ([[0], []], "client 1 has no samples"),
        ([[0], [1, 10]], "client 1 has sample 10, outside 0 to 9"),
        ([[0, -2, 3]], "client 0 has sample -2, outside 0 to 9"),
        ([[0.5]], "client 0 must have whole sample numbers, got float64"),
        ([np.ones(10, dtype=bool)], "client 0 must have whole sample numbers, got bool"),
        (None, "must return a list of sample numbers per client, got None"),
    ],
)
def test_a_users_split_is_checked(returned: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"split m:f: {message}"):
        _schemes.from_callable(labels_of([5, 5]), 2, 0, lambda labels, clients, seed: returned, "m:f")  # type: ignore[arg-type, return-value]


def test_a_users_split_gets_labels_clients_and_seed() -> None:
    seen = []

    def mine(labels: Labels, clients: int, seed: int) -> list[list[int]]:
        seen.append((labels.tolist(), clients, seed))
        return [[0, 1], [1]]

    split = _schemes.from_callable(np.array([1, 0]), 2, 5, mine, "m:f")  # type: ignore[arg-type]
    assert seen == [([1, 0], 2, 5)]
    assert (split.scheme, split.repeats, [part.tolist() for part in split.clients]) == ("m:f", 1, [[0, 1], [1]])
    with pytest.raises(ValueError, match="split m:x: expected a callable"):
        _schemes.from_callable(np.array([1, 0]), 2, 5, 3, "m:x")  # type: ignore[arg-type]
