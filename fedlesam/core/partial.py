"""Functions with one argument given: they can be sent to another process, and compared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Partial(Generic[T]):
    """As functools.partial, but equal to another one of the same function and argument: so are tasks made twice.

    Args:
        f: the function.
        last: its last argument.
    """

    f: Callable[..., T]
    last: Any

    def __call__(self, *args: Any) -> T:
        return self.f(*args, self.last)
