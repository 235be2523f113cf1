"""Named tensors as flat dicts, files and messages: the one codec for state.

The state of a slot is a dict of tensors. A file or a message holds several slots in one flat dict with keys
"slot/name"; a tensor outside any slot, such as the weights, has a plain key. Files and messages are in the safetensors
format with JSON metadata, so nothing is unpickled.
"""

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedlesam.core import disk
from fedlesam.core.slots import State

T = TypeVar("T")

SEPARATOR = re.compile(r"[/.]")
"""Between slot and name: "/", and "." in files of earlier versions. No slot has either in its name."""

UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a damaged file may raise."""


def flatten(**slots: Tensor | Mapping[str, Tensor]) -> State:
    """One flat dict of several slots.

    Args:
        **slots: a slot's state by the slot's name, or a single tensor.

    Returns:
        The tensors: `flatten(weights=w, correction={"c": c})` is `{"weights": w, "correction/c": c}`.
    """
    flat: State = {}
    for slot, value in slots.items():
        if isinstance(value, Tensor):
            flat[slot] = value
        else:
            for name, tensor in value.items():
                flat[f"{slot}/{name}"] = tensor
    return flat


def unflatten(flat: Mapping[str, T], *slots: str) -> dict[str, dict[str, T]]:
    """The slots of a flat dict: the inverse of `flatten`, without single tensors.

    Args:
        flat: the tensors by "slot/name".
        *slots: the slots there may be.

    Returns:
        The state of each slot, empty where `flat` has no tensor of it.

    Raises:
        ValueError: a tensor belongs to none of the slots.
    """
    found: dict[str, dict[str, T]] = {slot: {} for slot in slots}
    for key, tensor in flat.items():
        slot, *name = SEPARATOR.split(key, maxsplit=1)
        if slot not in found or not name:
            raise ValueError(f"unexpected tensor {key!r}; expected the slots {', '.join(slots)}")
        found[slot][name[0]] = tensor
    return found


def unshare(tensors: Mapping[str, Tensor]) -> State:
    """Contiguous tensors without common memory, as a safetensors file requires.

    Args:
        tensors: tensors by name; those that need no copy are returned as they are.
    """
    seen: set[int] = set()
    own: State = {}
    for name, tensor in tensors.items():
        dense = tensor.contiguous()
        storage = dense.untyped_storage().data_ptr()
        own[name] = dense.clone() if storage in seen else dense
        seen.add(storage)
    return own


def to_bytes(tensors: Mapping[str, Tensor], **metadata: Any) -> bytes:
    """Tensors and metadata as the content of a safetensors file.

    Args:
        tensors: tensors by name, on any device.
        **metadata: anything that JSON holds.
    """
    return safetensors.torch.save(unshare(tensors), metadata=_encode(metadata))


def from_bytes(content: bytes) -> tuple[State, dict[str, Any]]:
    """The tensors and the metadata of `to_bytes`.

    Args:
        content: the bytes of a safetensors file.
    """
    length = int.from_bytes(content[:8], "little")
    tensors = safetensors.torch.load(content)
    return tensors, _decode(json.loads(content[8 : 8 + length]).get("__metadata__"))


def save(path: Path, tensors: Mapping[str, Tensor], *, sync: disk.Sync = True, **metadata: Any) -> None:
    """Write a safetensors file; it replaces the one at `path` only when it is complete.

    Args:
        path: the file.
        tensors: tensors by name, on any device.
        sync: whether the file must survive a power loss from now on.
        **metadata: anything that JSON holds.
    """
    with disk.replacing(path, sync) as beside:
        safetensors.torch.save_file(unshare(tensors), beside, metadata=_encode(metadata))


class Rows(NamedTuple):
    """A tensor that is written piece by piece and never held whole."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    """Of all pieces."""
    pieces: Iterable[Tensor]
    """Its rows, in their order."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Rows":
        """A tensor in one piece.

        Args:
            tensor: the tensor.
        """
        return cls(tuple(tensor.shape), tensor.dtype, [tensor])


def save_rows(path: Path, tensors: Mapping[str, Rows], *, sync: disk.Sync = True, **metadata: Any) -> disk.FileDigest:
    """Write a safetensors file piece by piece, and return its digest.

    Args:
        path: the file.
        tensors: by name.
        sync: whether the file must survive a power loss from now on.
        **metadata: anything that JSON holds.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # keeps all of them aligned
    header: dict[str, Any] = {"__metadata__": _encode(metadata) or {}}
    end = 0
    for name, rows in ordered:
        start, end = end, end + math.prod(rows.shape) * rows.dtype.itemsize
        header[name] = {"dtype": _dtype_name(rows.dtype), "shape": rows.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for _, rows in ordered:
            for piece in rows.pieces:
                yield piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

    with disk.replacing(path, sync) as beside:
        return disk.write_parts(beside, parts())


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    """What safetensors calls it."""
    content = safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})
    return str(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["x"]["dtype"])


def load(path: Path, device: torch.device | str = "cpu") -> tuple[State, dict[str, Any]]:
    """The tensors and the metadata of a file. On the CPU they are mapped: a page is read when it is used.

    Args:
        path: the file.
        device: where the tensors go.
    """
    with safe_open(path, framework="pt", device=str(device)) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, _decode(file.metadata())  # noqa: SIM118


SMALL = 1 << 16
"""Bytes of a file that is read whole: mapping it takes twice as long."""


def load_small(path: Path) -> tuple[State, dict[str, Any]]:
    """As `load`, on the CPU; a small file is read instead of mapped.

    Args:
        path: the file.
    """
    with path.open("rb", buffering=0) as file:
        content = file.read(SMALL)
    return load(path) if len(content) == SMALL else from_bytes(content)


def size_in_bytes(*states: Mapping[str, Tensor]) -> int:
    """The bytes of all tensors; one that occurs twice counts twice.

    Args:
        *states: tensors by name.
    """
    return sum(tensor.nbytes for state in states for tensor in state.values())


def _encode(metadata: Mapping[str, Any]) -> dict[str, str] | None:
    """None without any: of an empty dict with no tensors safetensors makes a header that it cannot read."""
    return {name: json.dumps(value) for name, value in metadata.items()} or None


def _decode(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in (metadata or {}).items()}
