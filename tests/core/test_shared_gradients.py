"""Models whose gradients share memory: autograd gives several parameters views of one storage."""

from typing import Any

import oracle
import pytest
import torch
from agreement import SETTINGS, assert_agree, hyper_of
from oracle import Oracle, Weights
from torch import Tensor, nn
from torch.func import functional_call
from worlds import SCHEDULE, epochs, federation, mlp, play, samples, states, steps_in, training

from fedlesam import algorithms


class Mixed(nn.Module):
    """A linear layer, and parameters put together with operations whose gradient is a view."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draw).double()))
        self.head = nn.Linear(5, 3).double()
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(3, 5, generator=draw) * 0.7)
            self.head.bias.zero_()

    def added(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x + self.added())
        return output


class RowAndColumn(Mixed):
    def __init__(self) -> None:
        super().__init__(row=(5,), col=(5, 1))

    def added(self) -> Tensor:
        return self.row.view(1, -1) + self.col.view(1, -1)


class NewAxes(Mixed):
    def __init__(self) -> None:
        super().__init__(a=(5,), b=(5,))

    def added(self) -> Tensor:
        return self.a[None] + self.b[None]


class Flattened(Mixed):
    def __init__(self) -> None:
        super().__init__(w=(5, 1), d=(1, 5))

    def added(self) -> Tensor:
        return self.w.view(-1) + self.d.view(-1)


class Halves(Mixed):
    """Not the same entries, but the same storage."""

    def __init__(self) -> None:
        super().__init__(left=(2,), right=(3,))

    def added(self) -> Tensor:
        return torch.cat([self.left, self.right])


class Single(Mixed):
    """Of one entry each, whose strides are anything."""

    def __init__(self) -> None:
        super().__init__(a=(1,), b=(1, 1))

    def added(self) -> Tensor:
        return self.a.view(1, 1) + self.b.view(1, 1)


class Tied(Mixed):
    """One tensor under two names, used twice, beside two that share."""

    def __init__(self) -> None:
        super().__init__(a=(5,), b=(5,), c=(5,))
        self.again = self.a

    def added(self) -> Tensor:
        return torch.tanh(self.again)[None] + self.a[None] + self.b[None] + self.c[None]


MODELS = (RowAndColumn, NewAxes, Flattened, Halves, Single, Tied)


@pytest.mark.parametrize(("scope", "momentum"), [("loss", 0.6), ("corrected", 0.0), ("corrected", 0.6)])
@pytest.mark.parametrize("method", ["fedcm", "fedsmoo", "fedlesam-s"])
@pytest.mark.parametrize("make", MODELS)
def test_against_the_oracle(
    make: type[Mixed], method: str, scope: str, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradient(p: Weights, x: Tensor, y: Tensor) -> Weights:
        leaves = {k: t.detach().clone().requires_grad_() for k, t in p.items()}
        loss = nn.functional.cross_entropy(functional_call(make(), leaves, (x,)), y)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        return {k: g.clone() for k, g in zip(leaves, grads, strict=True)}

    monkeypatch.setattr(oracle, "gradient", gradient)
    settings: dict[str, Any] = {**SETTINGS, **hyper_of(method), "clip_scope": scope, "momentum": momentum}
    truth = Oracle(method, make(), samples(), epochs, seed=7, **settings)
    for active in SCHEDULE[:2]:
        truth.round(active)
    local = training(clip_scope=scope, momentum=momentum)
    fed = federation(algorithms.get(method, **hyper_of(method)), model=make(), local=local)
    assert_agree(states(play(fed, SCHEDULE[:2])), truth.states(), 1e-10)


@pytest.mark.parametrize("make", MODELS)
def test_they_do_share(make: type[Mixed]) -> None:
    """Or the test above tests nothing."""
    model = make()
    x, y = samples()[0]
    nn.functional.cross_entropy(model(x), y).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    storages = {g.untyped_storage().data_ptr() for g in gradients}
    whole = all(g.untyped_storage().nbytes() == g.nbytes for g in gradients)
    assert len(storages) < len(gradients) or not whole


@pytest.mark.parametrize("make", MODELS)
def test_gradients_have_a_vector_that_never_moves(make: type[Mixed]) -> None:
    """The step's gradient is one flat vector, of which every parameter's `.grad` is a view."""
    fed = federation("fedsam", model=make())
    steps = steps_in(fed, 0)
    places = []
    for _ in range(2):
        step = next(steps)
        grads = [p.grad for p in step.model.parameters]
        places.append([g.data_ptr() for g in grads if g is not None])
        assert torch.equal(torch.cat([g.reshape(-1) for g in grads if g is not None]), step.round.g)
    assert len(places[0]) == len(step.model.parameters)
    assert places[0] == places[1]


class Meddler(nn.Sequential):
    """Does to its own gradients, in every forward pass, what a training loop would do."""

    def __init__(self, how: str) -> None:
        super().__init__(*mlp())
        self.how, self.hooked = how, False

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "to none":
            self.zero_grad(set_to_none=True)
        if self.how == "to zero":
            self.zero_grad(set_to_none=False)
        for parameter in self.parameters():
            if self.how == "its own":
                parameter.grad = torch.ones_like(parameter)
            if self.how == "hooks" and not self.hooked:
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        self.hooked = True
        output: Tensor = super().forward(x)
        return output


@pytest.mark.parametrize("method", ["fedavg", "fedsam"])
@pytest.mark.parametrize("how", ["to none", "to zero", "its own", "hooks"])
def test_a_model_that_meddles_with_its_gradients_learns_the_same(how: str, method: str) -> None:
    expected, fed = federation(method), federation(method, model=Meddler(how))
    for one in (expected, fed):
        play(one, SCHEDULE[:2])
    assert torch.equal(fed.weights, expected.weights)


def test_a_loss_of_one_entry_is_a_number() -> None:
    expected = federation("fedsam", local=training())
    fed = federation("fedsam", local=training(loss=lambda o, y: nn.functional.cross_entropy(o, y)[None]))
    for one in (expected, fed):
        play(one, SCHEDULE[:2])
    assert torch.equal(fed.weights, expected.weights)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (
            lambda o, y: nn.functional.cross_entropy(o, y, reduction="none"),
            r"has the shape \(\d,\)",
        ),
        (lambda o, y: 0.5, "is a float, but a tensor of one number is needed"),
    ],
)
def test_a_loss_that_is_not_one_number_is_no_clients_fault(loss: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        federation("fedavg", local=training(loss=loss), on_client_error="drop").round([0])
