"""One's own task: what a loss is given, what metrics see, and what is refused with the remedy."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from worlds import federation, mlp, samples, training

import fedlesam as fl
from fedlesam.core.buffers import Unsupported
from fedlesam.core.evaluation import FEW
from fedlesam.core.metrics import mean_iou

X, Y = samples((12,))[0]
NAMED = [{"x": x, "labels": y} for x, y in samples((7, 12, 5))]


def named_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def right(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(1) == targets).double().mean())


def test_three_lines() -> None:
    """The same bits as the ready task, whatever form the batch has."""
    plain = federation("fedsam", clients=samples((7, 12, 5)), test=samples((12,))[0])
    own = federation(
        "fedsam", clients=NAMED, test={"x": X, "labels": Y}, task=fl.Task(loss=named_loss, metrics={"right": right})
    )
    for one, other in zip(plain.run(2), own.run(2), strict=True):
        assert other.metrics == {"right": one.test_accuracy}
        assert other.test_accuracy is None
        assert other.test_loss == one.test_loss
        assert other.as_dict()["metrics"] == {"right": one.test_accuracy}
    assert torch.equal(plain.weights, own.weights)


class Samples(Dataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.y[i]}


FORMS: dict[str, Any] = {
    "dict": lambda x, y: {"x": x, "labels": y},
    "Dataset": Samples,
    "list of samples": lambda x, y: [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_client(form: str) -> None:
    plain = federation("fedlesam-s", clients=samples((7, 12, 5)))
    other = federation(
        "fedlesam-s", clients=[FORMS[form](*c) for c in samples((7, 12, 5))], task=fl.Task(loss=named_loss)
    )
    for fed in (plain, other):
        fed.round([0, 1])
        fed.round([0, 2])
    assert torch.equal(plain.weights, other.weights)


def test_a_metric_sees_the_whole_test_set_in_its_order_on_any_number_of_workers() -> None:
    x, y = samples((1203,))[0]
    seen = []

    def product(outputs: Tensor, targets: Tensor) -> float:
        if len(targets) > FEW:
            seen.append((outputs.clone(), targets.clone()))
        return float((outputs[:, 0] * torch.arange(len(outputs))).sum())

    task = fl.Task.classification(metrics={"product": fl.Metric(product, better="smaller")})
    found = []
    for workers in (1, 2):
        with federation("fedavg", test=(x, y), task=task, workers=workers, local=training(epochs=1)) as fed:
            found.append(fed.round([0, 1]).metrics)
    assert found[0] == found[1]
    assert list(found[0]) == ["product", "accuracy"], "the user's comes first"
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], y)


class Counting:
    """As an object of torchmetrics: it keeps what it has seen until it is reset."""

    higher_is_better = False

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        raise AssertionError("update and compute are called")

    def reset(self) -> None:
        self.seen = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen += len(targets)

    def compute(self) -> Tensor:
        return torch.tensor(float(self.seen))


def test_an_object_that_keeps_what_it_saw() -> None:
    task = fl.Task.classification(metrics={"seen": Counting()})
    assert task.measured["seen"].better == "smaller"
    records = list(federation("fedavg", test=(X, Y), task=task).run(2))
    assert [record.metrics["seen"] for record in records] == [12, 12]


def test_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="an extra")
    kinds = {
        "f1": torchmetrics.classification.MulticlassF1Score(3),
        "nats": torchmetrics.classification.MulticlassCalibrationError(3),
        "right": torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
    }
    task = fl.Task.classification(metrics=kinds)
    assert [metric.better for metric in task.measured.values()] == ["larger", "smaller", "larger", "larger"]
    first, second = federation("fedavg", test=(X, Y), task=task).run(2)
    assert first.metrics["right"] == pytest.approx(first.metrics["accuracy"])
    assert second.metrics["right"] == pytest.approx(second.metrics["accuracy"]), "nothing is left of the round before"


def test_outputs_from_a_loss_that_calls_the_model_twice() -> None:
    def both(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + F.cross_entropy(model(-batch[0]), batch[1])

    with pytest.raises(Unsupported, match=r"calls the model 2 times.*give Task\(outputs="):
        federation("fedavg", task=fl.Task(loss=both, metrics={"right": right}))
    first = fl.Task(loss=both, metrics={"right": right}, outputs=lambda one, other: one)
    told = fl.Task(loss=lambda m, b: (both(m, b), m(b[0])), metrics="accuracy")
    alone = federation("fedavg", task=fl.Task.classification(), test=(X, Y)).round([0], evaluate=True)
    found = [federation("fedavg", task=task, test=(X, Y)) for task in (first, told)]
    one, other = (fed.round([0]) for fed in found)
    assert list(one.metrics.values()) == list(other.metrics.values())
    assert alone.metrics.keys() == other.metrics.keys()


def test_a_method_of_the_model_is_trained_on_both_engines() -> None:
    """The stacked engine gives the loss a module whose weights are the client's, whatever it calls."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp((5, 4)), mlp((4, 3), seed=1)

        def encode(self, x: Tensor) -> Tensor:
            return torch.tanh(self.body(x))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(self.encode(x))
            return found

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + model.encode(batch[0]).square().mean()

    ends = []
    for engine in ("plain", "stacked"):
        clients = samples((8, 8, 8))
        fed = federation(
            "fedsam", model=Two(), clients=clients, task=fl.Task(loss=loss), engine=engine, local=training(epochs=2)
        )
        fed.round([0, 1, 2])
        ends.append(fed.weights)
    torch.testing.assert_close(ends[0], ends[1], atol=1e-12, rtol=0)


def test_ragged_batches_are_refused_by_the_stacked_engine() -> None:
    def short(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        x = torch.stack([sample["x"] for sample in batch])
        return {"x": torch.cat([x, x[:, : int(sum(s["labels"] for s in batch))]], 1), "labels": torch.zeros(len(x))}

    clients = [FORMS["list of samples"](*c) for c in samples((8, 8))]
    task = fl.Task(loss=lambda m, b: m(b["x"][:, :5]).square().mean(), collate=short)
    with pytest.raises(ValueError, match="padded text does; pad to one length in collate, or use the plain engine"):
        federation("fedavg", clients=clients, task=task, engine="stacked", local=training(epochs=1)).round([0, 1])
    federation("fedavg", clients=clients, task=task).round([0, 1])


def test_several_clients_of_ragged_text_are_probed() -> None:
    from fedlesam.probes.loss import GlobalLoss

    def padded(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        width = 5 + int(batch[0]["labels"])
        x = torch.stack([F.pad(sample["x"], (0, width - 5)) for sample in batch])
        return {"x": x, "labels": torch.stack([sample["labels"] for sample in batch])}

    clients = [FORMS["list of samples"](*c) for c in samples((8, 8, 9))]
    task = fl.Task(loss=lambda m, b: F.cross_entropy(m(b["x"][:, :5]), b["labels"]), collate=padded)
    fed = federation("fedavg", clients=clients, task=task)
    plain = federation("fedavg", clients=samples((8, 8, 9)))
    assert GlobalLoss.of(fed).value(fed.weights) == pytest.approx(GlobalLoss.of(plain).value(plain.weights))


def drops(batch: list[Any]) -> Any:
    return torch.utils.data.default_collate(batch[:-1] or batch)


BAD: dict[str, tuple[Any, str]] = {
    "task and loss": (
        lambda: federation("fedavg", local=training(loss=F.mse_loss), task=fl.Task.regression()),
        r"a task and LocalTraining\(loss=...\) both say.*give the task alone, e.g. task=fl.Task.supervised",
    ),
    "no task": (lambda: federation("fedavg", task="regression"), r"task must be an object fl.Task\(...\), got 'regr"),
    "no function": (lambda: fl.Task(loss="mse"), "Task: loss must be a function, got 'mse'"),
    "no metric": (lambda: fl.Task(loss=named_loss, metrics={"f1": 3}), "the metric f1 must be a function of.*got 3"),
    "unknown metric": (lambda: fl.Task(loss=named_loss, metrics="f2"), "metrics must be one of 'accuracy'.*got 'f2'"),
    "direction": (lambda: fl.Metric(right, better="lower"), "better must be one of 'larger', 'smaller', got 'lower'"),
    "unknown inputs": (
        lambda: federation("fedavg", clients=[(X, X, Y)]),
        r"the loss of the task does not take a batch of client 0.*give Task\(..., inputs=lambda batch",
    ),
    "unknown targets": (
        lambda: federation("fedavg", clients=[{"x": X, "y": Y}]),
        r"known of two tensors \(x, y\) or of a dict with labels, and this dict has x, y; give Task",
    ),
    "a key that is not there": (
        lambda: federation("fedavg", clients=[{"y": Y}], task=fl.Task(loss=named_loss)),
        r"the loss of the task does not take a batch of client 0: batch\[\"y\"\] \(1,\) torch.int64: KeyError: 'x'",
    ),
    "rows": (lambda: federation("fedavg", clients=[{"x": X, "labels": Y[:3]}]), r'x"\] has 12.*labels"\] has 3'),
    "ragged": (
        lambda: federation("fedavg", clients=[[{"x": X[0]}, {"x": X[1, :3]}]], task=fl.Task(loss=named_loss)).round(),
        r"samples cannot be combined into a batch.*fl.Task\(..., collate=f\)",
    ),
    "a batch that does not fit the model": (
        lambda: federation("fedavg", clients=[{"x": X[:, :3], "labels": Y}], task=fl.Task(loss=named_loss)),
        r"the model does not take a batch of client 0: batch\[\"x\"\] \(1, 3\).*shapes cannot be multiplied",
    ),
    "a test set that does not fit the model": (
        lambda: federation("fedavg", test=(X[:, :3], Y)),
        r"the model does not take inputs of shape \(1, 3\), as the test set has: mat1",
    ),
    "a loss that is no number": (
        lambda: federation(
            "fedavg", task=fl.Task(loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"))
        ).round(),
        r"the loss of a batch has the shape \(\d,\), but a tensor of one number is needed; return e.g. its mean",
    ),
    "a loss that is nothing": (
        lambda: federation("fedavg", task=fl.Task(loss=lambda m, b: None)),
        "the loss of a batch is a NoneType, but a tensor of one number",
    ),
    "a metric that raises": (
        lambda: federation(
            "fedavg", test=(X, Y), task=fl.Task.classification(metrics={"auc": lambda o, t: 1 / 0})
        ).round(),
        r"the metric auc raises ZeroDivisionError: division by zero; it is called as f\(outputs, targets\) with "
        r"outputs \(12, 3\) torch.float64, targets \(12,\) torch.int64: give",
    ),
    "a metric that is no number": (
        lambda: federation("fedavg", test=(X, Y), task=fl.Task.classification(metrics={"all": lambda o, t: o})).round(),
        r"the metric all returns a tensor of shape \(12, 3\), but one number is needed",
    ),
    "a metric that is nothing": (
        lambda: federation(
            "fedavg", test=(X, Y), task=fl.Task.classification(metrics={"m": lambda o, t: None})
        ).round(),
        r"the metric m returns None, but one number is needed",
    ),
    "columns and numbers": (
        lambda: federation("fedavg", model=mlp((5, 1)), clients=[(X, X[:, 0])], task=fl.Task.regression()),
        r"client 0: y has the shape \(1,\), and the outputs \(1, 1\); give y.unsqueeze\(-1\), or let the model",
    ),
    "columns and numbers under a loss": (
        lambda: federation("fedavg", model=mlp((5, 1)), clients=[(X, X[:, 0])], local=training(loss=F.mse_loss)),
        r"client 0: y has the shape \(1,\), and the outputs \(1, 1\); give y.unsqueeze\(-1\)",
    ),
    "labels beyond yes and no": (
        lambda: federation("fedavg", model=mlp((5, 1)), clients=[(X, 2 * X[:, :1])], task=fl.Task.binary()),
        r"client 0: target .* is outside 0 to 1; for more classes take Task.classification",
    ),
    "tokens that are numbers": (
        lambda: federation("fedavg", clients=[(X, Y.double())], task=fl.Task.language_model()),
        r"client 0: y is torch.float64, and a token for each position is an int64; give y.long\(\)",
    ),
    "tokens beyond the vocabulary": (
        lambda: federation("fedavg", clients=[(X, Y), (X, Y + 5)], task=fl.Task.language_model()),
        "client 1: label 7 is outside 0 to 2",
    ),
    "pixels": (
        lambda: federation(
            "fedavg",
            model=nn.Conv2d(1, 3, 1).double(),
            clients=[(X.view(12, 1, 1, 5), Y)],
            task=fl.Task.segmentation(),
        ),
        r"client 0: y has the shape \(1,\), and a class for each pixel is \(1, 1, 5\)",
    ),
    "augment": (
        lambda: federation(
            "fedavg", clients=NAMED, task=fl.Task(loss=named_loss), local=training(augment=lambda x, rng: x)
        ).round(),
        "augment changes the x of a pair.*a batch is a dict here; augment in the Dataset",
    ),
    "metrics of ragged outputs": (
        lambda: fl.Federation(
            nn.Embedding(9, 4),
            [[{"t": torch.arange(2 + i // 500)} for i in range(600)]],
            task=fl.Task(
                loss=lambda m, b: m(b["t"]).square().mean(),
                metrics={"m": right},
                targets=lambda b: b["t"],
                collate=lambda s: {"t": torch.nn.utils.rnn.pad_sequence([one["t"] for one in s], batch_first=True)},
            ),
            test=[{"t": torch.arange(2 + i // 500)} for i in range(600)],
        ).round(),
        r"the outputs of batches have different shapes.*make them alike in Task\(..., outputs=...\)",
    ),
    "a function as metrics": (lambda: fl.Task.regression(metrics=right), r"metrics must be a dict of names.*'f1': f"),
    "finish raises": (
        lambda: federation(
            "fedavg",
            task=fl.Task.classification(metrics={"m": fl.Metric(lambda o, t: t.sum(), finish=lambda total: total[3])}),
            test=(X, Y),
        ).round(),
        r"the metric m: finish raises IndexError.*the sum over all batches, a tensor of shape \(\)",
    ),
    "a loss without the model": (
        lambda: federation("fedavg", task=fl.Task(loss=lambda model, batch: model(batch[0]).detach().mean())).round(),
        "the loss of a batch does not depend on the model's weights.*without detach or no_grad",
    ),
    "pixels of a table": (
        lambda: federation("fedavg", task=fl.Task.segmentation()),
        r"a class for each pixel needs \(n, classes, height, width\).*Task.classification",
    ),
    "huggingface without a dict": (
        lambda: federation("fedavg", task=fl.Task.huggingface()),
        r"calls model\(\*\*batch\), and a batch is a tuple; give clients as dicts",
    ),
    "collate raises": (
        lambda: federation(
            "fedavg", clients=[[1, 2]], task=fl.Task(loss=named_loss, collate=lambda samples: samples["x"])
        ),
        "collate raises TypeError: list indices.*a list of 1 samples, the first a int",
    ),
    "collate drops": (
        lambda: federation(
            "fedavg",
            clients=[FORMS["list of samples"](X, Y)],
            task=fl.Task.classification(collate=drops, inputs=lambda b: b["x"]),
        ).round(),
        "collate makes a batch of 3 from 4 samples; it may not drop",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    make, says = BAD[case]
    with pytest.raises(ValueError, match=says):
        make()


def test_a_metric_that_raises_loses_nothing() -> None:
    """The round is not done, and can be done again."""
    asked = []

    def sometimes(outputs: Tensor, targets: Tensor) -> float:
        if len(targets) > FEW:
            asked.append(len(targets))
        return 1 / (len(asked) - 2) if len(asked) == 2 else 0.5

    task = fl.Task.classification(metrics={"sometimes": sometimes})
    fed, plain = (federation("fedlesam-s", test=(X, Y), task=task) for _ in range(2))
    fed.round([0, 1])
    before = fed.weights
    with pytest.raises(ValueError, match="the metric sometimes raises"):
        fed.round([0, 2])
    assert torch.equal(fed.weights, before)
    fed.round([0, 2])
    plain.round([0, 1])
    plain.round([0, 2])
    assert torch.equal(fed.weights, plain.weights)


def test_a_client_whose_batch_does_not_fit_is_named_with_it() -> None:
    fed = federation("fedavg", clients=[(X, Y), (X[:, :3], Y)])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as found:
        fed.round([0, 1])
    notes = " ".join(found.value.__notes__)
    assert "in local step 0, on a batch of x (4, 3) torch.float64, y (4,) torch.int64" in notes
    assert "while training client 1 in round 0" in notes


def test_a_model_of_transformers() -> None:
    """A real one, made from a config: tied weights, a dict for a batch, its own loss."""
    transformers = pytest.importorskip("transformers", reason="an extra")
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=8, max_position_embeddings=8, num_labels=3)
    model = transformers.BertForSequenceClassification(config)

    def speaker(n: int) -> dict[str, Tensor]:
        mask = torch.ones(n, 6, dtype=torch.int64)
        mask[::2, 4:] = 0
        return {"input_ids": torch.randint(30, (n, 6)), "attention_mask": mask, "labels": torch.randint(3, (n,))}

    clients, test = [speaker(8), speaker(6)], speaker(10)
    local = fl.LocalTraining(lr=0.1, epochs=1, batch_size=4)
    ends = []
    for workers in (1, 2):
        execution = fl.Execution(workers=workers, threads=1)
        with fl.Federation(
            model, clients, "fedlesam-s", local, task=fl.Task.huggingface(), test=test, execution=execution
        ) as fed:
            records = list(fed.run(2))
            ends.append((fed.weights, records[-1].test_loss, records[-1].metrics))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]
    assert 0 <= ends[0][2]["accuracy"] <= 1


def test_a_label_beyond_the_classes_is_not_left_out_of_the_overlap() -> None:
    outputs, targets = torch.zeros(1, 3, 2, 2), torch.tensor([[[0, 3], [255, 1]]])
    with pytest.raises(RuntimeError, match="out of bounds"):
        mean_iou().f(outputs, targets)
    targets[0, 0, 1] = 0
    assert mean_iou().f(outputs, targets).tolist() == [[2, 0, 0], [3, 1, 0]]
