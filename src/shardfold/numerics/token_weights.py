"""Micro-batches that count by their tokens: the step's gradient is that of the mean over all tokens of all ranks.

Where ranks and micro-batches have different numbers of valid tokens, a mean of their means weighs tokens of short ones
more. Here each loss is multiplied by its weight, and gradients, which were divided by ranks and micro-batches as they
arrived, are multiplied once by what makes of that a division by the sum of weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from shardfold.errors import ConfigError, UsageError
from shardfold.plan.checks import described, is_number
from shardfold.sharding.run_state import RunState

__all__ = ["Shares"]


class Shares:
    """Weights of this rank's micro-batches since the last step, of those whose gradients have come.

    Args:
        run: whose steps those are. What was noted is of one attempt, and is forgotten with it, however that ends.

    Attributes:
        divided: by how many micro-batches of all ranks gradients are divided as they come; None: each rank's number for
            each of them.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._attempt = run.attempt
        self._given: list[float | None] = []
        self._divisor: int | None = None  # that the first micro-batch with a weight was divided by
        self._times: float | None = None
        self._alone: float | None = None  # what counts as the weight of micro-batches that are given none
        self.divided: int | None = None
        self._own = False  # the backward under way is one of the engine's, which says its weight
        self._coming: float | None = None  # that weight

    def _since(self) -> list[float | None]:
        """Those of the present attempt."""
        if self._attempt != self._run.attempt:
            self._attempt = self._run.attempt
            self.forget()
        return self._given

    @property
    def any(self) -> bool:
        """Whether some micro-batch of this rank had a weight, or that of the backward under way has."""
        return self._coming is not None or any(weight is not None for weight in self._since())

    def forget(self) -> None:
        """The gradients that have come are dropped."""
        self._given.clear()
        self._divisor = None

    @property
    def times(self) -> float | None:
        """What weights are multiplied by, and the weight of micro-batches that are given none; None: nothing is."""
        return self._times

    def multiply(self, times: float | None, of: int | None = None, alone: float | None = None) -> None:
        """Sets :attr:`times` for the micro-batches to come, of which all ranks together have ``of``; None: each as many
        as it is divided by. ``alone``: what counts as the weight of those that are given none; None: 1.

        Raises:
            ConfigError: one is no finite number >= 0.
        """
        for name, value in (("weight", times), ("alone", alone)):
            if value is not None and (not is_number(value, 0) or math.isinf(value)):
                raise ConfigError(f"engine.set_micro_batches({name}={described(value)}): it is a number >= 0, or None.")
        self._times, self.divided, self._alone = times, of, alone

    def weighed(self, loss: Tensor, weight: float | None, divisor: int) -> tuple[Tensor, float | None]:
        """The loss times its weight, and that as a number. Gradients will be divided by ``divisor`` micro-batches; what
        came before in this step may have been by another number.

        Raises:
            ConfigError: the weight is no finite number >= 0.
        """
        if weight is None and self._times is None and self._alone is None:
            return loss, None
        if weight is None:
            weight = 1.0 if self._alone is None else self._alone
        number = weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
        if not is_number(number, 0) or math.isinf(number):
            raise ConfigError(
                f"engine.backward(weight={described(number)}): it is a number >= 0, such as a count of tokens."
            )
        self._since()
        number = float(number) * (1.0 if self._times is None else self._times)
        if self.divided is not None and not number.is_integer():
            raise ConfigError(
                f"engine.backward(weight={number}) with Runtime(exact=True): the sum of weights over ranks would be "
                "rounded in their order; give integers, such as counts of tokens, or leave exact out."
            )
        first = self._divisor or divisor
        return loss * (number if divisor == first else number * divisor / first), number

    @contextmanager
    def of(self, weight: float | None) -> Iterator[None]:
        """Inside, a backward of the engine's runs, whose micro-batch has this weight: :meth:`note` it behind that."""
        self._own, self._coming = True, weight
        try:
            yield
        finally:
            self._own, self._coming = False, None

    def counted(self) -> None:
        """A backward counts as a micro-batch; one that is none of the engine's, a bare ``loss.backward()``, has no
        weight."""
        if not self._own:
            self._since().append(None)

    def note(self, weight: float | None, divisor: int) -> None:
        """A micro-batch of this weight has come, whose gradients were divided by ``divisor`` micro-batches."""
        self._since().append(weight)
        if weight is not None and self._divisor is None:
            self._divisor = divisor

    def sums(self) -> list[float]:
        """What ranks add up: the weights, and the micro-batches without one."""
        given = self._since()
        return [math.fsum(weight or 0.0 for weight in given), float(given.count(None))]

    def factor(self, sums: list[float], ranks: int) -> float:
        """What gradients are to be multiplied by, that were divided by so many ``ranks`` and by micro-batches.

        Raises:
            UsageError: on all ranks, if some micro-batches had a weight and some had none.
        """
        total, without = sums
        if without:
            raise UsageError(
                f"engine.step(): {without:.0f} micro-batches had no weight= in engine.backward() and others had one: "
                "give all of a step, on all ranks, one or none; engine.zero_grad() drops what has come."
            )
        whole = self.divided or ranks * (self._divisor or 1)
        return whole / total if total else 1.0  # without any weight all gradients are 0
