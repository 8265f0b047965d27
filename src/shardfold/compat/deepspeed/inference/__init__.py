"""``deepspeed.inference``: a model that is only asked."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(__name__, {}, ("config", "engine"))
