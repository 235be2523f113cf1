"""The rules of the three slots, and the classes to derive one's own from."""

from fedlesam.core.checks import check_number, param
from fedlesam.core.slots import (
    AffineStep,
    Average,
    Correction,
    LocalResult,
    NoCorrection,
    NoPerturbation,
    Perturbation,
    RoundResult,
    ServerRule,
    State,
    Step,
)
from fedlesam.core.vectors import ASCENT_EPS, ascent_
from fedlesam.rules.controls import RandomRoundAscent, RandomStepAscent, ReleasedAscent, ShuffledAscent
from fedlesam.rules.correction import ClientMomentum, ControlVariates, DynamicRegulariser, Proximal
from fedlesam.rules.perturbation import Ascent, CorrectedAscent, GlobalAscent, LocalAscent, PreviousStepAscent
from fedlesam.rules.server import Adam, Dynamic

__all__ = [
    "ASCENT_EPS",
    "Adam",
    "AffineStep",
    "Ascent",
    "Average",
    "ClientMomentum",
    "ControlVariates",
    "CorrectedAscent",
    "Correction",
    "Dynamic",
    "DynamicRegulariser",
    "GlobalAscent",
    "LocalAscent",
    "LocalResult",
    "NoCorrection",
    "NoPerturbation",
    "Perturbation",
    "PreviousStepAscent",
    "Proximal",
    "RandomRoundAscent",
    "RandomStepAscent",
    "ReleasedAscent",
    "RoundResult",
    "ServerRule",
    "ShuffledAscent",
    "State",
    "Step",
    "ascent_",
    "check_number",
    "param",
]
