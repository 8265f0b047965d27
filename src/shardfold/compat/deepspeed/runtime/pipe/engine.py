"""``deepspeed.runtime.pipe.engine``: see :mod:`shardfold.compat.deepspeed.pipeline_engine`."""

from shardfold.compat.deepspeed.pipeline_engine import PipelineEngine

__all__ = ["PipelineEngine"]
