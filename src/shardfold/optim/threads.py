"""Threads that update blocks in host memory beside each other, each with one thread of torch's.

``torchrun`` sets ``OMP_NUM_THREADS=1``, which leaves torch's kernels one core each; and where they have more, they meet
at the end of every kernel, which costs more than a block takes as soon as one of the cores has other work. Threads of
our own take blocks until none is left and meet once. Python's lock is free while a kernel runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Barrier, Lock
from typing import TypeVar

import torch

from shardfold.torch_internals import modes_are_on

__all__ = ["UpdateThreads"]

T = TypeVar("T")


class UpdateThreads:
    """So many threads, which are there from the first use on.

    Args:
        count: of them; with 1 all is done on the caller's thread.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        self._starting = Lock()

    def share(self, blocks: Iterable[T], work: Callable[[Iterator[T]], object]) -> None:
        """Returns when every block was taken: each thread calls ``work`` with an iterator over those that it gets.

        Blocks must not depend on each other. Kernels of torch's use one thread each in there, where there are several
        threads; gradients are not recorded.

        Raises:
            BaseException: what ``work`` raised. Blocks that nobody had begun by then are left out.
        """
        left = deque(blocks)
        count = min(self.count, len(left))
        if count < 2 or modes_are_on():  # a mode sees what its own thread does
            work(_taken(left))
            return
        inference = torch.is_inference_mode_enabled()

        def run() -> None:
            with torch.inference_mode(inference), torch.no_grad():
                try:
                    work(_taken(left))
                except BaseException:
                    left.clear()
                    raise

        with self._starting:
            pool = self._pool = self._pool or _started(self.count)
        runs: list[Future[None]] = []
        try:
            for _ in range(count):
                runs.append(pool.submit(run))
            for each in runs:
                each.result()
        finally:
            left.clear()
            wait(runs)  # nobody writes any more, also after an interruption

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _taken(left: deque[T]) -> Iterator[T]:
    """What no other thread takes, until nothing is left."""
    while True:
        try:
            block = left.popleft()
        except IndexError:
            return
        yield block


def _started(count: int) -> ThreadPoolExecutor:
    """Threads on which torch's kernels use one thread. Everybody else's number stays what it is."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="shardfold-update")
    mine, met = torch.get_num_threads(), Barrier(count + 1)

    def one() -> None:
        torch.get_num_threads()  # a thread takes the number of all when it first asks, whatever was set for it before
        torch.set_num_threads(1)
        met.wait()  # so that each of these calls has a thread to itself

    try:
        for _ in range(count):
            pool.submit(one)
        met.wait()
    except BaseException:
        met.abort()
        pool.shutdown()
        raise
    finally:
        torch.set_num_threads(mine)  # torch keeps the number for each thread, and the last one for those still to begin
    return pool
