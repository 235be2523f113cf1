"""Sharpness-aware federated learning: the methods of the FedLESAM paper, exact, composable and measured."""

from fedlesam.core.lazy import lazy

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy(__name__, __file__)
