"""Metrics on clients' own test samples: against a loop over clients, for any form of data, on any number of workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

import fedlesam as fl
from fedlesam.core import client_tests
from fedlesam.core.hold_out import hold_out

SIZES = [9, 3, 0, 12, 1, 5, 7, 4, 6, 2, 8, 3]
"""Of the clients' test samples; 0 is a client without."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_tests, "BATCH", 5)  # clients are cut, and share batches


def pair(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.randint(3, (n,))


def train(task: str = "pair") -> list[Any]:
    torch.manual_seed(1)
    return [FORMS[task](6) for _ in SIZES]


def own_tests(task: str = "pair") -> list[Any]:
    torch.manual_seed(2)
    return [FORMS[task](n) if n else None for n in SIZES]


FORMS: dict[str, Any] = {
    "pair": pair,
    "regression": lambda n: (torch.randn(n, 4), torch.randn(n, 2)),
    "dict": lambda n: {"left": torch.randn(n, 4), "labels": torch.randint(3, (n,))},
    "dataset": lambda n: TensorDataset(*pair(n)),
    "samples": lambda n: [(torch.randn(4), int(torch.randint(3, (1,)))) for _ in range(n)],
}


class Named(nn.Linear):
    def forward(self, left: Tensor) -> Tensor:
        return super().forward(left)


def federation(form: str = "pair", task: fl.Task | None = None, **settings: Any) -> fl.Federation:
    torch.manual_seed(0)
    model = Named(4, 2 if form == "regression" else 3)
    local = fl.LocalTraining(lr=0.05, epochs=1, batch_size=3)
    given = {"test_clients": own_tests(form), "active": 4, **settings}
    return fl.Federation(model, train(form), "fedlesam-s", local, task=task, **given)


def columns(data: Any) -> tuple[Tensor, Tensor]:
    if isinstance(data, list):
        return torch.stack([x for x, _ in data]), torch.tensor([y for _, y in data])
    data = data.tensors if isinstance(data, TensorDataset) else data
    return (data["left"], data["labels"]) if isinstance(data, dict) else data


def oracle(model: nn.Module, tests: list[Any], score: Any) -> list[float]:
    found = []
    for data in tests:
        if data is not None:
            x, y = columns(data)
            with torch.no_grad():
                found.append(float(score(model(x), y)))
    return found


def check(found: Any, values: list[float], *, worst: list[float], untested: int) -> None:
    every = torch.tensor(values, dtype=torch.float64)
    assert found.mean == pytest.approx(float(every.mean()))
    assert found.spread == pytest.approx(float(every.std(correction=0)))
    assert found.worst_tenth == pytest.approx(sum(worst) / len(worst))
    assert found.untested == untested


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) == y).double().mean()


@pytest.mark.parametrize("form", ["pair", "dict", "dataset", "samples"])
def test_accuracy_over_clients_is_that_of_a_loop_over_clients(form: str) -> None:
    fed = federation(form)
    record = fed.round()
    values = oracle(fed.model, own_tests(form), accuracy)
    check(record.test_clients["accuracy"], values, worst=[min(values)], untested=1)
    whole = [columns(data) for data in own_tests(form) if data is not None]
    x, y = (torch.cat(part) for part in zip(*whole, strict=True))
    assert record.metrics["accuracy"] == pytest.approx(float(accuracy(fed.model(x), y)))  # no `test` was given
    assert record.test_loss == pytest.approx(float(F.cross_entropy(fed.model(x), y).detach()))


def test_the_worst_tenth_is_the_largest_error_where_smaller_is_better() -> None:
    sizes = [1 + i % 4 for i in range(25)]
    torch.manual_seed(3)
    tests, clients = [[FORMS["regression"](n) for n in sizes] for _ in range(2)]
    fed = fl.Federation(nn.Linear(4, 2), clients, task=fl.Task.regression(), active=2, test_clients=tests)
    found = fed.round().test_clients["mae"]
    values = oracle(fed.model, tests, lambda outputs, y: (outputs - y).abs().mean())
    check(found, values, worst=sorted(values)[-2:], untested=0)


def middle(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().median()


def test_a_metric_of_all_outputs_and_a_task_without_metrics() -> None:
    own = fl.Task.regression(metrics={"median": fl.Metric(middle, better="smaller")})
    fed = federation("regression", own)
    record = fed.round()
    assert list(record.test_clients) == ["median", "mae"]
    values = oracle(fed.model, own_tests("regression"), middle)
    check(record.test_clients["median"], values, worst=[max(values)], untested=1)
    plain = federation("regression", fl.Task(loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1])))
    found = plain.round().test_clients
    losses = oracle(plain.model, own_tests("regression"), F.mse_loss)
    check(found["loss"], losses, worst=[max(losses)], untested=1)


def padded(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Batches of clients together are as long as the longest text of them."""
    texts = [torch.tensor(sample) for sample in samples]
    return pad_sequence(texts, batch_first=True), pad_sequence(texts, batch_first=True, padding_value=-100)


@pytest.mark.parametrize("flat", [False, True])
def test_tokens_whose_outputs_are_no_rows_of_samples(flat: bool) -> None:
    texts = [[[1 + (i * j) % 6 for j in range(2 + i % 3)] for i in range(c + 1)] for c in range(6)]
    outputs = (lambda said: said.flatten(0, 1)) if flat else None
    options: Any = {"outputs": outputs, "targets": lambda batch: batch[1].flatten()} if flat else {}
    task = fl.Task.language_model(collate=padded, inputs=lambda batch: batch[0], **options)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    fed = fl.Federation(model, texts, "fedavg", fl.LocalTraining(batch_size=2), task=task, test_clients=texts)
    found = fed.round().test_clients["token_accuracy"]
    values = []
    for own in texts:
        x, y = padded(own)
        said = fed.model(x).argmax(-1)
        values.append(float((said == y)[y != -100].double().mean()))
    check(found, values, worst=[min(values)], untested=0)


def test_clients_of_other_shapes_are_tested_in_batches_of_their_own() -> None:
    class Mean(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mean(1, keepdim=True))

    torch.manual_seed(0)
    tests = [(torch.randn(3, 4 + i % 2), torch.randint(3, (3,))) for i in range(8)]
    fed = fl.Federation(Mean(1, 3), tests, test_clients=tests)
    values = [float(accuracy(fed.model(x), y)) for x, y in tests]
    check(
        fed._local_engine.evaluate(fed.state.broadcast()).clients["accuracy"], values, worst=[min(values)], untested=0
    )


@pytest.mark.parametrize(
    "task", [None, fl.Task.classification(metrics={"half": lambda o, t: (o.argmax(1) == t).sum() / 2})]
)
def test_the_same_bits_on_two_workers_and_where_fit_is_called_again(task: fl.Task | None, tmp_path: Path) -> None:
    alone = federation(task=task, execution=fl.Execution(threads=1)).fit(3, progress=False)
    with federation(task=task, execution=fl.Execution(workers=2, threads=1)) as shared:
        assert [r.test_clients for r in shared.fit(3, progress=False)] == [r.test_clients for r in alone]
    federation(task=task, execution=fl.Execution(threads=1)).fit(2, tmp_path / "run", progress=False)
    again = federation(task=task, execution=fl.Execution(threads=1)).fit(3, tmp_path / "run", progress=False)
    assert [r.test_clients for r in again] == [r.test_clients for r in alone]
    assert fl.load_run(tmp_path / "run").summary["test_clients"] == again[-1].as_dict()["test_clients"]


def test_other_test_samples_are_another_run(tmp_path: Path) -> None:
    federation().fit(1, tmp_path, progress=False)
    other = own_tests()
    other[0] = pair(9)
    with pytest.raises(ValueError, match=r"data: you gave python-.*, the folder has python-"):
        federation(test_clients=other).fit(1, tmp_path, progress=False)


def test_the_stacked_engine_tests_clients_too() -> None:
    found = federation(execution=fl.Execution(engine="stacked")).round().test_clients["accuracy"]
    assert found.mean == pytest.approx(federation().round().test_clients["accuracy"].mean)


def test_nothing_is_tested_in_rounds_that_are_not_evaluated() -> None:
    fed = federation(evaluate_every=2)
    assert [bool(record.test_clients) for record in fed.run(3)] == [False, True, True]


class Drawn(Dataset[Any]):
    def __init__(self, n: int) -> None:
        self.x, self.y = pair(n)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], int(self.y[i])


@pytest.mark.parametrize("form", ["pair", "dict", "dataset", "samples", "own", "shard"])
def test_a_share_of_each_client_is_held_out_and_the_rest_is_left(form: str) -> None:
    digits = fl.data.load("digits")

    def make(n: int) -> Any:
        return digits.shard(torch.arange(n)) if form == "shard" else Drawn(n) if form == "own" else FORMS[form](n)

    clients = [make(n) for n in (10, 7, 2, 1)]
    rest, tests = hold_out(clients, 0.3, seed=5)
    assert [len_of(one) for one in rest] == [7, 5, 1, 1] and [len_of(one) for one in tests] == [3, 2, 1, 0]
    for data, left, held in zip(clients, rest, tests, strict=True):
        assert sorted(rows(left) + rows(held)) == sorted(rows(data))
    assert [rows(one) for one in hold_out(clients, 0.3, seed=5)[1]] == [rows(one) for one in tests]
    assert [rows(one) for one in hold_out(clients, 0.3, seed=6)[1]] != [rows(one) for one in tests]


def len_of(data: Any) -> int:
    return len(rows(data))


def rows(data: Any) -> list[list[float]]:
    if data is None:
        return []
    if hasattr(data, "tensors") and callable(data.tensors):
        data = data.tensors()
    if not isinstance(data, tuple | dict):
        return [[*x.flatten().tolist(), float(y)] for x, y in (data[i] for i in range(len(data)))]
    x, y = columns(data)
    return [[*a.flatten().tolist(), float(b)] for a, b in zip(x, y, strict=True)]


def test_very_many_clients_are_divided_when_they_are_drawn() -> None:
    class Made:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, i: int) -> Any:
            torch.manual_seed(i)
            return pair(5)

    fed = fl.Federation(nn.Linear(4, 3), Made(), active=2, test_clients=0.4)
    found = fed.round().test_clients["accuracy"]
    rest, tests = hold_out([Made()[i] for i in range(40)], 0.4)
    assert [rows(one) for one in rest] == [rows(fed.clients[i]) for i in range(40)]
    values = sorted(float(accuracy(fed.model(x), y)) for x, y in tests)
    check(found, values, worst=values[:4], untested=0)


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (1.5, "share above 0 and below 1, e.g. 0.2, got 1.5"),
        ("20%", "share above 0 and below 1"),
        ([None] * 12, "test_clients has no samples of any client"),
        ({str(i): pair(3) for i in range(12)}, "test_clients must be a list with an entry for each client, got a dict"),
        ([pair(3)], "test_clients has 1 entries, and there are 12 clients"),
        ([(torch.randn(2, 4), torch.tensor([0, 9]))] + [None] * 11, "the test samples of client 0: label 9"),
        ([None, (torch.randn(2, 5), torch.tensor([0, 1]))] + [None] * 10, "as the test samples of client 1 has"),
        (
            [None, None, (torch.full((2, 4), torch.nan), torch.tensor([0, 1]))] + [None] * 9,
            "client 2: x of sample 0 is",
        ),
    ],
)
def test_bad_test_clients_are_one_sentence(tests: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        federation(test_clients=tests)


def test_a_share_of_clients_with_one_sample_each_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no samples of any client.*a share needs clients with two"):
        fl.Federation(nn.Linear(4, 3), [pair(1), pair(1)], test_clients=0.5)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (None, "test_clients has no samples of any client"),
        (3, "the test samples of client 1: expected .* got int"),
        ((torch.randn(3, 4), torch.tensor([0, 1])), "the test samples of client 1: x has 3 samples and y has 2"),
    ],
)
def test_bad_test_samples_that_are_made_name_their_client(last: Any, words: str) -> None:
    class Made:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> Any:
            return last if i else None

    fed = fl.Federation(nn.Linear(4, 3), [pair(3), pair(3)], test_clients=Made())
    with pytest.raises(ValueError, match=words):
        fed.round()


def test_a_metric_that_fails_on_a_client_names_it_and_nan_is_untested() -> None:
    def few(outputs: Tensor, targets: Tensor) -> float:
        if len(targets) < 2:
            raise ArithmeticError("two samples are needed")
        return float("nan") if len(targets) < 4 else 1.0

    task = fl.Task.classification(metrics={"few": few})
    with pytest.raises(ValueError, match=r"on the test samples of client 4 the metric few raises ArithmeticError.*nan"):
        federation(task=task).round()
    tests = [data if data is None or len(data[0]) > 1 else None for data in own_tests()]
    found = federation(task=task, test_clients=tests).round().test_clients["few"]
    assert found.mean == 1 and found.untested == 2 + sum(n in (2, 3) for n in SIZES)


class Remembers(nn.Linear):
    """Returns its last loss in the same tensor each time."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("last", torch.zeros(()))


def last_loss(model: nn.Module, batch: Any) -> Any:
    outputs = model(batch[0])
    loss = F.cross_entropy(outputs, batch[1])
    if torch.is_grad_enabled():
        return loss, outputs
    last = dict(model.named_buffers())["last"]
    return last.copy_(loss), outputs


def test_a_loss_or_a_term_whose_tensor_is_used_again() -> None:
    held = torch.zeros(2)

    def share(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([(outputs.argmax(1) == targets).sum(), torch.tensor(len(targets))]).float()

    def same_share(outputs: Tensor, targets: Tensor) -> Tensor:
        return held.copy_(share(outputs, targets))

    def new_loss(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(outputs := model(batch[0]), batch[1]), outputs

    def scores(loss: Any, metrics: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        task = fl.Task(loss, metrics, targets=lambda batch: batch[1])
        local = fl.LocalTraining(epochs=1, batch_size=3)
        fed = fl.Federation(Remembers(), train(), "fedavg", local, test=pair(1200), test_clients=own_tests(), task=task)
        record = fed.round()
        return record.test_loss, record.metrics, record.test_clients

    def ratio(total: Tensor) -> Tensor:
        return total[0] / total[1]

    assert scores(last_loss, {}) == scores(new_loss, {})
    one, other = ({"share": fl.Metric(f, finish=ratio)} for f in (same_share, share))
    assert scores(last_loss, one) == scores(new_loss, other)


def test_samples_that_become_bad_are_named() -> None:
    """A sequence that makes its samples may make others in a later round."""

    class Made:
        rounds = 0

        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> Any:
            x, y = torch.ones(3, 4), torch.tensor([0, 1, 2])
            if i and self.rounds:
                x[1, 2] = torch.nan
            return x, y

    made = Made()
    fed = fl.Federation(nn.Linear(4, 3), [pair(3), pair(3)], test_clients=made)
    fed.round()
    made.rounds = 1
    with pytest.raises(ValueError, match=r"the test samples of clients 0 to 1: x of sample 4 is not finite"):
        fed.round()
