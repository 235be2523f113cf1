"""Hugging Face datasets as clients: whose rows are whose, tensors or samples, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

import fedlesam as fl

pytestmark = pytest.mark.extras
datasets = pytest.importorskip("datasets", reason="the extra `huggingface` is not installed")

ROWS: dict[str, list[Any]] = {
    "input_ids": [[1, 2, 3], [4, 5, 6], [7, 8, 9], [3, 2, 1], [6, 5, 4]],
    "label": [0, 1, 2, 0, 1],
    "speaker_id": ["bob", "ann", "bob", "cid", "ann"],
}


def test_rows_with_one_client_are_one() -> None:
    clients = fl.data.from_huggingface(datasets.Dataset.from_dict(ROWS), client="speaker_id")
    assert clients.names == ["ann", "bob", "cid"]
    assert [client["labels"].tolist() for client in clients] == [[1, 1], [0, 2], [0]]
    assert clients[1]["input_ids"].tolist() == [[1, 2, 3], [7, 8, 9]]
    assert clients[1]["input_ids"].dtype == torch.int64


def test_a_second_part_follows_the_names_of_the_first() -> None:
    test = datasets.Dataset.from_dict(
        {"input_ids": [[1, 1, 1], [2, 2, 2]], "label": [2, 0], "who": ["cid", "stranger"]}
    )
    clients = fl.data.from_huggingface(test, "who", names=["ann", "cid"])
    assert clients[0] is None
    assert clients[1]["labels"].tolist() == [2]


def test_texts_and_ragged_rows_are_samples() -> None:
    rows = ROWS | {"input_ids": [[1], [4, 5], [7], [3, 2, 1], [6]], "text": list("abcde")}
    made = datasets.Dataset.from_dict(rows)
    clients = fl.data.from_huggingface(made, "speaker_id")
    assert clients[1][1] == {"input_ids": [7], "labels": 2, "text": "c"}
    assert [len(client) for client in clients] == [2, 2, 1]
    ragged = fl.data.from_huggingface(made.with_format("torch"), "speaker_id", columns=["input_ids", "label"])
    assert ragged[0][0]["input_ids"].tolist() == [4, 5]


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids).mean(1))


def test_they_train_alike_in_both_forms() -> None:
    """As tensors and sample by sample: the same bits."""
    made = datasets.Dataset.from_dict(ROWS).with_format("torch")
    fast = fl.data.from_huggingface(made, "speaker_id")
    slow = [
        [{name: values[i] for name, values in client.items()} for i in range(len(client["labels"]))] for client in fast
    ]
    torch.manual_seed(0)
    model, local = Bag(), fl.LocalTraining(lr=0.1, epochs=2, batch_size=2)
    ends = []
    for clients in (fast, slow):
        federation = fl.Federation(model, clients, "fedlesam-s", local, execution=fl.Execution(threads=1))
        list(federation.run(2))
        ends.append(federation.weights)
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("given", "client", "match"),
    [
        (lambda d: datasets.DatasetDict(train=d, test=d), "speaker_id", "this is a dict of 'train', 'test'; give one"),
        (lambda d: d.to_iterable_dataset(), "speaker_id", "expected a map-style .* streaming=False"),
        (lambda d: d, "speaker", "unknown column 'speaker': did you mean 'speaker_id'"),
        (lambda d: d.select([]), "speaker_id", "the dataset has no rows"),
        (lambda d: d.select_columns(["speaker_id"]), "speaker_id", "no column other than speaker_id"),
        (
            lambda d: d.map(lambda row: {"speaker_id": None}, load_from_cache_file=False),
            "speaker_id",
            "row 0 has no spe",
        ),
    ],
)
def test_bad_datasets(given: Any, client: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fl.data.from_huggingface(given(datasets.Dataset.from_dict(ROWS)), client)
