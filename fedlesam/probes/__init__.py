"""Instruments: sharpness, curvature, drift, estimate and loss surfaces. They read training, never change it."""

from fedlesam.probes.drift import Drift, drift_of
from fedlesam.probes.estimate import constant_perturbations, cosine
from fedlesam.probes.hessian import eigenvalues, trace
from fedlesam.probes.loss import GlobalLoss
from fedlesam.probes.sharpness import Rise, rise
from fedlesam.probes.surface import Grid, Surface, directions, surface_of

__all__ = [
    "Drift",
    "GlobalLoss",
    "Grid",
    "Rise",
    "Surface",
    "constant_perturbations",
    "cosine",
    "directions",
    "drift_of",
    "eigenvalues",
    "rise",
    "surface_of",
    "trace",
]
