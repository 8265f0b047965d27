"""Floating-point operations of a model's forward."""

from shardfold.compat.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile
from shardfold.compat.deepspeed.profiling.flops_profiler.words import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

__all__ = [
    "FlopsProfiler",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]
