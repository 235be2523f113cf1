# ruff: noqa: I001
"""Measure sharpness, curvature, drift and loss surfaces. Probes read training and never change it.

loss = fl.probes.GlobalLoss.of(fed, samples=1000)
fl.probes.rise(loss, fed.weights, radius=0.1, steps=10).ascent
fl.probes.eigenvalues(loss, fed.weights, k=3)
"""

from typing import TYPE_CHECKING

from fedlesam.core.lazy import lazy

if TYPE_CHECKING:  # a line for each module
    from fedlesam.probes.base import Look as Look, Probe as Probe
    from fedlesam.probes.drift import Drift as Drift, DriftProbe as DriftProbe, drift_of as drift_of
    from fedlesam.probes.estimate import Estimate as Estimate, cosine as cosine
    from fedlesam.probes.estimate import constant_perturbations as constant_perturbations
    from fedlesam.probes.hessian import Hessian as Hessian, eigenvalues as eigenvalues, trace as trace
    from fedlesam.probes.loss import GlobalLoss as GlobalLoss
    from fedlesam.probes.readings import Reading as Reading, Surface as Surface
    from fedlesam.probes.sharpness import Rise as Rise, Sharpness as Sharpness, rise as rise
    from fedlesam.probes.surface import Grid as Grid, directions as directions, surface_of as surface_of

_NAMES = {
    "base": ("Look", "Probe"),
    "drift": ("Drift", "DriftProbe", "drift_of"),
    "estimate": ("Estimate", "constant_perturbations", "cosine"),
    "hessian": ("Hessian", "eigenvalues", "trace"),
    "loss": ("GlobalLoss",),
    "readings": ("Reading", "Surface"),
    "sharpness": ("Rise", "Sharpness", "rise"),
    "surface": ("Grid", "directions", "surface_of"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_HOMES]
__getattr__, __dir__ = lazy(__name__, _HOMES)
