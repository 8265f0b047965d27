"""The device that training uses, by the methods of DeepSpeed's accelerator."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(
    __name__,
    {
        "DeepSpeedAccelerator": "accelerator.abstract_accelerator",
        "get_accelerator": "accelerator.real_accelerator",
        "is_current_accelerator_supported": "accelerator.real_accelerator",
        "set_accelerator": "accelerator.real_accelerator",
    },
    ("abstract_accelerator", "cpu_accelerator", "cuda_accelerator", "real_accelerator"),
)
