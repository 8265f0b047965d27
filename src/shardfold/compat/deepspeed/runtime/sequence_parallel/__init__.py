"""Sequences that are shared by several ranks, for models of transformers."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(__name__, {}, ("parallel_state_sp", "ulysses_sp"))
