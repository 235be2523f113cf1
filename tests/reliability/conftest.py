"""Uninterrupted runs to compare with, computed once."""

import pytest
from harness import References


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))
