"""``deepspeed.runtime.pipe.module``: see :mod:`shardfold.compat.deepspeed.pipeline_module`."""

from shardfold.compat.deepspeed.pipeline_module import PipelineModule
from shardfold.compat.deepspeed.runtime.pipe.errors import PipelineError
from shardfold.compat.deepspeed.runtime.pipe.specs import LayerSpec, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]
