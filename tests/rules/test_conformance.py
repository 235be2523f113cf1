"""One suite for every method of the catalogue."""

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from worlds import (
    SCHEDULE,
    SIZES,
    Listed,
    assert_same_bits,
    epochs,
    federation,
    mlp,
    play,
    samples,
    snapshot,
    states,
    steps_of,
    training,
)

import fedlesam
from fedlesam import NotFinite, algorithms, rules
from fedlesam.algorithms import CATALOGUE, FAMILY, OTHERS, PAPER, example
from fedlesam.federation import Federation

every_method = pytest.mark.parametrize("method", CATALOGUE)
with_buffers = pytest.mark.parametrize("method", [name for name in CATALOGUE if name != "dp-fedsam"])
"""Which are refused with privacy: they would be sent without noise."""
TWO_PASSES = ("fedsam", "mofedsam", "fedgamma", "fedsmoo", "fedspeed", "fedasam", "fedgf", "fedgloss", "fednsam")
TWO_PASSES += ("fedsol", "dp-fedsam")
TWO_PASSES += ("fedspeed-released", "fedsmoo-released", "fednsam-released")
DYNAMIC = ("feddyn", "fedsmoo", "fedlesam-d", "freesam-d", "fedlesam-released-d", "fedspeed", "fedgloss")
DYNAMIC += ("fedgmt",)
TEACHING = ("fedgmt", "fedsol")
DYNAMIC += ("fedspeed-released", "fedsmoo-released")

VALUES = {
    "fedavg": (1, 1, 0),
    "fedadam": (1, 1, 0),
    "scaffold": (2, 2, 1),
    "fedcm": (2, 1, 0),
    "feddyn": (1, 1, 1),
    "fedsam": (1, 1, 0),
    "mofedsam": (2, 1, 0),
    "fedgamma": (2, 2, 1),
    "fedsmoo": (2, 2, 2),
    "fedlesam": (1, 1, 1),
    "fedlesam-s": (2, 2, 2),
    "fedlesam-d": (1, 1, 2),
    "fedprox": (1, 1, 0),
    "fedlesam-m": (2, 1, 1),
    "freesam": (1, 1, 0),
    "freesam-s": (2, 2, 1),
    "freesam-d": (1, 1, 1),
    "fedspeed": (1, 2, 1),
    "fedasam": (1, 1, 0),
    "fedgf": (2, 1, 0),
    "fedgloss": (1, 1, 1),
    "fednsam": (1, 1, 0),
    "fedswa": (1, 1, 0),
    "fedmoswa": (2, 2, 1),
    "fedgmt": (2, 1, 1),
    "fedsol": (1, 1, 0),
    "fedwmsam": (3, 2, 1),
    "dp-fedsam": (1, 1, 0),
    "msam": (1, 1, 0),
    "fedavgm": (1, 1, 0),
    "fedyogi": (1, 1, 0),
    "fedadagrad": (1, 1, 0),
    "fedlesam-released": (2, 1, 0),
    "fedlesam-released-s": (3, 2, 1),
    "fedlesam-released-d": (2, 1, 1),
    "random-round": (1, 1, 0),
    "random-step": (1, 1, 0),
    "shuffled-s": (12, 2, 1),
    "scaffold-damped": (2, 2, 1),
    "fedspeed-released": (1, 1, 1),
    "fedsmoo-released": (2, 2, 2),
    "fednsam-released": (1, 1, 0),
}
"""Models sent down, sent up and remembered by a client, besides the one it trains."""

NUMBERS = {"fedgf": (1 + 30, 0, 0), "fedwmsam": (1, 1, 1)}
"""Single numbers beside them."""


def values(method: str, size: int) -> tuple[int, int, int]:
    """Entries sent down, sent up and remembered by a client, with a model of `size` entries."""
    down, up, kept = (
        models * size + more for models, more in zip(VALUES[method], NUMBERS.get(method, (0, 0, 0)), strict=True)
    )
    return down, up, kept


def test_the_catalogue() -> None:
    assert set(VALUES) == set(CATALOGUE)
    assert len(PAPER) == 12
    assert {name: example(name).lr_decay for name in CATALOGUE} == {
        name: 0.9995 if name in DYNAMIC else 0.998 for name in CATALOGUE
    }


def test_the_defaults_of_the_paper() -> None:
    """The table of algorithms.md."""
    paper = [name for name, make in CATALOGUE.items() if make in PAPER + OTHERS]
    rho = {name: algorithms.hyperparameters(name).get("rho") for name in paper}
    assert rho == {
        name: 0.01
        if name in ("fedsam", "fedlesam")
        else 0.1
        if "sam" in name or name in ("fedgamma", "fedsmoo")
        else None
        for name in paper
    }
    for key, value in (("alpha", 0.1), ("lam", 0.1), ("prox", 0.1)):
        assert {algorithms.hyperparameters(name).get(key, value) for name in paper} == {value}
    assert {name: algorithms.hyperparameters(name)["lr_g"] for name in paper} == {
        name: 0.1 if name == "fedadam" else 1.0 for name in paper
    }


REQUIRED = inspect.Parameter.empty
DEFAULTS = {
    "fedspeed": {"rho": 0.1, "lam": 0.1, "alpha": 1.0},
    "fedasam": {"rho": 0.7, "eta": 0.2},
    "fedgf": {"rho": 0.05, "rho_g": 0.05, "window": 30, "threshold": REQUIRED},
    "fedgloss": {"rho": 0.15, "rho_s": 0.15, "lam": 0.1, "warmup": 0},
    "fednsam": {"rho": 0.05, "gamma": 0.85},
    "fedswa": {"floor": 0.1, "lr_g": 1.5},
    "fedmoswa": {"floor": 0.1, "gamma": 0.2, "lr_g": 1.5},
    "fedgmt": {"beta": 0.95, "strength": 1.0, "tau": 3.0, "lam": 0.1},
    "fedsol": {"rho": 1.0, "adaptive": True},
    "fedwmsam": {"rho": 0.01, "alpha": 0.1},
    "dp-fedsam": {"rho": 0.1, "clip": 0.2, "noise": 0.95, "delta": 0.0},
    "msam": {"rho": 0.1, "beta": 0.9},
    "fedavgm": {"lr_g": 1.0, "beta": 0.9},
    "fedyogi": {"lr_g": 0.1, "b1": 0.9, "b2": 0.99, "eps": 0.01},
    "fedadagrad": {"lr_g": 0.1, "eps": 0.01},
    "fedspeed-released": {"rho": 0.1, "lam": 0.1},
    "fedsmoo-released": {"rho": 0.1, "lam": 0.1},
    "fednsam-released": {"rho": 0.05, "gamma": 0.85},
}


@pytest.mark.parametrize("method", DEFAULTS)
def test_the_defaults_of_the_family(method: str) -> None:
    """The table of family.md."""
    assert algorithms.hyperparameters(method) == DEFAULTS[method]
    assert list(algorithms.hyperparameters(method)) == list(DEFAULTS[method])
    assert {make.__name__.replace("_", "-") for make in FAMILY} <= DEFAULTS.keys()


def test_a_value_without_default_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"fedgf needs threshold: give it with --set threshold=VALUE"):
        algorithms.get("fedgf")
    with pytest.raises(TypeError, match="threshold"):
        algorithms.fedgf()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="threshold has no default"):
        rules.InterpolatedAscent()
    assert algorithms.get("fedgf", threshold=2.0) == algorithms.fedgf(threshold=2.0)


@every_method
def test_repr_is_the_method(method: str) -> None:
    algorithm = example(method)
    rooms = {name: getattr(rules, name) for name in rules.__all__} | {"Algorithm": fedlesam.Algorithm}
    assert eval(repr(algorithm), rooms) == algorithm
    assert hash(algorithm) == hash(example(method))


@every_method
def test_trains(method: str) -> None:
    """On every client, with the method's own hyper-parameters, the training loss falls."""
    local = training(lr=0.1, epochs=2, clip=10.0, weight_decay=1e-3, lr_decay=None)
    records = list(federation(method, local=local, clients=samples((7, 12, 5)), active=1.0).run(8))
    assert records[-1].train_loss < 0.9 * records[0].train_loss
    decay = example(method).lr_decay
    assert [r.lr for r in records] == pytest.approx([0.1 * decay**t for t in range(8)], rel=1e-12)
    assert [r.round for r in records] == list(range(8))


@every_method
def test_same_seed_same_bits(method: str) -> None:
    one, other, third = (federation(method, dtype=torch.float32, seed=seed, active=3) for seed in (5, 5, 6))
    records = [list(fed.run(3)) for fed in (one, other, third)]
    assert [r.active for r in records[0]] == [r.active for r in records[1]]
    assert_same_bits(states(one), states(other))
    assert not torch.equal(one.weights, third.weights)


@every_method
def test_the_order_of_active_does_not_matter(method: str) -> None:
    one, other = federation(method), federation(method)
    play(one, [[0, 3, 4], [4, 1, 0]])
    play(other, [[4, 0, 3], [0, 1, 4]])
    assert_same_bits(states(one), states(other))


class Random(Dataset[tuple[Tensor, Tensor]]):
    """A Dataset that draws from every global generator, as users' transforms do."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002
        return self.x[i] + 0.1 * noise, self.y[i]


def generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist()


@with_buffers
def test_the_callers_model_and_generators_are_untouched(method: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 3)).double()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    storages = [p.data_ptr() for p in model.parameters()]
    clients = [Random(x, y) for x, y in samples((6, 9, 7))]
    state = generators()
    fed = federation(method, model=model, clients=clients, test=clients[0])
    fed.round([0, 1])
    fed.round([0, 2])
    assert generators() == state
    assert_same_bits(model.state_dict(), before)
    assert [p.data_ptr() for p in model.parameters()] == storages
    assert model.training
    assert all(p.grad is None for p in model.parameters())

    random.seed(99)
    np.random.seed(99)  # noqa: NPY002
    torch.manual_seed(99)
    again = federation(method, model=model, clients=clients, test=clients[0])
    again.round([0, 1])
    again.round([0, 2])
    assert_same_bits(states(fed), states(again))


@every_method
@pytest.mark.parametrize("wrap", [TensorDataset, Listed])
def test_torch_datasets_are_clients(method: str, wrap: Callable[[Tensor, Tensor], Dataset[Any]]) -> None:
    one = federation(method, test=samples((10,))[0])
    other = federation(method, clients=[wrap(x, y) for x, y in samples()], test=wrap(*samples((10,))[0]))
    for active in SCHEDULE[:2]:
        client_state, theirs = one.round(active), other.round(active)
        assert (client_state.test_loss, client_state.test_accuracy) == (theirs.test_loss, theirs.test_accuracy)
    assert_same_bits(states(one), states(other))


@every_method
def test_counters(method: str) -> None:
    """Backward passes = steps x passes; bytes = the tensors that are sent."""
    fed = federation(method, dtype=torch.float32)
    size = 39
    down, up, kept = values(method, size)
    for t, active in enumerate(SCHEDULE[:3]):
        record = fed.round(active)
        steps = sum(steps_of(SIZES[i], 4, epochs(t, i)) for i in active)
        assert record.backward_passes == steps * (2 if method in TWO_PASSES else 1)
        assert fed.algorithm.perturbation.passes == (2 if method in TWO_PASSES else 1)
        later = t == 0 and method.startswith("fedlesam-released")  # there is no last server step yet
        assert record.bytes_down == 4 * (down - later * size) * len(active)
        assert record.bytes_up == 4 * up * len(active)
        assert record.active == list(active)
    assert set(fed.memories) == {0, 1, 2, 3, 4, 5}
    assert all(memory.nbytes == 4 * kept for memory in fed.memories.values())


@with_buffers
def test_batch_norm(method: str) -> None:
    """Buffers travel with the model and count steps, not passes."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    sizes, active = (6, 9, 7), (0, 1)
    fed = federation(method, model=model, clients=samples(sizes, dtype=torch.float32))
    record = fed.round(active)
    taken = [2 * 1, 2 * 2]  # 6 samples in 2 batches; of 9 samples the last one joins the second batch
    assert int(fed.state.buffers["1.num_batches_tracked"]) == max(taken)
    assert record.backward_passes == sum(taken) * (2 if method in TWO_PASSES else 1)
    parameters, buffers = 24 + 8 + 15, 4 * (4 + 4) + 8
    down, up, _ = values(method, parameters)
    down -= parameters * method.startswith("fedlesam-released")  # in the first round there is no last server step
    assert record.bytes_down == 2 * (4 * down + buffers)
    assert record.bytes_up == 2 * (4 * up + buffers)
    assert fed.state.buffers["1.running_mean"].dtype == torch.float32
    assert fed.state.buffers["1.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(fed.model.get_buffer("1.running_var"), fed.state.buffers["1.running_var"])
    fed.round(active)
    assert int(fed.state.buffers["1.num_batches_tracked"]) == 4 + 2 * 3


@every_method
def test_dropout(method: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    one, other = (play(federation(method, model=model), SCHEDULE[:2]) for _ in range(2))
    assert_same_bits(states(one), states(other))
    plain = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.0), nn.Linear(8, 3)).double()
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(one.weights, play(federation(method, model=plain), SCHEDULE[:2]).weights)


@every_method
def test_frozen_parameters_are_left_alone(method: str) -> None:
    """Neither trained nor sent; the trainable rest does what it would do behind fixed features."""
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    before = model[0].weight.clone()
    fed = federation(method, model=model)
    with torch.no_grad():
        features = [(model[1](model[0](x)), y) for x, y in samples()]
    head = nn.Sequential(nn.Linear(4, 3)).double()
    head[0].load_state_dict(model[2].state_dict())
    beside = federation(method, model=head, clients=features)
    for active in SCHEDULE[:3]:
        record, expected = fed.round(active), beside.round(active)
        assert (record.bytes_down, record.bytes_up) == (expected.bytes_down, expected.bytes_up)
    assert torch.equal(fed.model[0].weight, before)
    assert fed.weights.shape == (15,)
    torch.testing.assert_close(fed.weights, beside.weights, atol=1e-13, rtol=0)
    assert not torch.equal(fed.model[2].weight, model[2].weight)


@every_method
def test_momentum(method: str) -> None:
    one, other = (play(federation(method, local=training(momentum=m)), SCHEDULE[:2]) for m in (0.9, 0.0))
    assert bool(one.weights.isfinite().all())
    assert not torch.allclose(one.weights, other.weights)


@every_method
def test_regression(method: str) -> None:
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(n, 3, generator=draw), torch.randn(n, 2, generator=draw)) for n in (5, 8, 6)]
    torch.manual_seed(1)
    fed = Federation(nn.Linear(3, 2), clients, example(method), training(loss=nn.functional.mse_loss), test=clients[0])
    if method in TEACHING:
        with pytest.raises(ValueError, match=r"outputs of Task\(own: accuracy\) are of shape .*: no logits"):
            fed.round([0])
        return
    records = list(fed.run(8))
    assert records[-1].train_loss < records[0].train_loss
    assert records[-1].test_accuracy is None
    x, y = clients[0]
    assert records[-1].test_loss == pytest.approx(((fed.model(x) - y) ** 2).mean().item(), rel=1e-6)


@pytest.mark.parametrize("method", [name for name in CATALOGUE if name not in TEACHING])
def test_a_model_of_one_parameter(method: str) -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.slope * x

    x = torch.linspace(-1, 1, 8, dtype=torch.float64)
    clients = [(x, 2 * x), (x, 1.5 * x)]
    local = training(loss=nn.functional.mse_loss, lr=0.05, weight_decay=0.0)
    fed = Federation(Line(), clients, example(method), local)
    list(fed.run(10))
    assert fed.weights.shape == (1,)
    assert fed.model.slope.shape == ()
    assert 0.6 < float(fed.weights) < 3


@every_method
def test_double_precision_stays_double(method: str) -> None:
    fed = play(federation(method), SCHEDULE[:2])
    assert {tensor.dtype for name, tensor in states(fed).items() if name != "round"} == {torch.float64}


class Switch(Dataset[tuple[Tensor, Tensor]]):
    """Raises `error` while it is set, at the third sample."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.error: BaseException | None = None

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if self.error is not None and i == 2:
            raise self.error
        return self.x[i], self.y[i]


@every_method
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_an_error_in_a_round_changes_nothing(method: str, kind: type[BaseException]) -> None:
    clients: list[Any] = samples()
    switch = clients[3] = Switch(*clients[3])
    fed, never_failed = federation(method, clients=clients), federation(method, clients=clients)
    play(fed, SCHEDULE[:2])
    before, objects, state = snapshot(fed), (fed.state, dict(fed.memories)), generators()
    switch.error = kind("disk gone")
    with pytest.raises(kind) as caught:
        fed.round([1, 3, 4])
    switch.error = None
    if kind is OSError:
        assert caught.value.__notes__ == ["while training client 3 in round 2"]
    assert fed.state is objects[0]
    assert fed.memories == objects[1]
    assert_same_bits(states(fed), before)
    assert generators() == state
    fed.round([1, 3, 4])
    play(never_failed, [*SCHEDULE[:2], [1, 3, 4]])
    assert_same_bits(states(fed), states(never_failed))


@every_method
def test_a_client_that_diverges_is_named_and_changes_nothing(method: str) -> None:
    clients = samples()
    fed = federation(method, clients=clients)
    clients[4][0][1] = torch.inf  # before, it would have been refused
    play(fed, [[0, 3], [1, 2]])
    before, memories = snapshot(fed), dict(fed.memories)
    with pytest.raises(NotFinite, match=r"round 2, client 4: the loss of step \d+ is not finite; its data") as caught:
        fed.round([0, 2, 4])
    assert (caught.value.round, caught.value.client) == (2, 4)
    assert_same_bits(states(fed), before)
    assert fed.memories == memories
    fed.round([0, 2])
    never_failed = play(federation(method), [[0, 3], [1, 2], [0, 2]])
    assert_same_bits(states(fed), states(never_failed))


@every_method
def test_an_update_that_is_not_finite(method: str) -> None:
    """The loss of the only step is fine, the step itself overflows."""
    local = training(lr=1e30, weight_decay=0.0, epochs=1, batch_size=100, clip=None)
    draw = torch.Generator().manual_seed(0)
    clients = [(1e12 * torch.randn(9, 5, generator=draw), torch.randint(3, (9,), generator=draw)) for _ in range(2)]
    model = nn.Linear(5, 3)
    nn.init.zeros_(model.weight)
    fed = federation(method, model=model, clients=clients, local=local)
    before = snapshot(fed)
    with pytest.raises(NotFinite, match="round 0, client 1: the update is not finite"):
        fed.round([1])
    assert_same_bits(states(fed), before)


@dataclass(frozen=True)
class Uploads(rules.Correction):
    form: str = "empty"

    def upload(self, before: rules.State, after: rules.State) -> rules.State:
        return {"n": UPLOADS[self.form]}

    def aggregate(self, server_state: rules.State, result: rules.RoundResult) -> rules.State:
        return {}


UPLOADS: dict[str, Any] = {
    "empty": torch.zeros(0),
    "bool": torch.tensor(True),
    "complex": torch.zeros(2, dtype=torch.complex64),
    "number": 1.0,
}


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize("form", UPLOADS)
def test_an_upload_that_cannot_be_summed_is_no_fault_of_the_clients(form: str, engine: Any) -> None:
    """Clients that fail are dropped; here all would be, in every round."""
    algorithm = fedlesam.Algorithm(correction=Uploads(form))
    how = fedlesam.Execution(engine=engine)
    fed = fedlesam.Federation(mlp(), samples(), algorithm, execution=how)
    with pytest.raises(
        ValueError, match=r"Uploads\.upload returned 'n': .* return a tensor of at least one real number"
    ):
        fed.round()
