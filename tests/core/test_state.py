"""The codec for state: flat dicts, bytes and files, and the files of earlier versions."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedlesam.core import state
from fedlesam.core.messages import Memory
from fedlesam.engines.store import Store, anchor_file, client_file

W = torch.arange(6.0)
SLOTS = {"buffers": {"layer.0/mean": W[:2], "n": torch.tensor(3)}, "correction": {"c": W + 1}, "perturbation": {}}


def test_slots_come_back() -> None:
    flat = state.flatten(weights=W, **SLOTS)
    assert list(flat) == ["weights", "buffers/layer.0/mean", "buffers/n", "correction/c"]
    assert flat.pop("weights") is W
    assert state.unflatten(flat, *SLOTS) == SLOTS


def test_names_of_earlier_versions_are_read() -> None:
    old = {"buffers.layer.0/mean": W[:2], "buffers.n": SLOTS["buffers"]["n"], "correction.c": SLOTS["correction"]["c"]}
    found = state.unflatten(old, *SLOTS)
    assert found.keys() == SLOTS.keys()
    assert found["buffers"].keys() == SLOTS["buffers"].keys()
    assert found["correction"].keys() == {"c"}


@pytest.mark.parametrize("name", ["server/m", "correction", "other.c", ""])
def test_a_tensor_of_no_slot_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unexpected tensor"):
        state.unflatten({name: W}, *SLOTS)


@pytest.mark.parametrize("tensors", [{}, {"a": W, "again": W, "part": W[1:4], "column": W.view(2, 3)[:, 1]}])
@pytest.mark.parametrize("metadata", [{}, {"message": {"one": [1, None]}, "text": "é"}])
def test_bytes_and_files(tensors: dict[str, torch.Tensor], metadata: dict[str, object], tmp_path: Path) -> None:
    """Also nothing at all, and tensors that share memory."""
    state.save(tmp_path / "x", tensors, **metadata)
    for found, read in (state.from_bytes(state.to_bytes(tensors, **metadata)), state.load(tmp_path / "x")):
        assert read == metadata
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_store_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    save_file({"anchor": W}, tmp_path / anchor_file(4), metadata={})
    shared = {"anchor": json.dumps(["perturbation.old"])}
    save_file({"correction.c": W + 1}, tmp_path / client_file(4, 2), metadata=shared)
    save_file({"correction.c": W + 2, "perturbation.mu": W}, tmp_path / client_file(4, 3), metadata={"anchor": "[]"})
    for store in (Store(), Store(tmp_path / "own", 0)):
        store.load_files(tmp_path, {2: 4, 3: 4, 5: 1}, {5})
        assert store[5] == Memory()
        assert torch.equal(store[2].perturbation["old"], W)
        assert torch.equal(store[2].correction["c"], W + 1)
        assert store[3].perturbation.keys() == {"mu"}
