"""The networks for texts: padding counts for nothing, both engines agree, and a run's model is found again."""

from pathlib import Path

import pytest
import torch
from text_files import write_lines, write_roles

import fedlesam as fl
from fedlesam.models.catalogue import make_model
from fedlesam.runs.config import RunConfig, resolve
from fedlesam.runs.runner import execute

TEXT = [
    "char-gru:hidden=6,width=3",
    "text-bag:width=5",
    "text-bag:width=5,hidden=4",
    "text-transformer:width=8,heads=2",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLESAM_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("spec", TEXT[1:])
def test_padding_counts_for_nothing(spec: str) -> None:
    short, long = (make_model(spec, (length,), 3, 0, vocabulary=9) for length in (4, 7))
    state = {name: value if name != "place" else value[:4] for name, value in long.state_dict().items()}
    short.load_state_dict(state)
    words = torch.tensor([[2, 3, 1, 8], [5, 1, 0, 0]], dtype=torch.int32)
    padded = torch.cat([words, torch.zeros(2, 3, dtype=torch.int32)], 1)
    torch.testing.assert_close(short(words), long(padded))


def test_a_bag_is_a_function_of_the_mean_word() -> None:
    model = make_model("text-bag:width=5", (4,), 3, 0, vocabulary=9)
    weights = model.state_dict()
    mean = weights["embed.weight"][[2, 5, 5]].mean(0)
    mean = (mean - mean.mean()) / (mean.var(correction=0) + 1e-5).sqrt()
    expected = weights["head.weight"] @ mean + weights["head.bias"]
    torch.testing.assert_close(model(torch.tensor([[2, 5, 5, 0]]))[0], expected)


@pytest.mark.parametrize("spec", TEXT)
@pytest.mark.parametrize("method", ["fedsam", "fedlesam-s"])
def test_both_engines_agree(spec: str, method: str) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = (9, 9, 6)
    x = [torch.randint(1, 9, (n, 7), generator=draw, dtype=torch.int32) for n in sizes]
    clients = [(part, torch.randint(0, 3, (len(part),), generator=draw)) for part in x]
    ends = []
    for engine in ("plain", "stacked"):
        model = make_model(spec, (7,), 3, 0, vocabulary=9).double()
        how = fl.Execution(engine=engine, threads=1)
        local = fl.LocalTraining(lr=0.1, epochs=1, batch_size=3)
        federation = fl.Federation(model, clients, method, local, execution=how)
        for _ in federation.run(2):
            pass
        ends.append(federation.weights)
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)


def test_models_and_data_must_fit() -> None:
    with pytest.raises(ValueError, match="model char-gru: reads token numbers, but the samples are something else"):
        make_model("char-gru", (1, 8, 8), 10, 0)
    with pytest.raises(
        ValueError, match="model mlp: the samples are token numbers, which it does not read; use char-gru"
    ):
        make_model("mlp", (80,), 10, 0, vocabulary=9)
    with pytest.raises(ValueError, match="width must be a multiple of the 4 heads, got 6"):
        make_model("text-transformer:width=6", (80,), 10, 0, vocabulary=9)
    with pytest.raises(ValueError, match="hidden must be a whole number from 1, got 0"):
        make_model("char-gru:hidden=0", (80,), 10, 0, vocabulary=9)


def test_shakespeare_by_name(tmp_path: Path) -> None:
    """The run, its resume by repetition, and its model without the data."""
    write_roles(tmp_path / "data", {"HAMLET": 30, "OPHELIA": 16, "GHOST": 14})
    config = RunConfig(
        algorithm="fedlesam-s", data="shakespeare:stride=40", data_dir=str(tmp_path / "data"), split="natural",
        model="char-gru:hidden=8", active=2, rounds=2, threads=1,
    )  # fmt: skip
    summary = execute(resolve(config), tmp_path / "run")
    assert (summary["sample_shape"], summary["classes"], summary["vocabulary"]) == ([80], 81, 81)
    model = fl.load_run(tmp_path / "run").model
    assert model(torch.zeros(2, 80, dtype=torch.int64)).shape == (2, 81)


def test_a_text_classifier_learns(tmp_path: Path) -> None:
    good, bad = ["good", "fine", "great"], ["bad", "poor", "awful"]
    rows = [
        {"text": f"a {word} film {i}", "label": k}
        for k, words in enumerate((bad, good))
        for word in words
        for i in range(9)
    ]
    write_lines(tmp_path / "train.jsonl", rows)
    write_lines(tmp_path / "test.jsonl", rows)
    config = RunConfig(
        algorithm="fedavg", data=f"texts:{tmp_path},length=6", split="iid", clients=3, model="text-bag:width=8",
        active=1.0, rounds=6, epochs=4, batch_size=6, lr=1.0, threads=1,
    )  # fmt: skip
    assert execute(resolve(config), tmp_path / "run")["accuracy"]["last"] > 0.95
