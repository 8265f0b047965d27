"""Where ``link_of`` was, which is ``module_group.group_of`` now."""

from __future__ import annotations

from typing import NoReturn

__all__: list[str] = []


def __getattr__(name: str) -> NoReturn:
    raise ImportError(
        "shardfold.parallel.link is shardfold.parallel.module_group now, and link_of(module, axis) its "
        "group_of(module, axis): write from shardfold.parallel.module_group import group_of."
    )
