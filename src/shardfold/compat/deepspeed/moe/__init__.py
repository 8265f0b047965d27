"""``deepspeed.moe``: experts, shared out over ranks."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(__name__, modules=("layer", "sharded_moe", "utils"))
