"""The real data sets with natural clients and of texts: their published counts, and that something is learnt."""

from pathlib import Path

import pytest

from fedlesam.data import load
from fedlesam.data.splits import make_split
from fedlesam.runs.config import RunConfig, resolve
from fedlesam.runs.runner import execute

FOLDER = Path("/work/shared/data")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / "shakespeare").is_dir(), reason=f"Shakespeare's roles are not in {FOLDER}"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLESAM_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [
        ("mnist-writers", 60_000, 10_000, 10),
        ("20newsgroups", 11_314, 7_532, 20),
        ("sst2", 6_920, 1_821, 2),
        ("trec", 5_452, 500, 6),
    ],
)
def test_published_counts(name: str, train: int, test: int, classes: int) -> None:
    data = load(name, FOLDER)
    assert (len(data.train), len(data.test), len(data.classes)) == (train, test, classes)


def test_writers() -> None:
    sizes = make_split("natural", load("mnist-writers", FOLDER), None, 0).sizes
    assert (len(sizes), sizes.min(), sizes.max()) == (539, 19, 131)


def test_no_header_is_left_in_the_posts() -> None:
    """`Nntp-Posting-Host:` is in two fifths of the headers; of the texts below them few speak of it."""
    data = load("20newsgroups", FOLDER)
    place = data.vocabulary.index("nntp") if "nntp" in data.vocabulary else None
    assert place is None or (data.train.x == place).any(1).float().mean() < 0.01


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"data": "shakespeare", "split": "natural", "model": "char-gru:hidden=32", "steps": 5, "lr": 1.0}, 0.2),
        ({"data": "mnist-writers", "split": "natural", "model": "mlp"}, 0.8),
        ({"data": "sst2", "split": "iid", "clients": 20, "model": "text-bag:width=32", "lr": 0.5, "epochs": 3}, 0.6),
    ],
    ids=["shakespeare", "mnist-writers", "sst2"],
)
def test_something_is_learnt(settings: dict[str, object], least: float, tmp_path: Path) -> None:
    config = RunConfig(
        **settings, algorithm="fedavg", data_dir=str(FOLDER), active=10, rounds=10, evaluate_every=10, threads=1,
        engine="stacked",
    )  # fmt: skip
    assert execute(resolve(config), tmp_path / "run")["accuracy"]["last"] > least
