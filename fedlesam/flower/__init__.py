"""The methods of this project on Flower: a strategy for its ServerApp, and a ClientApp. Needs `fedlesam[flower]`."""

from typing import TYPE_CHECKING, Any

from fedlesam.core.lazy import lazy

if TYPE_CHECKING:
    from fedlesam.flower.client import client_app as client_app
    from fedlesam.flower.strategy import Strategy as Strategy

__all__ = ["Strategy", "client_app"]
_get, __dir__ = lazy(__name__, {"Strategy": "strategy", "client_app": "client"})


def __getattr__(name: str) -> Any:
    """A client's process imports nothing of the server, and is started anew for every message."""
    try:
        return _get(name)
    except ModuleNotFoundError as error:
        if error.name != "flwr":
            raise
        raise ModuleNotFoundError("Flower is not installed: pip install 'fedlesam[flower]'", name="flwr") from error
