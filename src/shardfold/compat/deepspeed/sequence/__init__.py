"""Attention of a model's own over ranks that share sequences."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(__name__, {}, ("layer",))
