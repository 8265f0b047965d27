"""``deepspeed.utils.exceptions``."""

__all__ = ["DeprecatedException"]


class DeprecatedException(Exception):
    """For what is no more."""
