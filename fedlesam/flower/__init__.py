"""The methods of this project on Flower: a strategy for its ServerApp, and a ClientApp. Needs `fedlesam[flower]`."""

from typing import Any

from fedlesam.core.lazy import lazy

_get, __dir__, __all__ = lazy(__name__, __file__)


def __getattr__(name: str) -> Any:
    """A client's process imports nothing of the server, and is started anew for every message."""
    try:
        return _get(name)
    except ModuleNotFoundError as error:
        if error.name != "flwr":
            raise
        raise ModuleNotFoundError("Flower is not installed: pip install 'fedlesam[flower]'", name="flwr") from error
