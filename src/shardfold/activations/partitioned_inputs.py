"""What recomputed units keep of their inputs, divided over ranks that have the same: ZeRO-R's partitioned activation
checkpoints (arXiv 1910.02054, section 6.1).

    forward      of each input this rank keeps the rank-th of N equal slices of its memory; the forward reads the
                 originals, which nobody keeps behind it
    backward     one all-gather along the axis brings a unit's input back, to the bit and with its strides, before its
                 forward runs again

Inputs that differ between these ranks would come back as a mixture of all of them: a checksum is compared first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from shardfold.errors import LayoutError, UsageError
from shardfold.nn.axis_group import AxisGroup
from shardfold.plan.axes import Mesh, Role
from shardfold.torch_internals import counted_together, storage_key, without_user_modes

__all__ = ["SliceBuffer", "Sliced", "Slicer", "tensor_axis"]

SHARE = 4
"""A storage is sliced as a whole if the tensor that is given has this part of it or more: others may have the rest."""

CHUNK = 1 << 20
"""Bytes that are summed at a time for a checksum."""


def tensor_axis(over: str, mesh: Mesh) -> str:
    """The mesh's own name of the axis that inputs are split over; ``"tensor"`` is the one of that role.

    Raises:
        LayoutError: there is no such axis, or its ranks do not have the same inputs.
    """
    named = [axis for axis in mesh.axes if over == axis.name] or [
        axis for axis in mesh.axes if over == axis.role.value == Role.TENSOR.value
    ]
    if len(named) != 1:
        raise LayoutError(
            f"activations= splits inputs over {over!r}, and parallel= has "
            f"{' x '.join(f'{n}={s}' for n, s in mesh.items())}: name {'one' if named else 'its'} axis of role tensor, "
            "as in parallel={'tensor': 2}, or leave over= out."
        )
    if named[0].role is not Role.TENSOR:
        raise LayoutError(
            f"activations= splits inputs over {over!r}, on which ranks read other things (its role is "
            f"'{named[0].role}') and keep what is their own already: over= is for an axis of tensor."
        )
    return named[0].name


class SliceBuffer:
    """Memory for the slices of a number of checkpoints, which lie one behind the other and are used again, so that what
    comes and goes between them leaves no gaps.

    Args:
        checkpoints: how many may be kept at once.
    """

    def __init__(self, checkpoints: int) -> None:
        self._checkpoints = checkpoints
        self._memory: dict[tuple[Any, ...], Tensor] = {}  # (checkpoints, elements)
        self._free: dict[tuple[Any, ...], list[int]] = {}

    def take(self, argument: int, numel: int, like: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Memory for one slice of the argument of that number, and what gives it back.

        Raises:
            UsageError: so many are kept already.
        """
        key = (argument, numel, like.dtype, like.device)
        if key not in self._memory:
            self._memory[key] = like.new_empty(self._checkpoints, numel)
            self._free[key] = list(reversed(range(self._checkpoints)))
        free = self._free[key]
        if not free:
            raise UsageError(
                f"contiguous memory is for the inputs of {self._checkpoints} checkpoints, and one more is made before "
                "a backward has come to the first: give the number of all that a step makes before its backward, or "
                "leave it out."
            )
        place = free.pop()
        # Of its own version: autograd would take what is written into other places for a change of this one.
        return self._memory[key][place].data, lambda: free.append(place)

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return sum(memory.nbytes for memory in self._memory.values())


class _Kept:
    """This rank's slice of some memory.

    Attributes:
        piece: 1-D.
    """

    def __init__(self, flat: Tensor, argument: int, ranks: AxisGroup, room: SliceBuffer | None) -> None:
        numel = -(-len(flat) // ranks.size)
        mine = flat[ranks.rank * numel : (ranks.rank + 1) * numel]
        self._release: Callable[[], None] = lambda: None
        if room is not None:
            self.piece, self._release = room.take(argument, numel, flat)
        else:
            self.piece = flat.new_empty(numel)
        self.piece[: len(mine)].copy_(mine)
        self.piece[len(mine) :].zero_()  # the last ranks may have less

    def __del__(self) -> None:
        if "_release" in vars(self):
            self._release()


class _Input(NamedTuple):
    """What an argument was: a view of the ``number``-th memory that is kept."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool


class Sliced:
    """How the arguments of one call were cut. It does not keep the slices, which may go elsewhere meanwhile.

    Args:
        inputs: what was cut, by its place among the arguments.
        places: where each slice stands.
        ranks: along the axis.
        held: what gives its memory back when nobody needs it.
    """

    def __init__(
        self, inputs: dict[int, _Input], places: Sequence[int], ranks: AxisGroup, held: Sequence[_Kept]
    ) -> None:
        self._inputs, self._places, self._ranks, self._held = inputs, places, ranks, held

    def whole(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments as they were, of those with slices in their places; every rank calls it."""
        out = list(leaves)
        with torch.no_grad(), without_user_modes():
            # As bytes, which any transport takes.
            gathered = [
                self._ranks.all_gather(leaves[p].view(torch.uint8), 0).view(leaves[p].dtype) for p in self._places
            ]
            for place, each in self._inputs.items():
                view = gathered[each.number].as_strided(each.size, each.stride, each.offset).detach()
                out[place] = view.requires_grad_(each.requires_grad)
        return out


class Slicer:
    """Cuts the arguments of units.

    Args:
        ranks: along the axis.
        cuts: whether a tensor of at least so many bytes is cut: not parameters, nor what is no plain memory.
        device: of the tensors that are cut.
        always: compares each call, not the first of each place only.
    """

    def __init__(
        self, ranks: AxisGroup, cuts: Callable[[Tensor, int], bool], device: torch.device, *, always: bool = False
    ) -> None:
        self._ranks, self._cuts, self._device, self._always = ranks, cuts, device, always
        self._known: dict[Any, tuple[weakref.ref[Tensor], _Kept]] = {}  # what several units are called with: kept once

    def cut(
        self, leaves: Sequence[Any], smallest: int, who: str, *, compare: bool, room: SliceBuffer | None = None
    ) -> tuple[list[Any], Sliced]:
        """The arguments with slices in place of tensors (None where one stands in another's place already), and what
        makes them whole.

        Args:
            leaves: the arguments, flat.
            smallest: bytes of the smallest tensor that is cut.
            who: is called with them.
            compare: whether a checksum is compared.
            room: where slices lie; None: each for itself.

        Raises:
            UsageError: ranks have other arguments.
        """
        kept: list[_Kept] = []
        numbers: dict[Any, list[tuple[Tensor, int]]] = {}
        inputs: dict[int, _Input] = {}
        with torch.no_grad(), without_user_modes():
            found = [
                (i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and self._cuts(leaf, smallest)
            ]
            if compare or self._always:
                _compare([leaf for _, leaf in found], who, self._ranks, self._device)
            for place, leaf in found:
                memory = _memory_of(leaf)
                if memory is None:
                    continue
                flat, offset, key = memory
                found_there = (n for other, n in numbers.get(key, ()) if counted_together(other, leaf))
                number = next(found_there, len(kept))
                if number == len(kept):
                    numbers.setdefault(key, []).append((leaf, number))
                    kept.append(self._keep(place, leaf, flat, key, room))
                inputs[place] = _Input(number, leaf.shape, leaf.stride(), offset, leaf.requires_grad)
        out = [None if place in inputs else leaf for place, leaf in enumerate(leaves)]
        places = [next(place for place, each in inputs.items() if each.number == n) for n in range(len(kept))]
        for place, each in zip(places, kept, strict=True):
            out[place] = each.piece
        return out, Sliced(inputs, places, self._ranks, kept if room is not None else ())

    def _keep(self, argument: int, tensor: Tensor, flat: Tensor, key: Any, room: SliceBuffer | None) -> _Kept:
        known = self._known.get(key)
        given = known[0]() if known is not None else None
        if known is not None and given is not None and counted_together(given, tensor):
            return known[1]
        kept = _Kept(flat, argument, self._ranks, room)
        # While that tensor lives its memory is no other's, and the next unit may be called with it.
        self._known[key] = weakref.ref(tensor, lambda dead: self._forget(key, dead)), kept
        return kept

    def _forget(self, key: Any, dead: weakref.ref[Tensor]) -> None:
        if key in self._known and self._known[key][0] is dead:
            del self._known[key]


def _memory_of(tensor: Tensor) -> tuple[Tensor, int, Any] | None:
    """The memory of a tensor, flat; where in it the tensor begins; and a key. None: the tensor is a small part of its
    memory, in pieces."""
    storage = tensor.untyped_storage()
    key = (storage_key(storage), tensor._version, tensor.dtype)
    if tensor.nbytes * SHARE >= storage.nbytes() and storage.nbytes() % tensor.itemsize == 0:
        length = storage.nbytes() // tensor.itemsize
        return tensor.detach().as_strided((length,), (1,), 0), int(tensor.storage_offset()), key
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span > tensor.numel():
        return None
    start = tensor.storage_offset()
    return tensor.detach().as_strided((span,), (1,), start), 0, (*key, start, span)


def _compare(tensors: Sequence[Tensor], who: str, ranks: AxisGroup, device: torch.device) -> None:
    """
    Raises:
        UsageError: these tensors differ between ranks, on each of which it raises.
    """
    kinds = crc32(repr([(t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors]).encode())
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        total = _checksum(tensor, total)
    mine = torch.stack([total.new_tensor(kinds), total])
    largest = ranks.max(torch.cat([mine, ~mine]))  # ~x turns the order round: the largest is that of the smallest
    if not bool((largest[:2] == ~largest[2:]).all()):
        raise UsageError(
            f"{who} is called with other tensors on each of the {ranks.size} ranks that its inputs are split over: "
            "they have parts of them already, or draw other random numbers; leave over= out for it."
        )


def _checksum(tensor: Tensor, total: Tensor) -> Tensor:
    """Goes on with a sum over bytes, each times the cube of its place; int64, which wraps."""
    once = tensor.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    data = once.contiguous().reshape(-1).view(torch.uint8)
    places = torch.arange(1, min(CHUNK, len(data)) + 1, device=data.device)
    places = places * places * places  # no sum of bytes that changed places is likely to be the same
    for chunk in data.split(CHUNK):
        total = total * 1000003 + (chunk * places[: len(chunk)]).sum()
    return total
