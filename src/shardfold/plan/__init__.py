"""WHAT is kept where, and WHEN what runs: values that can be made, checked and printed where there is no process group.

    layout       the table: a cell per state                presets      the tables that have names
    rules        which precision holds where in a model     placement    which element lies on which rank
    program      the table lowered to operations, as text   passes       what is done ahead, or later
    order        one order out of those of several ranks    cost         bytes of states and of operations
    bind         program and units of one model           walk         which operations are due in a pass
    lifetimes    bytes that operations hold and give back
    explain      table, bytes and program as text           report       bytes held and sent, as data
    axes         who: axes of ranks, and their roles        checks       what values have to be
    box          blocks of tensors, and what two share      formats      what a tensor is on the link
    sizes        numbers of bytes as text                   arguments    what calls are given, by name
    nearest      sizes that divide, next to others          version

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
