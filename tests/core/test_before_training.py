"""What is wrong is said before a round of work, and by the client whose it is."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import SIZES, assert_same_bits, federation, samples, states, training

import fedlesam as fl
from fedlesam.core.evaluation import FEW
from fedlesam.engines.serial import SerialEngine

X, Y = samples((40,))[0]


def one_class_raises(outputs: Tensor, targets: Tensor) -> float:
    if len(targets.unique()) < 2:
        raise ValueError("only one class is there")
    return 0.5


def task(metric: Any) -> fl.Task:
    return fl.Task.classification(metrics={"mine": metric})


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds that were begun."""
    found: list[int] = []
    train = SerialEngine.train

    def noted(self: SerialEngine, broadcast: Any, active: Sequence[int]) -> Any:
        found.append(broadcast.round)
        return train(self, broadcast, active)

    monkeypatch.setattr(SerialEngine, "train", noted)
    return found


ONE_CLASS = [(X[:4], Y[:4] * 0) if i == 3 else (X[16:30], Y[16:30]) for i in range(len(SIZES))]
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "raises": (lambda outputs, targets: 1 / 0, {}, "the metric mine raises ZeroDivisionError"),
    "returns a tensor": (lambda outputs, targets: outputs, {}, r"returns a tensor of shape \(40, 3\)"),
    "returns nothing": (lambda outputs, targets: None, {}, "returns None, but one number is needed"),
    "a sum that raises": (fl.Metric(lambda o, t: o.sum(), finish=lambda total: 1 / 0), {}, "mine: finish raises"),
    "on a client's own": (one_class_raises, {"test_clients": ONE_CLASS}, "of client 3 the metric mine raises"),
    "a sum, of clients alone": (
        fl.Metric(lambda o, t: o.sum(), finish=lambda total: 1 / 0),
        {"test": None, "test_clients": ONE_CLASS},
        "mine: finish raises",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_metric_is_tried_before_the_first_round(case: str, trained: list[int]) -> None:
    metric, more, says = WRONG[case]
    fed = federation("fedlesam-s", task=task(metric), **{"test": (X, Y), **more})
    for evaluate in (None, True):
        with pytest.raises(ValueError, match=f"before round 0, so nothing is lost: .*{says}"):
            fed.round(evaluate=evaluate)
    assert not trained
    fed.round(evaluate=False)
    assert trained == [0], "who never evaluates does not need a metric"


def test_a_metric_that_needs_all_classes_is_no_false_alarm() -> None:
    """Of a sorted test set the few that are tried have one class."""
    order = Y.argsort()
    fed = federation("fedavg", task=task(one_class_raises), test=(X[order], Y[order]))
    assert len(Y[order][:FEW].unique()) == 1
    assert fed.round().metrics["mine"] == 0.5


def test_it_is_tried_once_and_without_a_trace() -> None:
    """Neither bits nor random numbers nor buffers change."""
    sizes: list[int] = []

    def counted(outputs: Tensor, targets: Tensor) -> float:
        torch.rand(3)
        sizes.append(len(targets))
        return 0.5

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.4), nn.Linear(5, 3)).double()
    with_it, without = (
        federation("fedlesam-s", model=model, test=(X, Y) if tested else None, task=task(counted) if tested else None)
        for tested in (True, False)
    )
    before = torch.random.get_rng_state()
    for fed in (with_it, without):
        list(fed.run(3))
    assert sizes == [FEW, 40, 40, 40]
    assert torch.equal(before, torch.random.get_rng_state())
    assert_same_bits(states(with_it), states(without))


ALIKE = training(epochs=1)
"""All clients take as many steps, so that they are stacked."""
ENGINES = pytest.mark.parametrize("engine", ["plain", "stacked"])


@ENGINES
@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedlesam"])
def test_a_loss_without_the_model_is_refused(engine: str, method: str) -> None:
    lost = fl.Task(loss=lambda model, batch: F.cross_entropy(model(batch[0]).detach(), batch[1]))
    fed = federation(method, clients=[(X[:6], Y[:6])] * 3, task=lost, engine=engine, local=ALIKE)
    with pytest.raises(ValueError, match=r"does not depend on the model's weights.*without detach"):
        fed.round()


class Made(Sequence[Any]):
    """Clients that are made when they are asked for; client 2 has a label that the model does not know."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        self.form = form

    def __len__(self) -> int:
        return 4

    def __getitem__(self, client: Any) -> Any:
        if not 0 <= client < 4:
            raise IndexError(client)
        return self.form(X[:6], Y[:6] + (7 if client == 2 else 0))


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pair": lambda x, y: (x, y),
    "samples": lambda x, y: [(one, int(label)) for one, label in zip(x, y, strict=True)],
}
SAYS = r"label [789] is outside 0 to 2, the model's 3 outputs; mend the labels, or give the model an output for each"


@ENGINES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("made", [True, False])
def test_a_label_out_of_range_is_said_by_its_client(form: str, made: bool, engine: str) -> None:
    clients = Made(FORMS[form]) if made or form == "pair" else list(Made(FORMS[form]))
    fed = federation("fedsam", clients=clients, engine=engine, local=ALIKE)
    with pytest.raises(ValueError, match=f"client 2: {SAYS}"):
        fed.round()
    fed = federation("fedsam", clients=clients, engine=engine, local=ALIKE, on_client_error="drop")
    dropped = fed.round().dropped
    assert dropped is not None and list(dropped) == [2] and "client 2: label" in dropped[2]


@pytest.mark.parametrize("form", FORMS)
def test_a_label_out_of_range_in_test_samples_that_are_made(form: str) -> None:
    clients = [(X[:6], Y[:6])] * 4
    fed = federation("fedavg", clients=clients, test_clients=Made(FORMS[form]))
    with pytest.raises(ValueError, match=f"the test samples of client 2: {SAYS}"):
        fed.round()


def test_a_label_that_the_loss_ignores_is_out_of_range_in_test_samples_that_are_made() -> None:
    class Ignored(Made):
        def __getitem__(self, client: Any) -> Any:
            x, y = super().__getitem__(client)
            return x, torch.where(y > 2, -100, y)

    fed = federation("fedavg", clients=[(X[:6], Y[:6])] * 4, test_clients=Ignored(FORMS["pair"]))
    with pytest.raises(ValueError, match="the test samples of client 2: label -100 is outside 0 to 2"):
        fed.round()


def test_a_label_out_of_range_in_a_test_set_of_samples() -> None:
    fed = federation("fedavg", test=FORMS["samples"](X, Y + 7))
    with pytest.raises(ValueError, match=f"before round 0, so nothing is lost: the samples evaluated on: {SAYS}"):
        fed.round()


class Squeezed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


@pytest.mark.parametrize("loss", [F.smooth_l1_loss, nn.MSELoss(), None], ids=["function", "module", "own"])
def test_outputs_and_targets_that_would_be_broadcast_are_refused(loss: Any) -> None:
    given: dict[str, Any] = {"task": fl.Task(loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))}
    if loss is not None:
        given = {"task": fl.Task.supervised(loss)}
    says = r"outputs of shape \(2, 1\) with targets of shape \(2\), of two samples, .*y.unsqueeze\(-1\)"
    with pytest.raises(ValueError, match=says):
        federation("fedavg", model=nn.Linear(5, 1).double(), clients=[(X, X[:, 0])], **given)
    federation("fedavg", model=Squeezed(5, 1).double(), clients=[(X, X[:, 0])], **given).round()
    federation("fedavg", model=nn.Linear(5, 1).double(), clients=[(X, X[:, :1])], **given).round()


def test_perplexity_of_no_token_is_not_known() -> None:
    """Of a client whose test samples are padding alone: it is untested, and the mean over the others is finite."""
    texts = torch.arange(24).reshape(6, 4) % 5
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    tests = [(texts, texts), (texts, torch.full_like(texts, -100))]
    language = fl.Task.language_model()
    fed = fl.Federation(model, [(texts, texts)] * 2, "fedavg", task=language, test_clients=tests)
    over = fed.round().test_clients["perplexity"]
    assert over.untested == 1 and 1 < over.mean < 100
