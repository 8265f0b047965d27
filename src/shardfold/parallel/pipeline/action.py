"""One thing that a rank does in a pipeline."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Action"]


class Action(NamedTuple):
    """What a rank does for one stage and one micro-batch.

    Attributes:
        verb: ``F``, a forward; ``B``, a backward; or its two parts, ``I``, the gradients of inputs, and ``W``, those of
            weights; or, before and behind these, ``RECV_F``, ``SEND_F``, ``RECV_B``, ``SEND_B``: activations and
            gradients that come, and that go.
    """

    verb: str
    stage: int
    batch: int

    def __str__(self) -> str:
        return f"{self.verb} stage {self.stage} batch {self.batch}"

    @property
    def short(self) -> str:
        """As in the text of an order: ``0F3``."""
        return f"{self.stage}{self.verb}{self.batch}"

    @property
    def sends(self) -> str:
        """What it gives to a neighbouring stage: ``F``, activations; ``B``, gradients; empty: nothing."""
        return {"F": "F", "B": "B", "I": "B"}.get(self.verb, "")
