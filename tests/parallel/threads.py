"""Ranks along one axis as threads of one process, for properties that need many models and no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardfold.nn.axis_group import AxisGroup, OneRank
from shardfold.parallel.module_group import ModuleGroup

__all__ = ["Threads"]

T = TypeVar("T")


class Threads:
    """So many ranks, each a thread.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[Any] = [None] * size

    def run(self, work: Callable[[ThreadGroup], T]) -> list[T]:
        """What ``work`` gives on each rank.

        Raises:
            BaseException: the first that a rank raised by itself.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                results[rank] = work(ThreadGroup(self, rank))
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor."""
        self._given[rank] = tensor.detach().clone()
        self._barrier.wait()
        everyones = list(self._given)
        self._barrier.wait()
        return everyones


class ThreadGroup(OneRank):
    """What layers ask of the other threads; also which rank this is."""

    def __init__(self, threads: Threads, rank: int) -> None:
        super().__init__("tensor")
        self._threads, self._size, self._rank = threads, threads.size, rank

    def all_reduce(self, tensor: Tensor) -> Tensor:
        everyones = self._threads.exchange(self._rank, tensor)
        return sum(everyones[1:], everyones[0])

    def max(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._threads.exchange(self._rank, tensor)).amax(0)

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        return torch.cat(self._threads.exchange(self._rank, tensor), dim)

    def bind(self, model: torch.nn.Module) -> None:
        """Its layers ask these threads from now on."""
        for module in model.modules():
            groups: dict[str, ModuleGroup] = vars(module).get("_shardfold_groups", {})
            for group in groups.values():
                bound: AxisGroup = self
                group.bind(bound)
