"""The words that a split parameter describes itself with."""

from enum import Enum

__all__ = ["DeepSpeedTensorOverride", "ZeroParamStatus", "ZeroParamType"]


class ZeroParamType(Enum):
    """How a parameter is kept."""

    NORMAL = 1  # as plain PyTorch does
    PARTITIONED = 2  # each rank has a part
    REMOTE = 3  # one rank has it


class ZeroParamStatus(Enum):
    """Where the values of a parameter are now."""

    AVAILABLE = 1  # whole, on this rank
    NOT_AVAILABLE = 2  # this rank has its part only
    INFLIGHT = 3  # being gathered


class DeepSpeedTensorOverride(Enum):
    """What ``zero.Init`` may change of tensors; here it changes parameters only."""

    dtype = 1
    device = 2
