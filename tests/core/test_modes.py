"""The files of a run folder have the permissions that the user's umask says, whatever wrote them."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlesam.core import disk
from fedlesam.runs.config import RunConfig
from fedlesam.runs.runner import execute

pytestmark = pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_every_file_of_a_run(umask: int, tmp_path: Path) -> None:
    seen: dict[str, int] = {}

    def look(_: object) -> None:
        for path in tmp_path.rglob("*"):
            if path.is_file():
                seen[path.name] = stat.S_IMODE(path.stat().st_mode)

    config = RunConfig(data="digits", model="mlp", clients=3, rounds=3, algorithm="fedlesam-s", checkpoint_every=1)
    execute(config, tmp_path / "run", watch=look)
    look(None)
    assert {"model.safetensors", "split.safetensors", "summary.json", "round000001.safetensors"} <= seen.keys()
    assert not {name: oct(mode) for name, mode in seen.items() if mode != 0o666 & ~umask}


def test_a_link_has_the_permissions_of_its_file(umask: int, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1")
    disk.link(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").samefile(tmp_path / "one")
