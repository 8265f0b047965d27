"""``deepspeed.pipe``: what of pipelines is arithmetic."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(
    __name__,
    {
        "LayerSpec": "runtime.pipe.module",
        "PipeDataParallelTopology": "runtime.pipe.topology",
        "PipeModelDataParallelTopology": "runtime.pipe.topology",
        "ProcessTopology": "runtime.pipe.topology",
        "TiedLayerSpec": "runtime.pipe.module",
    },
)
