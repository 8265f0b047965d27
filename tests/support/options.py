"""Arguments of an engine that tests draw, multiply and merge one by one, put into the values that it takes them in."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import shardfold as sf
from shardfold.plan import presets

__all__ = ["grouped"]


def grouped(**flat: Any) -> dict[str, Any]:
    """``flat`` arguments, as ``mesh=``, ``units=`` and ``outer=``, as an engine takes them; others stay as they are.

    Where a value is given too, as ``parallel=``, what is flat is put into a copy of it.
    """
    found = dict(flat)
    for name, kind in (("parallel", sf.Parallel), ("runtime", sf.Runtime), ("init", sf.Init)):
        inside = {each.name: found.pop(each.name) for each in fields(kind) if each.name in found}
        if not inside:
            continue
        there = found.get(name)
        base = sf.Parallel.of(there) if kind is sf.Parallel else there or kind()
        found[name] = replace(base, **inside)
    if (clip := found.pop("clip", None)) is not None:
        found["clip_norm"] = clip
    if (outer := found.pop("outer", None)) is not None:
        found["layout"] = presets.named(found.get("layout", "zero3")).with_outer(outer)
    return found
