"""Two hosts, where network namespaces can be made."""

import shutil
from collections.abc import Iterator

import pytest
from hosts import Hosts


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
