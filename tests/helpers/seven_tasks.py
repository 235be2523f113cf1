"""The seven kinds of task, each with clients of another form, and its loss once more: plain arithmetic on dicts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from oracle import Weights
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedlesam import Task

SIZES = (7, 12, 7, 9, 12)
Plain = Callable[[Weights, Any], Tensor]
"""The loss of weights and a batch of samples, in the form of `Kind.whole`."""


@dataclasses.dataclass
class Kind:
    """One kind of task."""

    task: Task
    model: nn.Module
    clients: list[Any]
    whole: list[dict[str, Tensor]]
    """The same samples as tensors, for the oracle."""
    plain: Plain

    def slope(self, p: Weights, rows: Tensor, clients: Tensor) -> Weights:
        """The gradient of the samples `rows` of a client."""
        leaves = {k: t.detach().requires_grad_() for k, t in p.items()}
        samples = {k: t[rows] for k, t in self.whole[int(clients[0])].items()}
        found = torch.autograd.grad(self.plain(leaves, samples), list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    @property
    def rows(self) -> list[tuple[Tensor, Tensor]]:
        """The oracle's clients: which sample, and whose."""
        return [(torch.arange(n), torch.full((n,), i)) for i, n in enumerate(SIZES)]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(make: Callable[[int, int], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [make(i, n) for i, n in enumerate(SIZES)]


def seeded(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(drawn(50 + number, *p.shape).mul(0.5).to(p.dtype))
    return model


def negative_log(scores: Tensor, y: Tensor) -> Tensor:
    """Of the right class, scores (n, classes)."""
    return -(scores - scores.exp().sum(1, keepdim=True).log())[torch.arange(len(y)), y]


def yes_or_no(z: Tensor, y: Tensor) -> Tensor:
    p = 1 / (1 + (-z).exp())
    return -(y * p.log() + (1 - y) * (1 - p).log())


class TwoInputs(nn.Module):
    """Called with named inputs, or with two in a row."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, outputs).double(), nn.Linear(2, outputs).double()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.tanh(self.left(left)) + self.right(right)


def two_inputs(p: Weights, b: dict[str, Tensor]) -> Tensor:
    one = torch.tanh(b["left"] @ p["left.weight"].T + p["left.bias"])
    return one + b["right"] @ p["right.weight"].T + p["right.bias"]


def two_of(i: int, n: int) -> dict[str, Tensor]:
    return {"left": drawn(i, n, 3), "right": drawn(10 + i, n, 2)}


def classification() -> Kind:
    """A dict of tensors, a model with two named inputs."""
    data = whole(lambda i, n: {**two_of(i, n), "labels": (drawn(20 + i, n) * 9).long().abs() % 3})
    return Kind(
        Task.classification(),
        seeded(TwoInputs(3)),
        list(data),
        data,
        lambda p, b: negative_log(two_inputs(p, b), b["labels"]).mean(),
    )


def binary() -> Kind:
    """A pair with whole numbers as targets, and one output."""
    data = whole(lambda i, n: {"x": drawn(i, n, 4), "y": (drawn(20 + i, n) > 0).long()})
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).double()
    return Kind(
        Task.binary(),
        seeded(model),
        [(d["x"], d["y"]) for d in data],
        data,
        lambda p, b: yes_or_no((b["x"] @ p["0.weight"].T + p["0.bias"])[:, 0], b["y"]).mean(),
    )


def multilabel() -> Kind:
    """A nested tuple: two inputs, and targets."""
    data = whole(lambda i, n: {**two_of(i, n), "y": (drawn(20 + i, n, 2) > 0).double()})
    return Kind(
        Task.multilabel(),
        seeded(TwoInputs(2)),
        [((d["left"], d["right"]), d["y"]) for d in data],
        data,
        lambda p, b: yes_or_no(two_inputs(p, b), b["y"]).mean(),
    )


def regression() -> Kind:
    """A TensorDataset of three tensors; inputs and targets are told."""
    data = whole(lambda i, n: {**two_of(i, n), "y": drawn(20 + i, n, 2)})
    return Kind(
        Task.regression(inputs=lambda batch: batch[:2], targets=lambda batch: batch[2]),
        seeded(TwoInputs(2)),
        [TensorDataset(d["left"], d["right"], d["y"]) for d in data],
        data,
        lambda p, b: ((two_inputs(p, b) - b["y"]) ** 2).mean(),
    )


LENGTH, IGNORED = 5, -100


def padded(texts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Ragged text to one length; the targets are the next tokens."""
    tokens = torch.zeros(len(texts), LENGTH, dtype=torch.int64)
    labels = torch.full((len(texts), LENGTH), IGNORED)
    for row, text in enumerate(texts):
        said = text["text"]
        tokens[row, : len(said) - 1], labels[row, : len(said) - 1] = said[:-1], said[1:]
    return {"input": tokens, "labels": labels}


def language_model() -> Kind:
    """A list of ragged samples, put together by `collate`."""
    texts = [
        [{"text": (drawn(100 * i + j, 2 + j % LENGTH) * 9).long().abs() % 6} for j in range(n)]
        for i, n in enumerate(SIZES)
    ]
    data = [padded(client) for client in texts]

    def plain(p: Weights, b: dict[str, Tensor]) -> Tensor:
        scores = (p["0.weight"][b["input"]] @ p["1.weight"].T + p["1.bias"]).reshape(-1, 6)
        known = b["labels"].reshape(-1) != IGNORED
        return negative_log(scores[known], b["labels"].reshape(-1)[known]).mean()

    task = Task.language_model(collate=padded, inputs=lambda batch: batch["input"])
    return Kind(task, seeded(nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6)).double()), list(texts), data, plain)


def segmentation() -> Kind:
    """Pictures with a class for each pixel, some of which do not count."""

    def make(i: int, n: int) -> dict[str, Tensor]:
        y = (drawn(20 + i, n, 4, 4) * 9).long().abs() % 3
        y[0, :2] = 255
        return {"x": drawn(i, n, 2, 4, 4), "y": y}

    def plain(p: Weights, b: dict[str, Tensor]) -> Tensor:
        pixels = b["x"].movedim(1, -1).reshape(-1, 2)
        scores = pixels @ p["0.weight"][:, :, 0, 0].T + p["0.bias"]
        known = b["y"].reshape(-1) != 255
        return negative_log(scores[known], b["y"].reshape(-1)[known]).mean()

    data = whole(make)
    model = seeded(nn.Sequential(nn.Conv2d(2, 3, 1)).double())
    return Kind(Task.segmentation(), model, [(d["x"], d["y"]) for d in data], data, plain)


@dataclasses.dataclass
class Output:
    """As a model of transformers returns it."""

    loss: Tensor
    logits: Tensor


class Transformer(nn.Module):
    """Takes labels and returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4).double(), nn.Linear(4, 3).double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Output:
        seen = self.embed(input_ids) * attention_mask[..., None]
        logits = self.head(seen.sum(1) / attention_mask.sum(1, keepdim=True))
        return Output(nn.functional.cross_entropy(logits, labels), logits)


def huggingface() -> Kind:
    """A dict of token numbers, a mask and labels, all given to the model."""

    def make(i: int, n: int) -> dict[str, Tensor]:
        mask = (drawn(40 + i, n, 5) > 0).double()
        mask[:, 0] = 1
        ids = (drawn(i, n, 5) * 9).long().abs() % 6
        return {"input_ids": ids, "attention_mask": mask, "labels": (drawn(20 + i, n) * 9).long().abs() % 3}

    def plain(p: Weights, b: dict[str, Tensor]) -> Tensor:
        seen = p["embed.weight"][b["input_ids"]] * b["attention_mask"][..., None]
        mean = seen.sum(1) / b["attention_mask"].sum(1)[:, None]
        return negative_log(mean @ p["head.weight"].T + p["head.bias"], b["labels"]).mean()

    data = whole(make)
    return Kind(Task.huggingface(), seeded(Transformer()), list(data), data, plain)


KINDS: dict[str, Callable[[], Kind]] = {
    make.__name__: make
    for make in (classification, binary, multilabel, regression, language_model, segmentation, huggingface)
}
