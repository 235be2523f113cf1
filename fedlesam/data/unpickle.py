"""Read the pickles of the CIFAR archives without running anything they say.

The interpreter is Python's own in its Python form (the C form reserves memory by numbers it finds in the file), cut
down to the instructions that plain data needs. The three names that a numpy array needs stand for small classes here,
not for numpy's: no code outside this file is called with what the pickle holds.
"""

import io
import math
import pickle
import struct
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedlesam.names import one_line

_DTYPES: dict[str, np.dtype[Any]] = {"u1": np.dtype("u1"), "i4": np.dtype("<i4"), "i8": np.dtype("<i8")}


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


class _Dtype:
    __slots__ = ("dtype",)

    def __init__(self, code: Any = "", *_: Any) -> None:
        if _text(code) not in _DTYPES:
            raise ValueError(f"holds an array of type {_text(code)!r}; expected one of {', '.join(_DTYPES)}")
        self.dtype = _DTYPES[_text(code)]

    def __setstate__(self, state: Any) -> None:
        if _text(state[1]) not in ("|", "<", "="):
            raise ValueError(f"holds an array of byte order {_text(state[1])!r}; expected little-endian")


def _array(shape: Any, dtype: Any, fortran: bool, raw: Any) -> Any:
    whole = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape) and len(shape) <= 4
    if not (whole and isinstance(dtype, _Dtype) and isinstance(raw, bytes | bytearray)):
        raise ValueError("holds an array in a form that is not known")
    if math.prod(shape) * dtype.dtype.itemsize != len(raw):
        raise ValueError(f"holds an array of shape {shape} with {len(raw):,} bytes")
    return np.frombuffer(bytes(raw), dtype.dtype).reshape(shape, order="F" if fortran else "C")


class _Array:
    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        self.value = _array(shape, dtype, bool(fortran), raw)


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _frombuffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    return _Array(_array(shape, dtype, _text(order) == "F", raw))


def _latin1(text: str, encoding: Any) -> bytes:
    if _text(encoding) != "latin1":
        raise ValueError(f"holds bytes in the encoding {_text(encoding)!r}; expected latin1")
    return text.encode("latin1")


_NAMES: dict[tuple[str, str], Any] = {("numpy", "ndarray"): _Array, ("numpy", "dtype"): _Dtype}
_NAMES |= {(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")}
_NAMES |= {(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")}
_NAMES |= {("_codecs", "encode"): _latin1}

_INSTRUCTIONS = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT",
    "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "APPEND",
    "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT",
    "LONG_BINPUT", "MEMOIZE", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
)  # fmt: skip


class _Foreign(ValueError):
    pass


class _Restricted(pickle._Unpickler):
    """Refuses every name but the few above, every instruction that data does not need, and keys that are not text."""

    if TYPE_CHECKING:
        stack: list[Any]

        def read(self, n: int) -> bytes: ...
        def append(self, value: Any) -> None: ...
        def pop_mark(self) -> list[Any]: ...

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            what = one_line(f"{module}.{name}")
            raise _Foreign(f"names the foreign class {what}; refused, nothing of it was run") from None

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, _Array | _Dtype):
            raise ValueError(f"sets the state of a {type(target).__name__}")
        target.__setstate__(state)

    def set_item(self) -> None:
        value = self.stack.pop()
        self._put([self.stack.pop(), value])

    def set_items(self) -> None:
        self._put(self.pop_mark())

    def make_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._put(items)

    def _put(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or not all(isinstance(key, bytes | str) for key in items[::2]):
            raise ValueError("holds a dictionary whose keys are not text")
        target.update(zip(items[::2], items[1::2], strict=True))

    def byte_array(self) -> None:
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(length)))

    dispatch: ClassVar[dict[int, Any]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _INSTRUCTIONS
    } | {
        pickle.BUILD[0]: build,
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
        pickle.DICT[0]: make_dict,
        pickle.BYTEARRAY8[0]: byte_array,
    }


def safe_loads(data: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle, with text for its keys and numpy arrays of whole numbers where it holds arrays."""
    try:
        file = io.BytesIO(data)
        loaded = _Restricted(file, encoding="bytes").load()
        if file.read(1):
            raise ValueError("it goes on after its end")
    except _Foreign as error:
        raise ValueError(f"{where}: {error}; get the official file") from None
    except (Exception, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{where}: not a readable pickle ({one_line(reason)}); truncated or damaged, get it again"
        ) from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{where}: holds a {type(loaded).__name__}, not a dictionary; this is not the official file")
    return {_text(key): value.value if isinstance(value, _Array) else value for key, value in loaded.items()}
