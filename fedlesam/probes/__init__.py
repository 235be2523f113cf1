"""Instruments: sharpness, curvature, drift, estimate, theory and loss surfaces. They read training, never change it."""

from fedlesam.probes.drift import Drift, drift_of
from fedlesam.probes.estimate import constant_perturbations, cosine
from fedlesam.probes.hessian import eigenvalues, trace
from fedlesam.probes.loss import GlobalLoss
from fedlesam.probes.sharpness import Rise, rise
from fedlesam.probes.surface import Grid, Surface, directions, surface_of
from fedlesam.probes.theory import Theory, Variation, theorem_1, theorem_2

__all__ = [
    "Drift",
    "GlobalLoss",
    "Grid",
    "Rise",
    "Surface",
    "Theory",
    "Variation",
    "constant_perturbations",
    "cosine",
    "directions",
    "drift_of",
    "eigenvalues",
    "rise",
    "surface_of",
    "theorem_1",
    "theorem_2",
    "trace",
]
