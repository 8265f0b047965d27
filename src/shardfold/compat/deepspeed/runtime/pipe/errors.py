"""What a pipeline's engine raises for calls that belong to other engines."""

from shardfold.errors import UsageError

__all__ = ["PipelineError"]


class PipelineError(UsageError):
    """A call that an engine of stages does not have."""
