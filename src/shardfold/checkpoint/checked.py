"""What the text of an index may say: every value of its type and in its bounds, so that readers need not ask.

A checksum tells of accidents. Whoever means harm makes it anew, so what an index says is not believed for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardfold.checkpoint.paths import is_plain_name

__all__ = ["DEPTH", "check_index", "is_deep", "no_constant", "once_each"]

DEPTH = 200
"""Levels of a tree, at most; code that walks over trees calls itself for each."""

DIMS = 64
"""Of a tensor, at most: PyTorch's own limit."""

ELEMENTS = 2**50
"""Of a tensor, at most: no machine holds more."""

BYTES = 2**63 - 1


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads(object_pairs_hook=...)``: each key of an object once.

    Raises:
        ValueError: one is there twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def no_constant(name: str) -> Any:
    """For ``json.loads(parse_constant=...)``: JSON has no NaN and no infinity."""
    raise ValueError(f"{name} is not JSON")


def is_deep(tree: Any, limit: int = DEPTH) -> bool:
    """Whether a tree of lists and dicts has more levels than that."""
    level: list[Any] = [tree]
    for _ in range(limit + 1):
        level = [
            inner
            for each in level
            if isinstance(each, (list, dict))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def check_index(said: Mapping[str, Any], itemsizes: Mapping[str, int], kinds: Sequence[str]) -> None:
    """What an index says beside its head, in the form that it has in the file.

    Args:
        said: the JSON object, of at most :data:`DEPTH` levels.
        itemsizes: bytes of an element, by the dtypes that there are.
        kinds: of pieces that there are.

    Raises:
        ValueError: what is not as it should be, and where.
    """
    _whole(said, "step")
    for name in ("written", "layout", "files", "once", "run"):
        _typed(said, name, dict, "an object")
    for name in ("parameters", "buffers", "pieces", "ranks", "nonfinite"):
        _typed(said, name, list, "a list")
    files: dict[str, Any] = said["files"]
    for name in files:
        if not is_plain_name(name):
            raise ValueError(f"files: {name!r} is not the name of a file beside it")
        _whole(files, name, "files: ")
    for place in ("parameters", "buffers"):
        for number, one in enumerate(said[place]):
            _parameter(one, f"{place}[{number}]", itemsizes)
        _named_once(said[place], place)
    shapes: dict[str, list[int]] = {one["name"]: one["shape"] for one in [*said["buffers"], *said["parameters"]]}
    for number, one in enumerate(said["pieces"]):
        _piece(one, f"pieces[{number}]", files, itemsizes, kinds)
        if "box" in one and one["of"] in shapes:
            _fits(one["box"], shapes[one["of"]], f"pieces[{number}] ({one['of']}): ")
    for name, one in [*said["once"].items(), *((str(rank), one) for rank, one in enumerate(said["ranks"]))]:
        if not isinstance(one, dict):
            raise ValueError(f"what it keeps of {name!r} is not an object")
    _texts(said, "nonfinite")
    _optimizer(said.get("optimizer"))


def _optimizer(said: Any) -> None:
    if said is None:
        return
    if not isinstance(said, dict):
        raise ValueError("optimizer is not an object")
    _typed(said, "class", str, "a name", "optimizer: ")
    _typed(said, "groups", list, "a list", "optimizer: ")
    for number, group in enumerate(said["groups"]):
        where = f"optimizer: groups[{number}]: "
        if not isinstance(group, dict):
            raise ValueError(f"{where}it is not an object")
        _typed(group, "options", dict, "an object", where)
        _texts(group, "parameters", where)


def _parameter(said: Any, where: str, itemsizes: Mapping[str, int]) -> None:
    if not isinstance(said, dict):
        raise ValueError(f"{where} is not an object")
    _typed(said, "name", str, "a name", f"{where}: ")
    where = f"{where} ({said['name']}): "
    _shape(said, where)
    _one_of(said, "dtype", itemsizes, where)
    if "also" in said:
        _texts(said, "also", where)
    if not isinstance(said.get("trainable", True), bool):
        raise ValueError(f"{where}trainable is neither true nor false")
    if not isinstance(said.get("digest", ""), str):
        raise ValueError(f"{where}digest is not a checksum")


def _named_once(said: Sequence[Mapping[str, Any]], place: str) -> None:
    seen: set[str] = set()
    for one in said:
        for name in (one["name"], *one.get("also", ())):
            if name in seen:
                raise ValueError(f"{place}: {name!r} is there twice")
            seen.add(name)


def _fits(box: Sequence[Sequence[int]], shape: Sequence[int], where: str) -> None:
    starts, sizes, *stacked = box
    if stacked:
        dim, count, length = stacked[0]
        if dim >= len(shape) or shape[dim] != count * length:
            raise ValueError(f"{where}its box is stacked as {stacked[0]!r}, which its shape is not")
        shape = (*shape[:dim], count, length, *shape[dim + 1 :])
    if len(starts) != len(shape) or any(a + n > all_ for a, n, all_ in zip(starts, sizes, shape, strict=True)):
        raise ValueError(f"{where}its box is not within its shape")


def _piece(said: Any, where: str, files: Mapping[str, int], itemsizes: Mapping[str, int], kinds: Sequence[str]) -> None:
    if not isinstance(said, dict):
        raise ValueError(f"{where} is not an object")
    for name in ("of", "state", "file"):
        _typed(said, name, str, "a name", f"{where}: ")
    where = f"{where} ({said['of']}): "
    _one_of(said, "kind", kinds, where)
    _one_of(said, "dtype", itemsizes, where)
    numel = _shape(said, where)
    _whole(said, "at", where)
    _texts(said, "sums", where)
    size = files.get(said["file"])
    if size is None:
        raise ValueError(f"{where}it is in {said['file']!r}, which is none of its files")
    if said["at"] + numel * itemsizes[said["dtype"]] > size:
        raise ValueError(f"{where}it ends behind the {size} bytes of {said['file']}")
    if said.get("rank") is not None:
        _whole(said, "rank", where)
    start, stop = _range(said, where)
    block = said.get("block", 1)
    if type(block) is not int or block < 1:
        raise ValueError(f"{where}block is {block!r}, which is not a number of elements")
    if said["kind"] in ("element", "block") and numel != -(-(stop - start) // block):
        raise ValueError(f"{where}it has {numel} values for the elements {start} to {stop}")
    if "box" in said:
        _box(said["box"], stop, where)


def _range(said: Mapping[str, Any], where: str) -> tuple[int, int]:
    found = said.get("range", [0, 0])
    if not isinstance(found, list) or len(found) != 2 or any(type(each) is not int for each in found):
        raise ValueError(f"{where}range is {found!r}, which is not the first element and the one behind the last")
    if not 0 <= found[0] <= found[1] <= ELEMENTS:
        raise ValueError(f"{where}range is {found!r}, which no tensor has")
    return found[0], found[1]


def _box(said: Any, stop: int, where: str) -> None:
    sides: list[Any] = said if isinstance(said, list) else []
    if len(sides) not in (2, 3) or not all(isinstance(side, list) for side in sides) or len(sides[0]) != len(sides[1]):
        raise ValueError(f"{where}box is not [starts, sizes]")
    if len(sides) == 3 and len(sides[2]) != 3:
        raise ValueError(f"{where}box is stacked as {sides[2]!r}, which is not [dim, count, length]")
    if any(type(each) is not int or not 0 <= each <= ELEMENTS for side in sides for each in side):
        raise ValueError(f"{where}box is {said!r}, which no tensor has")
    if stop > math.prod(sides[1]):
        raise ValueError(f"{where}its elements end after its box")


def _shape(said: Mapping[str, Any], where: str) -> int:
    """How many elements it has."""
    shape = said.get("shape")
    if not isinstance(shape, list) or len(shape) > DIMS or any(type(each) is not int for each in shape):
        raise ValueError(f"{where}shape is {_short(shape)}, which is not a list of up to {DIMS} numbers")
    if any(each < 0 for each in shape) or math.prod(shape) > ELEMENTS:
        raise ValueError(f"{where}shape is {_short(shape)}, which no tensor has")
    return math.prod(shape)


def _whole(said: Mapping[str, Any], name: str, where: str = "") -> None:
    if type(said.get(name)) is not int or not 0 <= said[name] <= BYTES:
        raise ValueError(f"{where}{name} is {_short(said.get(name))}, which is not a whole number from 0 on")


def _typed(said: Mapping[str, Any], name: str, kind: type, words: str, where: str = "") -> None:
    if not isinstance(said.get(name), kind):
        raise ValueError(f"{where}{name} is {'not ' + words if name in said else 'missing'}")


def _texts(said: Mapping[str, Any], name: str, where: str = "") -> None:
    found = said.get(name)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{where}{name} is not a list of texts")


def _one_of(said: Mapping[str, Any], name: str, known: Mapping[str, Any] | Sequence[str], where: str) -> None:
    if not isinstance(said.get(name), str) or said[name] not in known:
        raise ValueError(f"{where}{name} is {_short(said.get(name))}, which is none of {', '.join(known)}")


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a number of many digits"
    return text if len(text) <= 60 else f"{text[:60]}..."
