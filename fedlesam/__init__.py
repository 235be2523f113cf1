"""Sharpness-aware federated learning: the methods of the FedLESAM paper, exact, composable and measured."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedlesam import algorithms as algorithms
    from fedlesam import data as data
    from fedlesam import models as models
    from fedlesam import probes as probes
    from fedlesam import rules as rules
    from fedlesam.core.checks import NotFinite as NotFinite
    from fedlesam.core.local import LocalTraining as LocalTraining
    from fedlesam.core.record import Record as Record
    from fedlesam.core.slots import Algorithm as Algorithm
    from fedlesam.engines.settings import Execution as Execution
    from fedlesam.engines.settings import FailurePolicy as FailurePolicy
    from fedlesam.federation import Federation as Federation
    from fedlesam.runs.read import load_run as load_run

_HOMES = {
    "Algorithm": "fedlesam.core.slots",
    "Execution": "fedlesam.engines.settings",
    "FailurePolicy": "fedlesam.engines.settings",
    "Federation": "fedlesam.federation",
    "LocalTraining": "fedlesam.core.local",
    "NotFinite": "fedlesam.core.checks",
    "Record": "fedlesam.core.record",
    "load_run": "fedlesam.runs.read",
}
_MODULES = ("algorithms", "data", "models", "probes", "rules")

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    """Import PyTorch only when it is needed, so that `fedlesam --help` answers at once."""
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"fedlesam.{name}")
    raise AttributeError(f"module 'fedlesam' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
