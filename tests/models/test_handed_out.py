"""The model a federation hands out is the user's own, and can be saved; models it cannot train are refused at once."""

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn
from torch.nn.utils import prune
from worlds import federation, mlp, samples, training

from fedlesam import Federation
from fedlesam.core.buffers import Unsupported
from fedlesam.core.saving import check_savable, separate
from fedlesam.runs.config import RunConfig
from fedlesam.runs.reopen import open_run
from fedlesam.runs.runner import execute

HARM: dict[str, Callable[[nn.Module], object]] = {
    "freeze": lambda model: model.requires_grad_(False),
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "train": lambda model: model.train(),
    "zero": lambda model: nn.init.zeros_(model.get_parameter("0.weight")),
    "buffer": lambda model: model.get_buffer("1.running_mean").fill_(torch.nan),
    "delete": lambda model: delattr(model, "1"),
    "share": lambda model: model.share_memory(),
}


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def made(model: nn.Module) -> Federation:
    return federation("fedavg", model=model, dtype=torch.float32)


@pytest.mark.parametrize("harm", HARM)
def test_what_is_done_to_the_model_does_not_reach_the_federation(harm: str) -> None:
    fed, other = made(normed()), made(normed())
    fed.round([0, 1])
    other.round([0, 1])
    HARM[harm](fed.model)
    assert not fed.model.training
    for one, two in zip(fed.model.state_dict().items(), other.model.state_dict().items(), strict=True):
        assert one[0] == two[0]
        assert one[1].dtype == two[1].dtype
        assert torch.equal(one[1], two[1])
    assert all(p.requires_grad for p in fed.model.parameters())
    fed.round([1, 2])
    other.round([1, 2])
    assert torch.equal(fed.weights, other.weights)
    assert torch.equal(fed.replica().weights, other.weights)


def test_rounds_make_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation("fedavg", test=samples((4,))[0])
    monkeypatch.setattr("copy.deepcopy", None)
    fed.round()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.two.weight = self.one.weight
        self.out = nn.Linear(5, 3)
        whole = torch.linspace(0, 1, 100)
        self.register_buffer("sliced", whole[:64])
        self.register_buffer("rest", whole[64:])
        self.register_buffer("wide", torch.arange(3.0).expand(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(self.two(torch.tanh(self.one(x))))
        return output


def test_it_can_be_saved_however_its_tensors_lie_in_memory(tmp_path: Path) -> None:
    fed = made(Tied())
    fed.round([0, 1])
    save_model(fed.model, str(tmp_path / "model.safetensors"))
    again = made(Tied()).model
    load_model(again, str(tmp_path / "model.safetensors"))
    for one, two in zip(fed.model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    model = fed.model
    assert model.get_parameter("one.weight") is model.get_parameter("two.weight")


def test_views_of_a_tensor_that_is_there_whole_stay_views() -> None:
    model, whole = mlp(), torch.zeros(6)
    model.register_buffer("whole", whole)
    model.register_buffer("part", whole[2:4])
    separate(model)
    model.get_buffer("whole").fill_(1)
    assert model.get_buffer("part").sum() == 2


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None:
        pass


def test_what_no_file_could_hold_is_refused_before_training() -> None:
    model = mlp()
    check_savable(model)
    model.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
    check_savable(model)
    model.register_buffer("turn", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"turn of the model is torch.complex128.*persistent=False"):
        check_savable(model)
    model.register_buffer("turn", torch.eye(2).to_sparse(), persistent=True)
    with pytest.raises(ValueError, match=r"turn of the model is torch.sparse_coo"):
        check_savable(model)
    with pytest.raises(ValueError, match=r"_extra_state is a dict, and a model.safetensors holds tensors only"):
        check_savable(Extra(2, 2))


class Returns(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any], only_in_training: bool = False) -> None:
        super().__init__()
        self.linear, self.wrap, self.always = nn.Linear(5, 3), wrap, not only_in_training

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.linear(x)) if self.training or self.always else self.linear(x)


Pair = collections.namedtuple("Pair", ["main", "aux"])
Logits = collections.namedtuple("Logits", ["logits", "aux"])


def embedding(**settings: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 3, **settings), nn.Flatten(), nn.Linear(15, 3))


def complex_beside_real() -> nn.Module:
    model = mlp(dtype=torch.float32)
    model.register_parameter("turn", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    return model


def hooked(register: str) -> nn.Module:
    """With a mask on a gradient, which no copy of the model has."""
    model = mlp(dtype=torch.float32)
    getattr(model[0].weight, register)(lambda _: None)
    return model


KEPT = r"0.weight of the model: computed from parameters and kept.* call their remove function, or use"


def rewritten(rewrite: Callable[[nn.Module], Any]) -> nn.Module:
    """With a weight that is computed from another parameter and kept."""
    model = mlp(dtype=torch.float32)
    rewrite(model[0])
    model(torch.zeros(2, 5))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tuple": (lambda: Returns(lambda y: (y, y)), "the model returns a tuple, and one tensor of outputs is needed"),
    "dict": (lambda: Returns(lambda y: {"scores": y}), "the model returns a dict"),
    "named tuple": (lambda: Returns(lambda y: Pair(y, y)), "the model returns a Pair"),
    "sparse embedding": (lambda: embedding(sparse=True), "the layer 0 is an Embedding with sparse=True.*sparse=False"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), r"0.weight of the model has no shape yet.*call the model on one"),
    "lazy norm": (lambda: nn.Sequential(nn.Linear(5, 3), nn.LazyBatchNorm1d()), "1.weight of the model has no shape"),
    "sync": (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(normed()), "the layer 1 is a SyncBatchNorm.*BatchNorm1d"),
    "hook": (lambda: hooked("register_hook"), "the parameter 0.weight has a gradient hook, and copies"),
    "late hook": (lambda: hooked("register_post_accumulate_grad_hook"), "the parameter 0.weight has a gradient hook"),
    "pruned": (lambda: rewritten(lambda layer: prune.random_unstructured(layer, "weight", 0.5)), KEPT),
    "spectral norm": (lambda: rewritten(nn.utils.spectral_norm), KEPT),
    "kept": (lambda: rewritten(lambda layer: setattr(layer, "weighed", 2 * layer.weight)), "0.weighed of the model"),
    "complex": (complex_beside_real, "the parameter turn: trainable parameters must be real numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_trained_are_refused_when_they_are_given(case: str) -> None:
    make, says = REFUSED[case]
    with pytest.raises(Unsupported, match=says):
        made(make())


def test_a_model_that_returns_more_in_training() -> None:
    """Such as Inception. No client is to blame."""
    fed = federation(
        "fedavg",
        model=Returns(lambda y: Pair(y, y), only_in_training=True),
        dtype=torch.float32,
        on_client_error="drop",
    )
    with pytest.raises(Unsupported, match="the model returns a Pair"):
        fed.round()


@pytest.mark.parametrize("wrapped", [lambda y: Logits(y, y), lambda y: {"logits": y, "aux": y}])
def test_a_model_that_returns_logits_among_others_trains_on_them(wrapped: Callable[[Tensor], object]) -> None:
    ends = []
    for how in (lambda y: y, wrapped):
        torch.manual_seed(0)
        fed = federation("fedsam", model=Returns(how), dtype=torch.float32)
        fed.round()
        ends.append(fed.weights)
    assert torch.equal(*ends)


def test_frozen_complex_parameters_are_left_alone() -> None:
    model = mlp(dtype=torch.float32)
    model.register_parameter("turn", nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False))
    made(model).round()


@pytest.mark.parametrize("size", [1, 4, 501])
def test_batch_statistics_in_eval_mode(size: int) -> None:
    """They need two samples: of the check, and of the last batch of the test set."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    clients = samples((size + 1, 5), dtype=torch.float32)
    test = samples((max(size, 2),), dtype=torch.float32)[0]
    fed = federation("fedavg", model=model, clients=clients, test=test, local=training(batch_size=100))
    assert fed.round().test_loss is not None


class Odd(nn.Module):
    """`--model` of a run, with buffers that no safetensors file takes as they lie in memory."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), classes))
        self.register_buffer("sliced", torch.linspace(0, 1, 100)[:64])
        self.register_buffer("wide", torch.arange(3.0).expand(4, 3))
        self.register_buffer("turn", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


class Unsavable(Odd):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(shape, classes)
        self.register_buffer("precise", torch.ones(3, dtype=torch.complex128))


def test_a_run_ends_with_its_model_and_summary(tmp_path: Path) -> None:
    config = RunConfig(data="digits", clients=3, rounds=2, model="test_handed_out:Odd")
    assert execute(config, tmp_path / "run")["state"] == "finished"
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(saved["sliced"], torch.linspace(0, 1, 100)[:64])
    assert saved["turn"].dtype == torch.complex64
    assert open_run(tmp_path / "run").state.round == 2


def test_a_run_whose_model_could_not_be_saved_does_not_begin(tmp_path: Path) -> None:
    config = RunConfig(data="digits", clients=3, rounds=2, model="test_handed_out:Unsavable")
    with pytest.raises(ValueError, match=r"precise of the model is torch.complex128"):
        execute(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
