"""Norms, clipping, loss scales and what tells where inf came from: 16-bit training must not go wrong in silence."""

from shardfold.numerics.clipping import Clip
from shardfold.numerics.forensics import ActivationWatch, NumericsReport, UnitNumbers, check, replicas
from shardfold.numerics.scaling import LossScale, Scaler
from shardfold.plan.report import Finding

__all__ = [
    "ActivationWatch",
    "Clip",
    "Finding",
    "LossScale",
    "NumericsReport",
    "Scaler",
    "UnitNumbers",
    "check",
    "replicas",
]
