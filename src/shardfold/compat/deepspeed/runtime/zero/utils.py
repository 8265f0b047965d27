"""``deepspeed.runtime.zero.utils``."""

from shardfold.compat.deepspeed.zero.attributes import is_zero_param
from shardfold.errors import UsageError as ZeRORuntimeException

__all__ = ["ZeRORuntimeException", "is_zero_param"]
