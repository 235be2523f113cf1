"""Schedules, local steps, parts of an epoch and AdamW, each against a plain loop with torch.optim."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedlesam as fl
from fedlesam.core import schedule
from fedlesam.core.batches import batch_indices
from fedlesam.core.local import LocalTraining
from fedlesam.core.seeds import generator

Clients = list[tuple[Tensor, Tensor]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def clients() -> Clients:
    draw = torch.Generator().manual_seed(1)
    sizes = (13, 20, 7)
    return [(torch.randn(n, 4, generator=draw), torch.randint(3, (n,), generator=draw)) for n in sizes]


def plain(rounds: int, steps: list[int], lr: float, optimizer: str, decay: float = 0.0, batch: int = 5) -> Tensor:
    """FedAvg by hand: each client takes its steps with an optimizer of PyTorch's, and the server averages."""
    net = model()
    for t in range(rounds):
        start, ends = [p.detach().clone() for p in net.parameters()], []
        for i, (x, y) in enumerate(clients()):
            with torch.no_grad():
                for p, w in zip(net.parameters(), start, strict=True):
                    p.copy_(w)
            kind = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
            step = kind(net.parameters(), lr=lr, weight_decay=decay)
            draw = generator(0, "batches", t, i)
            places = list(batch_indices(len(x), batch, 10, False, draw))[: steps[i]]
            for place in places:
                step.zero_grad()
                F.cross_entropy(net(x[place]), y[place]).backward()
                step.step()
            ends.append([p.detach().clone() for p in net.parameters()])
        with torch.no_grad():
            for k, p in enumerate(net.parameters()):
                p.copy_(torch.stack([end[k] for end in ends]).mean(0))
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def train(rounds: int, algorithm: str = "fedavg", engine: str = "plain", **local: object) -> fl.Federation:
    settings = {"lr": 0.1, "lr_decay": 1.0, "batch_size": 5, "weight_decay": 0.0, "clip": None, **local}
    if callable(settings["lr"]) or isinstance(settings["lr"], str):
        settings.pop("lr_decay")
    how = fl.Execution(engine=engine)  # type: ignore[arg-type]
    fed = fl.Federation(model(), clients(), algorithm, LocalTraining(**settings), execution=how)  # type: ignore[arg-type]
    for _ in fed.run(rounds):
        pass
    return fed


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"steps": 1}, [1, 1, 1]),
        ({"steps": 7}, [7, 7, 7]),
        ({"epochs": 0.5}, [2, 2, 1]),
        ({"epochs": 1.5}, [5, 6, 3]),
        ({"epochs": 0.01}, [1, 1, 1]),
        ({"epochs": lambda t, i: 0.5 * (i + 1)}, [2, 4, 3]),
    ],
)
def test_lengths_against_a_plain_loop(engine: str, length: dict[str, object], steps: list[int]) -> None:
    fed = train(2, engine=engine, **length)
    torch.testing.assert_close(fed.weights, plain(2, steps, 0.1, "sgd"), atol=1e-6, rtol=1e-5)
    assert fed.history[0].backward_passes == sum(steps)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_against_torch(engine: str, decay: float) -> None:
    fed = train(3, engine=engine, optimizer="adamw", lr=0.01, epochs=2, weight_decay=decay)
    torch.testing.assert_close(fed.weights, plain(3, [6, 8, 4], 0.01, "adamw", decay), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["fedsam", "fedlesam", "fedprox", "feddyn", "fedadam"])
def test_adamw_is_the_same_on_both_engines(name: str) -> None:
    local = {"optimizer": "adamw", "lr": 0.01, "epochs": 1, "weight_decay": 0.01}
    one, other = (train(3, name, engine=engine, **local).weights for engine in ("plain", "stacked"))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_adamw_takes_the_proximal_pull_for_a_part_of_the_gradient() -> None:
    """FedProx by hand: the optimizer sees the gradient of the loss with the proximal term."""
    prox, lr, (x, y) = 0.5, 0.02, clients()[0]
    net = model()
    start = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    step = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.1)
    for _ in range(4):
        step.zero_grad()
        now = torch.cat([p.reshape(-1) for p in net.parameters()])
        (F.cross_entropy(net(x), y) + prox / 2 * (now - start).square().sum()).backward()
        step.step()
    local = LocalTraining(lr=lr, lr_decay=1, steps=4, batch_size=50, weight_decay=0.1, clip=None, optimizer="adamw")
    fed = fl.Federation(model(), [(x, y)], fl.algorithms.fedprox(prox=prox), local)
    fed.round()
    expected = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    torch.testing.assert_close(fed.weights, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["scaffold", "fedcm", "fedlesam-s", "fedlesam-m", "fedgamma"])
def test_adamw_is_refused_where_the_correction_assumes_sgd(name: str) -> None:
    correction = type(fl.algorithms.get(name).correction).__name__
    with pytest.raises(ValueError, match=f"{correction} treats .* wrong for adamw; use sgd, or a method without it"):
        train(1, name, optimizer="adamw")


def test_momentum_is_not_adamws() -> None:
    with pytest.raises(ValueError, match="momentum is for sgd, adamw has its own"):
        LocalTraining(optimizer="adamw", momentum=0.9)


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("cosine:4", [0.1 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]),
        ("0.2,cosine:2:0.5", [0.2, 0.15, 0.1, 0.1]),
        ("0.4,step:2:0.5", [0.4, 0.4, 0.2, 0.2]),
        ("step:1", [0.1, 0.01, 0.001, 0.0001]),
        ("0.1,warmup:4", [0.025, 0.05, 0.075, 0.1]),
        ("1, warmup:2, decay:0.5", [0.5, 0.5, 0.25, 0.125]),
        ("0.3,decay:1", [0.3, 0.3, 0.3, 0.3]),
    ],
)
def test_schedules_by_name(text: str, rates: list[float]) -> None:
    fed = train(4, epochs=1, lr=text)
    assert [record.lr for record in fed.history] == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize("decay", [{}, {"lr_decay": 0.5}])
def test_a_number_in_a_string_is_the_number(decay: dict[str, float]) -> None:
    """It follows the method's decay, or that of the settings."""
    numbers, strings = (LocalTraining(lr=lr, **decay) for lr in (0.3, " 0.3"))
    assert strings == numbers
    rates = [strings.lr_at(t, fl.algorithms.fedavg()) for t in range(3)]
    assert rates == pytest.approx([0.3 * decay.get("lr_decay", 0.998) ** t for t in range(3)], rel=1e-12)
    for wrong in ("nan", "inf", "-0.1", "0"):
        with pytest.raises(ValueError, match="lr"):
            LocalTraining(lr=wrong)


def test_a_function_of_the_round() -> None:
    by_name, by_hand = train(3, epochs=1, lr="0.2,decay:0.5"), train(3, epochs=1, lr=lambda t: 0.2 * 0.5**t)
    assert torch.equal(by_name.weights, by_hand.weights)
    assert [record.lr for record in by_hand.history] == [0.2, 0.1, 0.05]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("cosin:100", "did you mean 'cosine'"),
        ("cosine", "cosine takes 1 or 2 numbers"),
        ("cosine:0.5", "whole number of rounds"),
        ("step:2:x", "expected numbers after step"),
        ("decay:-1", "factor above 0"),
        ("0,cosine:3", "must start above 0"),
        ("nan,cosine:3", "must start above 0"),
        ("", "a schedule is a start and factors"),
        ("0.1,,cosine:3", "a schedule is a start and factors"),
    ],
)
def test_schedules_that_cannot_be_meant(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        LocalTraining(lr=text)


def test_a_schedule_that_ends_refuses_more_rounds() -> None:
    with pytest.raises(ValueError, match=r"lr 'cosine:3' is 0 after 4 rounds; the schedule was made for fewer"):
        train(4, lr="cosine:3")


def test_a_function_that_returns_no_rate_stops_the_round() -> None:
    with pytest.raises(ValueError, match=r"lr\(round=1\) must be above 0, got 0"):
        train(2, epochs=1, lr=lambda t: 0.1 if t == 0 else 0)


def test_lr_decay_is_for_numbers() -> None:
    with pytest.raises(ValueError, match=r"lr_decay 0\.9 goes with an lr that is a number"):
        LocalTraining(lr="cosine:100", lr_decay=0.9)
    assert schedule.parse("0.1,decay:0.9")(2) == pytest.approx(0.1 * 0.9**2)


@pytest.mark.parametrize("epochs", [0.0, -0.5, math.nan, 0, True, "1"])
def test_epochs_that_cannot_be_meant(epochs: object) -> None:
    with pytest.raises(ValueError, match="epochs must be"):
        LocalTraining(epochs=epochs)  # type: ignore[arg-type]
