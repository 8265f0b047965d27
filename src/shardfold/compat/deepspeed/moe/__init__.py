"""``deepspeed.moe``: questions about experts are answered; layers of them are not here."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(__name__, modules=("utils",))
