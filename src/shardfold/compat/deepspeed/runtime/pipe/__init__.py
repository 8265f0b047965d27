"""``deepspeed.runtime.pipe``: layers in stages, and how ranks are shared out."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(
    __name__,
    {
        "LayerSpec": "runtime.pipe.specs",
        "PipelineModule": "pipeline_module",
        "ProcessTopology": "runtime.pipe.topology",
        "TiedLayerSpec": "runtime.pipe.specs",
    },
    ("engine", "module", "topology"),
)
