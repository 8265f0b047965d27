"""``deepspeed.runtime.pipe``: what of pipelines is arithmetic."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(
    __name__,
    {
        "LayerSpec": "runtime.pipe.module",
        "ProcessTopology": "runtime.pipe.topology",
        "TiedLayerSpec": "runtime.pipe.module",
    },
    ("module", "schedule", "topology"),
)
