"""Norms, clipping, loss scales and what tells where inf came from: 16-bit training must not go wrong in silence.

alarm          what each step notices of inf and NaN by itself, and what it then says
clipping       norms and clipping over shards
forensics      where inf and NaN came from: which module, parameter, rank, step and micro-batch were first
fp8_layers     which linear layers of a model multiply in fp8
ordered_sums   sums that are the same in whatever order they are taken
scaling        the loss scale of fp16
token_weights  micro-batches that count by their tokens
_fp8_products  products of linear layers in 8 bits
"""

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
