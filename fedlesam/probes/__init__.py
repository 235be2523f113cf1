"""Measure sharpness, curvature, drift and loss surfaces. Probes read training and never change it.

loss = fl.probes.GlobalLoss.of(fed, samples=1000)
fl.probes.rise(loss, fed.weights, radius=0.1, steps=10).ascent
fl.probes.eigenvalues(loss, fed.weights, k=3)
"""

from fedlesam.core.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
