"""Micro-batches that count by their tokens: the step's gradient is that of the mean over all tokens of all ranks.

Where ranks and micro-batches have different numbers of valid tokens, a mean of their means weighs tokens of short ones
more. Here each loss is multiplied by its weight, and gradients, which were divided by ranks and micro-batches as they
arrived, are multiplied once by what makes of that a division by the sum of weights.
"""

from __future__ import annotations

import math

from torch import Tensor

from shardfold.errors import ConfigError, UsageError
from shardfold.plan.checks import described, is_number

__all__ = ["Shares"]


class Shares:
    """Weights of this rank's micro-batches since the last step."""

    def __init__(self) -> None:
        self._given: list[float | None] = []

    @property
    def any(self) -> bool:
        """Whether some micro-batch of this rank had a weight."""
        return any(weight is not None for weight in self._given)

    def weighed(self, loss: Tensor, weight: float | None, *, first: bool) -> Tensor:
        """The loss times its weight; ``first``: of a step.

        Raises:
            ConfigError: the weight is no finite number >= 0.
        """
        if weight is not None:
            number = weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
            if not is_number(number, 0) or math.isinf(number):
                raise ConfigError(
                    f"engine.backward(weight={described(number)}): it is a number >= 0, such as a count of tokens."
                )
            weight = float(number)
        self.note(weight, first=first)
        return loss if weight is None else loss * weight

    def note(self, weight: float | None, *, first: bool) -> None:
        """A micro-batch has this weight; ``first``: of a step."""
        if first:
            self._given.clear()
        self._given.append(weight)

    def sums(self) -> list[float]:
        """What ranks add up: the weights, and the micro-batches without one."""
        return [math.fsum(weight or 0.0 for weight in self._given), float(self._given.count(None))]

    @staticmethod
    def factor(sums: list[float], micro_batches: int) -> float:
        """What gradients that were divided by ``micro_batches`` are to be multiplied by.

        Raises:
            UsageError: on all ranks, if some micro-batches had a weight and some had none.
        """
        total, without = sums
        if without:
            raise UsageError(
                f"engine.step(): {without:.0f} micro-batches had no weight= in engine.backward() and others had one: "
                "give all of a step, on all ranks, one or none; engine.zero_grad() drops what has come."
            )
        return micro_batches / total if total else 1.0  # without any weight all gradients are 0
