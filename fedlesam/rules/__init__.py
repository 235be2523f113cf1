"""The rules of the three slots, and the classes to derive one's own from."""

from fedlesam.core.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
