"""What docs/baselines.md says about mathematics, computed. One item: `pytest tests/test_baselines.py -k fednsam`."""

import math
import re
from pathlib import Path

import pytest
import torch
from family_worlds import ends, oracle
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from worlds import SCHEDULE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "baselines.md"

# Two clients on a line, as in the errata: slopes (v - 1) and 4 (v + 1); the minimum of their mean is at -0.6.
CURVATURE, CENTRE, OPTIMUM = (1.0, 4.0), (1.0, -1.0), -0.6


def slope(i: int, v: float) -> float:
    return CURVATURE[i] * (v - CENTRE[i])


def far(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def test_fedsmoo_cut_at_offset_zero() -> None:
    """The first tensor gets its own entries, the others those of the first."""
    released = oracle("fedsmoo-released")
    flat = torch.arange(float(len(released.w)), dtype=torch.float64)
    right, wrong = released.pieces(flat), released.pieces(released.cut(flat))  # type: ignore[attr-defined]
    first, *others = right
    assert torch.equal(right[first], wrong[first])
    assert all(float(wrong[name].reshape(-1)[0]) == 0 for name in others)
    assert far(ends("fedsmoo-released")[0], ends("fedsmoo-released", "cut rightly")[0]) < 1e-15  # mu_i and s are 0
    assert far(ends("fedsmoo-released")[-1], ends("fedsmoo-released", "cut rightly")[-1]) > 1e-3


def test_fedspeed_is_the_released_one_only_if_everybody_is_active() -> None:
    everybody = [range(6)] * 3
    for schedule, same in ((everybody, True), (SCHEDULE, False)):
        paper, released = (
            oracle(name, **more).play(schedule)[-1]
            for name, more in (("fedspeed", {"alpha": 1.0}), ("fedspeed-released", {}))
        )
        assert (far(paper, released) < 1e-12) == same


def feddyn(squared: bool, lam: float = 1.0, lr: float = 0.05, steps: int = 5, rounds: int = 2000) -> list[float]:
    """The global model of each round; the pull is that of lam/2 norm^2, or of lam/2 norm."""
    w, h, seen = 3.0, [0.0, 0.0], []
    for _ in range(rounds):
        last = []
        for i in (0, 1):
            v = w
            for _ in range(steps):
                pull = v - w if squared else (math.copysign(0.5, v - w) if v != w else 0.0)
                v -= lr * (slope(i, v) + lam * (h[i] + pull))
            last.append(v)
        h = [h[i] + last[i] - w for i in (0, 1)]
        w = sum(last) / 2 + sum(h) / 2
        seen.append(w)
    return seen


def test_pull_of_constant_length() -> None:
    v = torch.tensor([3.0, 4.0], requires_grad=True)
    for distance in (1.0, 100.0):
        at = (v / 5 * distance).detach().requires_grad_()
        assert float(torch.autograd.grad(0.1 / 2 * at.norm(), at)[0].norm()) == pytest.approx(0.05)
    assert feddyn(squared=True)[-1] == pytest.approx(OPTIMUM, abs=1e-9)
    assert feddyn(squared=False)[-1] == pytest.approx(-0.554, abs=5e-4)
    assert feddyn(squared=False, lam=0.1)[-1] == pytest.approx(-0.5994, abs=5e-5)


@pytest.mark.parametrize("term", ["scaffold", "fedprox"])
def test_item_has_no_gradient(term: str) -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(5, 3), torch.randint(2, (5,))
    added = sum(
        (p * torch.randn_like(p)).sum() if term == "scaffold" else (p - 1).pow(2).sum() for p in model.parameters()
    )
    loss = cross_entropy(model(x), y)
    plain = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    numbered = torch.autograd.grad(loss + added.item(), list(model.parameters()), retain_graph=True)
    right = torch.autograd.grad(loss + added, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, numbered, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(plain, right, strict=True))


def scaffold(schedule: list[list[int]], start_at_model: bool) -> tuple[float, float]:
    """Two clients, lr .05, one step: (c, mean of the c_i) at the end. c and the c_i start at 0 or at the model."""
    w, lr = 3.0, 0.05
    c = w if start_at_model else 0.0
    kept: dict[int, float] = {}
    for active in schedule:
        updates, changes = [], []
        for i in active:
            mine = kept.get(i, w if start_at_model else 0.0)
            v = w - lr * (slope(i, w) + c - mine)
            updates.append(v - w)
            kept[i] = mine - c - (v - w) / lr
            changes.append(kept[i] - mine)
        c += sum(changes) / 2
        w += sum(updates) / len(updates)
    return c, sum(kept.values()) / 2


def test_flower_starts_its_control_variates_at_the_model() -> None:
    for start_at_model in (False, True):
        c, mean = scaffold([[0, 1]] * 5, start_at_model)
        assert c == pytest.approx(mean, abs=1e-12)  # everybody is active: it cancels
    c, mean = scaffold([[0], [1], [0], [1], [0], [1]], start_at_model=False)
    assert c == pytest.approx(mean, abs=1e-12)
    after_one = 3.0 - 0.05 * slope(0, 3.0)
    for rounds in (2, 6, 40):
        c, mean = scaffold([[0], [1]] * (rounds // 2), start_at_model=True)
        assert c - mean == pytest.approx(((3.0 - 3.0) + (3.0 - after_one)) / 2, rel=1e-9)  # for good


def test_flower_divides_by_lr_and_has_momentum() -> None:
    lr, steps, v, buffer = 0.01, 500, 0.0, 0.0
    for _ in range(steps):
        buffer = 0.9 * buffer + 1.0
        v -= lr * buffer
    assert -v / (lr * steps) == pytest.approx(10, rel=0.02)  # of a gradient that is 1


def test_fednsam_loses_the_momentum() -> None:
    gamma, right, released = 0.85, 0.0, 0.0
    for number in range(200):
        right = gamma * right + 1.0
        released = 1.0 if number == 0 else gamma * 1.0 + 1.0
    assert right == pytest.approx(1 / (1 - gamma)) == pytest.approx(6.667, abs=1e-3)
    assert released == pytest.approx(1.85)
    paper, code = ends("fednsam"), ends("fednsam-released")
    assert far(paper[0], code[0]) < 1e-15
    assert far(paper[-1], code[-1]) > 1e-2


def test_fedswa_sums_of_the_learning_rate() -> None:
    steps = 50
    today = [2 * (1 - k / steps) for k in range(steps)]
    assert sum(today) == pytest.approx(steps + 1)  # FedAvg's add up to E
    floor = 0.1
    paper = [(1 - k / steps) + floor * k / steps for k in range(steps)]
    exact = (1 + floor) / 2 + (1 - floor) / (2 * steps)
    assert sum(paper) / steps == pytest.approx(exact)
    assert exact / ((1 + floor) / 2) == pytest.approx(1.016, abs=1e-3)


def test_fedgloss_dual_sum() -> None:
    """H is the mean of all h_i; the code's sum is K times smaller."""
    right = oracle("fedgloss")
    code = right.zero
    for active in SCHEDULE:
        right.round(active)
        code = code + right.d / right.N
    kept = sum(right.h.values()) / right.N  # type: ignore[attr-defined]
    assert far(right.H, kept) < 1e-15  # type: ignore[attr-defined]
    assert float(code.norm()) < 0.6 * float(kept.norm())
    alike = oracle("fedgloss")
    alike.play([range(6)] * 4)
    alone = alike.zero
    again = oracle("fedgloss")
    for _ in range(4):
        again.round(range(6))
        alone = alone + again.d / again.N
    assert far(6 * alone, alike.H) < 1e-12  # type: ignore[attr-defined]


def test_fedgloss_ramp() -> None:
    """The list of the server's rho, built as in the code."""
    first, last, local, rounds, ramp = 0.001, 0.15, 0.15, 10_000, 2000
    clients = [first + (local - first) * min(1, t / ramp) for t in range(rounds)]
    server = [first] + [clients[-1] + (last - first) / ramp] * ramp
    meant = [first + (last - first) * t / ramp for t in range(ramp + 1)]
    assert len(set(server[1:])) == 1
    assert server[1] == pytest.approx(0.15, abs=1e-4)
    assert meant[1] == pytest.approx(0.001, abs=1e-4)


def test_fedwmsam_looks_uphill() -> None:
    """After a round m points back: w + k m goes to where the model came from, and beyond."""
    played = oracle("fedwmsam", alpha=0.5)
    played.play(SCHEDULE[:1])
    before = played.w - played.d
    m: Tensor = played.m  # type: ignore[attr-defined]
    assert float(m @ played.d) < 0
    assert float(m @ (before - played.w)) > 0


def test_dp_clipping_each_tensor() -> None:
    clip, tensors = 0.2, 62
    update = [torch.full((4,), 10.0) for _ in range(tensors)]
    each = [piece * min(1.0, clip / float(piece.norm())) for piece in update]
    assert float(torch.cat(each).norm()) == pytest.approx(math.sqrt(tensors) * clip, rel=1e-5)
    assert math.sqrt(tensors) == pytest.approx(7.9, abs=0.03)
    sigma, active = 0.95, 50
    assert sigma * clip / math.sqrt(active) / math.sqrt(active) == pytest.approx(
        sigma * clip / active
    )  # noise of the mean


def test_every_item_of_the_page_has_a_test() -> None:
    named = set(re.findall(r"`-k (\w+)`", PAGE.read_text(encoding="utf-8")))
    tests = [name for name in globals() if name.startswith("test_")]
    assert named
    assert all(any(word in test for test in tests) for word in named), named
