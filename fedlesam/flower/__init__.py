"""The methods of this project on Flower: a strategy for its ServerApp, and a ClientApp. Needs `fedlesam[flower]`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlesam.flower.client import client_app as client_app
    from fedlesam.flower.strategy import Strategy as Strategy

_HOMES = {"Strategy": "fedlesam.flower.strategy", "client_app": "fedlesam.flower.client"}

__all__ = ["Strategy", "client_app"]


def __getattr__(name: str) -> Any:
    """A client's process imports nothing of the server, and is started anew for every message."""
    import importlib

    if name in _HOMES:
        try:
            return getattr(importlib.import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "flwr":
                raise
            raise ModuleNotFoundError("Flower is not installed: pip install 'fedlesam[flower]'", name="flwr") from error
    raise AttributeError(f"module 'fedlesam.flower' has no attribute {name!r}")
