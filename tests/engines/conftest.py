"""Two hosts, where network namespaces can be made; and nothing that outlives a test."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts
from workers import children, trackers, wait_for


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("two hosts need network namespaces: iproute2 is not installed")
    pair = Hosts()
    try:
        try:
            pair.make()
        except OSError as error:
            pytest.skip(f"two hosts need network namespaces, which cannot be made here: {error}")
        yield pair
    finally:
        pair.remove()


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """No process and no temporary folder outlives its test."""
    real, made = tempfile.mkdtemp, []

    def mkdtemp(*args: Any, **kwargs: Any) -> str:
        made.append(real(*args, **kwargs))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", mkdtemp)
        yield
    gc.collect()
    wait_for(lambda: children(os.getpid()) <= trackers())
    assert not [path for path in made if "fedlesam-" in path and Path(path).exists()]
