"""Federated learning methods for PyTorch: exact, composable, resumable, with the flatness of their minima measured."""

from fedlesam.core.lazy import lazy

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = lazy(__name__, __file__)
