"""The whole numbers among the arguments of a call: sizes of views, lengths of pieces, edges of slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardfold.parallel.model_trace import Ref, TracedCall
from shardfold.parallel.sharding_rules import Follower, TensorPart, UnfollowedOperation

__all__ = ["localized", "numbers_in", "replaced"]


def numbers_in(tree: Any) -> list[int]:
    """In order, those of slices among them."""
    return list(_numbers(tree))


def _numbers(tree: Any) -> Iterator[int]:
    if isinstance(tree, int) and not isinstance(tree, bool):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _numbers(each)
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from _numbers(each)
    elif isinstance(tree, slice):
        yield from _numbers((tree.start, tree.stop, tree.step))


def replaced(tree: Any, by_place: Mapping[int, int]) -> Any:
    """The same, with the numbers at some places changed."""
    count = iter(range(1 << 30))

    def change(each: Any) -> Any:
        if isinstance(each, int) and not isinstance(each, bool):
            return by_place.get(next(count), each)
        if isinstance(each, tuple):
            return tuple(change(one) for one in each)
        if isinstance(each, list):
            return [change(one) for one in each]
        if isinstance(each, dict):
            return {key: change(one) for key, one in each.items()}
        if isinstance(each, slice):
            return slice(change(each.start), change(each.stop), change(each.step))
        return each

    return change(tree)


def localized(call: TracedCall, at: Follower) -> dict[int, int]:
    """What numbers of a call are where it works on parts: by place, those that are not of the whole.

    Raises:
        UnfollowedOperation: one cannot be divided.
    """
    places = list(_places(call, at))
    numbers, found = numbers_in((call.args, call.kwargs)), dict[int, int]()
    for place in places:
        number = numbers[place]
        if number % at.ranks and number != -1:
            raise UnfollowedOperation(
                f"{call.name} says {number}, which cannot be divided over {at.ranks} ranks", call.ins
            )
        found[place] = number if number == -1 else number // at.ranks
    return found


def _places(call: TracedCall, at: Follower) -> Iterator[int]:
    source = at.parts.get(call.ins[0]) if call.ins else None
    made = at.parts.get(call.outs[0])
    numbers = numbers_in((call.args, call.kwargs))
    if call.name in ("view", "reshape", "expand") and made is not None:
        if len(numbers) == len(at.shape(call.outs[0])):
            yield made.dim
    elif call.name == "unflatten" and made is not None and source is not None:
        place = made.dim - numbers[0] % len(at.shape(call.ins[0]))
        if 0 <= place < len(numbers) - 1:
            yield place + 1
    elif call.name in ("split", "split_with_sizes") and source is not None:
        said = call.args[2] if len(call.args) > 2 else call.kwargs.get("dim", 0)
        sizes = call.args[1] if len(call.args) > 1 else ()
        if said % len(at.shape(call.ins[0])) == source.dim:
            yield from range(len(numbers_in(sizes)))
    elif call.name == "narrow" and source is not None and len(numbers) == 3:
        if numbers[0] % len(at.shape(call.ins[0])) == source.dim:
            yield from (1, 2)
    elif call.name == "__getitem__" and source is not None:
        yield from _of_index(call, source, len(at.shape(call.ins[0])))


def _of_index(call: TracedCall, part: TensorPart, dims: int) -> Iterator[int]:
    """Of a slice over the dimension that is divided."""
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if any(isinstance(each, (Ref, list)) for each in index):
        return
    taken = sum(each is not None and each is not Ellipsis for each in index)
    dim = place = 0
    for each in index:
        if each is Ellipsis:
            dim += dims - taken
            continue
        count = len(numbers_in(each))
        if isinstance(each, slice) and dim == part.dim:
            yield from range(place, place + count)
        dim += each is not None
        place += count
