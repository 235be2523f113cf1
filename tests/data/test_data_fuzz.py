"""Truncated and flipped bytes: a ValueError, or data of the right form, and never anything else."""

from pathlib import Path

import numpy as np
import pytest
from data_files import cifar_binary, cifar_python, idx, images, tar
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlesam.data.archive import tar_members
from fedlesam.data.formats.cifar import _pickled, _records
from fedlesam.data.formats.idx import parse
from fedlesam.data.official import OFFICIAL
from fedlesam.data.unpickle import safe_loads

CIFAR = OFFICIAL["cifar10"]
MADE = images("cifar10")
PICKLED = cifar_python(MADE)["data_batch_1"]
HEADS = [i for i in range(len(PICKLED)) if i < 400 or i > len(PICKLED) - 1500]
"""Not the pixels: damage there is not to be seen without a checksum."""

changes = st.lists(st.tuples(st.integers(0, 2**30), st.integers(1, 255)), min_size=1, max_size=3)


def damaged(data: bytes, where: list[tuple[int, int]], places: list[int] | None = None) -> bytes:
    out = bytearray(data)
    for place, change in where:
        out[places[place % len(places)] if places else place % len(out)] ^= change
    return bytes(out)


@settings(max_examples=300)
@given(changes)
def test_flipped_pickle(where: list[tuple[int, int]]) -> None:
    try:
        x, y = _pickled(damaged(PICKLED, where, HEADS), "here", CIFAR)
    except ValueError as error:
        assert str(error).startswith("here: ")
    else:
        assert x.dtype == np.uint8
        assert x.shape[1:] == (3, 32, 32)
        assert len(x) == len(y)


@settings(max_examples=60)
@given(st.integers(0, len(PICKLED) - 1))
def test_truncated_pickle(size: int) -> None:
    with pytest.raises(ValueError, match=r"^here: "):
        safe_loads(PICKLED[:size], "here")


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_any_bytes_as_a_pickle(data: bytes) -> None:
    try:
        assert isinstance(safe_loads(data, "here"), dict)
    except ValueError as error:
        assert str(error).startswith("here: ")


@settings(max_examples=60)
@given(changes, st.integers(0, 3073 * 10))
def test_damaged_records(where: list[tuple[int, int]], size: int) -> None:
    data = damaged(cifar_binary(MADE)["data_batch_1.bin"], where)[:size]
    try:
        x, y = _records(data, "here", CIFAR)
    except ValueError as error:
        assert "here: " in str(error)
        assert size % 3073
    else:
        assert len(x) == len(y) == size // 3073


IDX = idx(images("mnist").train_x[:, 0])


@settings(max_examples=150)
@given(changes, st.booleans())
def test_damaged_idx(where: list[tuple[int, int]], in_header: bool) -> None:
    try:
        found = parse(damaged(IDX, where, list(range(16)) if in_header else None), 3, "here")
    except ValueError as error:
        assert "here: " in str(error)
    else:
        assert found.size == len(IDX) - 16


@settings(max_examples=60)
@given(st.integers(0, len(IDX) - 1))
def test_truncated_idx(size: int) -> None:
    with pytest.raises(ValueError, match=r"^here: "):
        parse(IDX[:size], 3, "here")


MEMBERS = {f"cifar-10-batches-bin/{i}": bytes(range(256)) * 20 for i in range(3)}


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_damaged_archive(mode: str, tmp_path: Path) -> None:
    """Gzipped, every damage to the contents is seen; a bare tar has only its headers to check."""
    whole = tar(MEMBERS, mode)
    path = tmp_path / "x"
    wanted = {name.split("/")[1]: data for name, data in MEMBERS.items()}

    @settings(max_examples=200)
    @given(changes, st.integers(0, len(whole)))
    def run(where: list[tuple[int, int]], size: int) -> None:
        path.write_bytes(damaged(whole, where)[: size if where[0][1] % 2 else None])
        try:
            found = tar_members(path, wanted)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            if mode == "w:gz":
                assert found in (wanted, {})
            assert set(found) <= set(wanted)

    run()
