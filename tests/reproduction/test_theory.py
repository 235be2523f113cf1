"""Theorem 2 measured with real rounds, against plain gradient descent."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedlesam.core import seeds
from reproduction.context import Context
from reproduction.figures import theory
from reproduction.items import ITEMS
from reproduction.plan import Only
from reproduction.results import Results
from reproduction.scales import SCALES
from reproduction.theory import STEPS, quadratics, theorem_1, theorem_2
from reproduction.writing import markdown


def descents(x: float, starts: int, rounds: int) -> list[float]:
    """The biases of gradient descent on F = (w A w) / 2 - b w + const, with lr = x / L."""
    rng = seeds.generator(0, "probe")
    shards = quadratics(10, 10, 8, rng)
    begin = 3 * torch.randn(starts, 10, generator=rng, dtype=torch.float64)
    rows = np.stack([s.numpy() for s, _ in shards])
    centre, curvature = rows[..., :10], rows[..., 10:]
    a, b = curvature.mean((0, 1)), (curvature * centre).mean((0, 1))
    biases = []
    for w in begin.numpy():
        for _ in range(rounds):
            before = a * w - b
            w = w - x / a.max() * before
            after = a * w - b
            biases.append(np.linalg.norm(before / np.linalg.norm(before) - after / np.linalg.norm(after)))
    return biases


def test_exact_gradients_are_gradient_descent() -> None:
    for found in theorem_2((0.03, 0.3), starts=4, rounds=3):
        expected = descents(found.step, 4, 3)
        assert found.measured == 12
        assert found.bias_max == pytest.approx(max(expected), rel=1e-6)
        assert found.bias_median == pytest.approx(float(np.median(expected)), rel=1e-6)
        assert found.mean_square == pytest.approx(float(np.mean(np.square(expected))), rel=1e-6)
        assert found.noise == 0
        assert found.bound == pytest.approx(3 * found.step**2)


def test_the_printed_form_fails_for_small_steps_and_the_squared_one_holds() -> None:
    found = {t.step: t for t in theorem_2(starts=5, rounds=3)}
    assert all(t.holds_squared and t.squares_within == t.measured for t in found.values())
    assert not found[0.003].holds_as_printed
    assert found[0.003].norms_within == 0
    assert found[0.3].holds_as_printed


def test_batches_add_noise_that_the_bound_knows() -> None:
    exact, noisy = (theorem_2((0.01,), starts=5, rounds=4, batch=b)[0] for b in (0, 2))
    assert noisy.noise > 0
    assert noisy.bias_median > 3 * exact.bias_median
    assert noisy.bound == pytest.approx(3 * noisy.noise + 3 * 0.01**2)
    assert noisy.holds_squared
    again = theorem_2((0.01,), starts=5, rounds=4, batch=2)[0]
    assert again == noisy, "seeded"


def test_in_one_dimension_there_is_no_bias() -> None:
    found = theorem_2((0.5,), dimensions=1, starts=3, rounds=2)[0]
    assert found.bias_max == pytest.approx(0, abs=1e-12)


def test_delta_is_nothing_for_whatever_is_constant_in_a_round() -> None:
    """FedSAM's first step against a computation by hand: e = rho * unit(a_i (v - c_i)), v after a step at v + e."""
    sam, lesam, random = theorem_1(starts=1, rounds=1, local_steps=2, clients=3)
    assert lesam.mean == lesam.largest == random.mean == random.largest == 0
    assert 0 < sam.mean <= sam.largest <= sam.bound == pytest.approx(2 * (2 * 0.1 * 0.1) ** 2)
    assert lesam.cosine > 0.9
    assert abs(random.cosine) < 0.9
    rng = seeds.generator(0, "probe")
    shards = [x.numpy() for x, _ in quadratics(10, 3, 8, rng)]
    w = (3 * torch.randn(1, 10, generator=rng, dtype=torch.float64)).numpy()[0]
    curvatures = [x[:, 10:].mean(0) for x in shards]
    centres = [(x[:, :10] * x[:, 10:]).mean(0) for x in shards]
    lr = 0.1 / max(a.max() for a in curvatures)

    def ascents(start: np.ndarray) -> tuple[list[list[np.ndarray]], np.ndarray]:
        found, ends = [], []
        for a, b in zip(curvatures, centres, strict=True):
            v, mine = start, []
            for _ in range(2):
                g = a * v - b
                mine.append(0.1 * g / (np.linalg.norm(g) + 1e-7))
                v = v - lr * (a * (v + mine[-1]) - b)
            found.append(mine)
            ends.append(v)
        return found, np.mean(ends, axis=0)

    found, _ = ascents(ascents(w)[1])
    assert sam.mean == pytest.approx(np.mean([np.sum((two - one) ** 2) for one, two in found]), rel=1e-6)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="batch must be at most the 8 samples of a client, got 9"):
        theorem_2(batch=9)
    with pytest.raises(ValueError, match="clients must be a whole number from 1, got 0"):
        theorem_2(clients=0)
    with pytest.raises(ValueError, match="step must be above 0, got 0"):
        theorem_2((0.0,))


def table(scale: str, tmp_path: Path) -> str:
    return markdown(theory(ITEMS["theory"], Context(Results(SCALES[scale], {}, {}, 1), Only(), tmp_path, None)))


def test_the_table(tmp_path: Path) -> None:
    rows = [line.split(" | ") for line in table("smoke", tmp_path).splitlines() if line.startswith("| L lr")]
    assert [row[0] for row in rows] == [f"| L lr = {x:g}" for x in STEPS]
    assert rows[0][5:] == ["0 of 10", "10 of 10 |"]


@pytest.mark.slow
def test_the_documentation_shows_what_is_measured(tmp_path: Path) -> None:
    shown = (Path(__file__).parents[2] / "reproduction" / "README.md").read_text(encoding="utf-8").splitlines()
    names = ("| L lr", "| fedsam", "| fedlesam", "| random")
    rows = [line for line in table("cpu", tmp_path).splitlines() if line.startswith(names)]
    assert len(rows) == 9
    assert set(rows) <= set(shown)
