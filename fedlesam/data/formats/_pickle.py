"""Read the pickles of the CIFAR archives without running anything in them.

A name in the pickle becomes a `_Recorded`: it keeps what it is called with and the state it is given, and does nothing.
The array is built from that record afterwards. The interpreter is the Python form of Python's own, because the C form
reserves memory by numbers that it finds in the file.
"""

import io
import math
import pickle
import struct
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedlesam.core.names import one_line

_NAMES = {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
_NAMES |= {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
_NAMES |= {(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
_DTYPES = ("u1", "i4", "i8")


class _Foreign(ValueError):
    pass


class _Recorded:
    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name, self.args = name, args
        self.state: Any = None

    def __call__(self, *args: Any) -> "_Recorded":
        return _Recorded(self.name, args)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):
    """Refuses all names but those of a numpy array. Keys must be text: the hash of a deep tuple overflows the stack."""

    if TYPE_CHECKING:
        stack: list[Any]

        def read(self, n: int) -> bytes: ...
        def append(self, value: Any) -> None: ...
        def pop_mark(self) -> list[Any]: ...

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise _Foreign(f"names the foreign class {one_line(f'{module}.{name}')}; refused, nothing of it was run")
        return _Recorded(name)

    def _update(self, items: list[Any]) -> None:
        if not all(isinstance(key, bytes | str) for key in items[::2]):
            raise ValueError("holds a dictionary whose keys are not text")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        self._update([self.stack.pop(-2), self.stack.pop()])

    def _set_items(self) -> None:
        self._update(self.pop_mark())

    def _make_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._update(items)

    def _byte_array(self) -> None:
        self.append(self.read(struct.unpack("<Q", self.read(8))[0]))

    dispatch: ClassVar[dict[int, Any]] = pickle._Unpickler.dispatch | {
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.DICT[0]: _make_dict,
        pickle.BYTEARRAY8[0]: _byte_array,
    }
    for _sets in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET):
        del dispatch[_sets[0]]


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _array(recorded: _Recorded) -> Any:
    """The array that the recorded calls describe: of whole numbers, little-endian."""
    if recorded.name == "_frombuffer":
        raw, dtype, shape, order = recorded.args
        fortran = _text(order) == "F"
    else:
        _, shape, dtype, fortran, raw = recorded.state
    code, order = _text(dtype.args[0]), _text(dtype.state[1])
    if code not in _DTYPES or order not in ("|", "<", "="):
        raise ValueError(f"holds an array of type {code!r}; expected one of {', '.join(_DTYPES)}, little-endian")
    if isinstance(raw, _Recorded):
        raw = raw.args[0].encode("latin1")
    if math.prod(shape) * int(code[1]) != len(raw):
        raise ValueError(f"holds an array of shape {shape} with {len(raw):,} bytes")
    return np.frombuffer(raw, f"<{code}").reshape(shape, order="F" if fortran else "C")


def safe_loads(data: bytes, where: str) -> dict[str, Any]:
    """Read the dictionary in a pickle.

    Args:
        data: The pickle.
        where: The file's name, for error messages.

    Returns:
        The values by their keys as text; arrays are numpy arrays of whole numbers.

    Raises:
        ValueError: The pickle is damaged, holds something else, or names anything but a numpy array.
    """
    file = io.BytesIO(data)
    try:
        loaded = _Unpickler(file, encoding="bytes").load()
        if not isinstance(loaded, dict):
            raise ValueError(f"holds a {type(loaded).__name__}, not a dictionary")
        if file.read(1):
            raise ValueError("there are bytes after its end")
        return {_text(key): _array(v) if isinstance(v, _Recorded) else v for key, v in loaded.items()}
    except _Foreign as error:
        raise ValueError(f"{where}: {error}; get the official file") from None
    except (Exception, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{where}: not a readable pickle ({one_line(reason)}); truncated or damaged, get it again"
        ) from error
