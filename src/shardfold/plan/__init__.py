"""WHAT is kept where, and WHEN what runs: values that can be made, checked and printed where there is no process group.

    auto_wire        which wires a table may have, and which of them is the fastest over links that were measured
    axes             WHO: the axes of the ranks, and what follows from their roles
    bind             the one compiler: a table, the units of a model and a mesh, bound to the program that runs
    blocks           blocks of codes: each has a scale, which lies behind its codes in the payload
    checks           what values that users give have to be, what their names are, and how messages show them
    copies           who holds what the optimizer has on each rank once more: a column of the table
    cost             what a table holds and what a program sends, as sums
    explain          a layout in words: the table, the units, what they cost and the program that will run
    format           WHAT is on the link: how values become the bytes of a payload, and values again
    formats          all formats by name: those of a dtype, and families of blocks, whose names have parameters
    holders          what would be lost with a rank and with a host: how many hold an element of each state
    layout           WHAT rests where: the table of states that every member of the ZeRO family is a value of
    lifetimes        how long bytes live: what each operation of a program holds, and what it gives back
    offload          which states of a table rest in a slower tier, and of which units
    order            one order made of what several ranks ran
    outer            rare steps over one axis, between groups that train apart
    outer_runs       groups between outer steps that are runs of their own
    patience         one number of seconds, from which limits on waiting follow
    placement        WHERE each element lies: offsets, padding, owners, ranges, and boxes of tensors
    presets          the names people know, as values of the table: one line and one paper each
    program          WHEN things happen: a layout lowered to lists of operations that print as text and parse back
    quantized        frozen matrices that rest, and travel, as codes: the column base of a table
    report           what an engine says about itself: bytes held beside the table, bytes sent beside the program
    rewrites         what is done ahead, or later, in a program
    rules            WHICH part of a model has what: ordered rules from modules to values, first match wins
    search           the one search behind all that is ``"auto"``
    signs            values that are sent as signs and a scale per block
    version          the version, in one place
    walk             which operations of a section are due when something happens in a pass, or in one through a part
    _codebooks       blocks of levels in a table, and scales that are codes: formats of what rests

It imports ``errors`` only.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``best`` and ``largest_batch``, which are the planner's: they run the model, so they are imported late."""
    if name in ("best", "largest_batch"):
        import importlib

        return getattr(importlib.import_module("shardfold.planner.best"), name)
    raise AttributeError(f"module 'shardfold.plan' has no attribute {name!r}")
