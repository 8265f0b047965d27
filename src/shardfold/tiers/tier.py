"""One protocol for memory of every kind: a tier gives regions, and values of a region come to the device and go back.

    allocate    a region of a tier: room for values, which are undefined until the first ``store``
    store       values go from the device into the region
    add         values are added to those in the region
    write       values of a range, while nothing is computed with the region
    fetch       values begin to come back to the device
    get         the values, on the device: this is where they are waited for
    drop        the room is given back

Who asks never waits for more than it needs: ``store`` and ``fetch`` only begin, and what happens to one region happens
in the order in which it was asked for. The two points where something is waited for are ``get`` (the computation waits
for the values) and ``values`` (the host does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["MemoryTier", "Region", "is_same"]


class Region(Protocol):
    """Room for one tensor in a tier."""

    @property
    def tier(self) -> str:
        """The tier's name: ``device``, ``host`` or ``disk``."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def nbytes(self) -> int:
        """Of the values; 0 once they were dropped."""
        ...

    @property
    def resting(self) -> Tensor | None:
        """The memory itself, in the region's shape, where that can be pointed at; None: a file. What is there may still
        be on its way: :meth:`values` waits for it."""
        ...

    def store(self, values: Tensor) -> None:
        """Begins to take ``values`` (contiguous, of the region's numel and dtype), as the computation so far has made
        them. They may be freed at once, and written to as soon as the next :meth:`get` or :meth:`values` of this region
        is over. The resting memory itself is there already.

        Raises:
            OSError: what was stored earlier, here or in another region of the tier, could not be brought to where it
                belongs. Nothing is lost: those values and these are kept, in memory.
        """
        ...

    def add(self, values: Tensor) -> None:
        """Begins to add values to what was stored; otherwise as :meth:`store`.

        Raises:
            OSError: as :meth:`store`.
        """
        ...

    def write(self, start: int, values: Tensor) -> None:
        """Takes values ``(n,)``, of any dtype and device, for elements from ``start`` on; the others stay. For rare
        moments: it may wait.

        Raises:
            OSError: as :meth:`store`, or what is beside them in the file could not be read.
        """
        ...

    def fetch(self, into: Tensor | None = None) -> None:
        """Begins to bring the values to the device, behind all that was stored: into that memory of the device, or,
        where the region is a file, of the host; or,
        without it, into memory that the tier finds, which where the device computes on host memory is the resting one
        and is only to be read. One that is under way already is not begun again."""
        ...

    def get(self) -> Tensor:
        """The values on the device, which whoever asks owns from now on. The computation waits for them: on CUDA the
        stream does; where they come from a file, so does the host. Begins to fetch them if nobody has.

        Raises:
            OSError: they could not be read.
        """
        ...

    def stop(self) -> None:
        """What :meth:`fetch` has begun is not needed: the next one begins anew."""
        ...

    def values(self, part: slice = slice(None)) -> Tensor:
        """A part of the flattened values, 1-D, in whatever memory they are in, once nothing is on its way into the
        region any more: for this the host waits. Who changes all of them in place gives them to :meth:`store`.

        Raises:
            OSError: they could not be read.
        """
        ...

    def drop(self) -> None:
        """The values are not needed any more, and the room may be another's. Dropping twice does nothing."""
        ...


class MemoryTier(Protocol):
    """Memory of one kind, of one device."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, *, zero: bool = False, rests: bool = False) -> Region:
        """Room for a tensor.

        Args:
            shape, dtype: of it.
            zero: of zeros; else its values are undefined.
            rests: it is needed as long as the tier.

        Raises:
            OSError, torch.OutOfMemoryError: there is none.
        """
        ...

    def close(self) -> None:
        """No region of this tier will be needed any more: what is on its way ends, and the memory is given back."""
        ...


def is_same(a: Tensor, b: Tensor | None) -> bool:
    """Whether two tensors are the same memory."""
    return b is not None and a.data_ptr() == b.data_ptr() and a.nbytes == b.nbytes and a.device == b.device
