from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh cache for every test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FEDLESAM_CACHE", str(folder))
    return folder
