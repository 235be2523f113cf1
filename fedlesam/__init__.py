"""Sharpness-aware federated learning: the methods of the FedLESAM paper, exact, composable and measured."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedlesam import algorithms as algorithms
    from fedlesam import data as data
    from fedlesam import models as models
    from fedlesam import probes as probes
    from fedlesam.algorithms import Algorithm as Algorithm
    from fedlesam.core.checks import NotFinite as NotFinite
    from fedlesam.core.local import LocalTraining as LocalTraining
    from fedlesam.federation import Federation as Federation
    from fedlesam.federation import Record as Record

_HOMES = {
    "Algorithm": "fedlesam.algorithms",
    "Federation": "fedlesam.federation",
    "LocalTraining": "fedlesam.core.local",
    "NotFinite": "fedlesam.core.checks",
    "Record": "fedlesam.federation",
}

__all__ = ["Algorithm", "Federation", "LocalTraining", "NotFinite", "Record", "algorithms", "data", "models", "probes"]


def __getattr__(name: str) -> Any:
    """Import PyTorch only when it is needed, so that `fedlesam --help` answers at once."""
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("algorithms", "data", "models", "probes", "rules"):
        return importlib.import_module(f"fedlesam.{name}")
    raise AttributeError(f"module 'fedlesam' has no attribute {name!r}")
