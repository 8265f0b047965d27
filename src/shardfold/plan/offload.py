"""``offload=``: which states of a table rest in a slower tier, as one word or by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan.checks import described
from shardfold.plan.layout import Layout, Tier

__all__ = ["offloaded"]

WORDS: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("master", "moments"),
    "grads": ("grads",),
    "params": ("params",),
    "master": ("master",),
    "moments": ("moments",),
}
"""What each name stands for."""
UPDATE = ("grads", "master", "moments")
"""What rests in a slower tier where only a tier is named: all that an update reads but the parameters."""


def offloaded(layout: Layout, offload: str | Mapping[str, str] | None) -> Layout:
    """The table with other tiers.

    Args:
        layout: any table.
        offload: a tier for gradients, master and moments, and for whatever else rests in a slower tier, as ``"host"``;
            or tiers by state, as
            ``{"optimizer": "host", "grads": "host"}``, where ``optimizer`` is master and moments; None: no change.

    Raises:
        ConfigError: a state or tier is unknown.
        LayoutError: the table that this gives contradicts itself.
    """
    if offload is None:
        return layout
    if isinstance(offload, (str, Tier)):
        slower = [state for state, cell in layout.cells().items() if cell.tier is not Tier.DEVICE]
        return layout.edit(*dict.fromkeys((*UPDATE, *slower)), tier=_tier("offload=", offload))
    if not isinstance(offload, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"offload= is {described(offload)}: it is 'host', 'disk', or a dict of tiers by state, as "
            "{'optimizer': 'host', 'grads': 'host'}."
        )
    tiers: dict[str, Tier] = {}
    for word, tier in offload.items():
        if word not in WORDS:
            raise ConfigError(f"offload= names {word!r}, which is no state.{did_you_mean(str(word), WORDS)}")
        tiers.update(dict.fromkeys(WORDS[word], _tier(f"offload={{{word!r}: ...}}", tier)))
    cells = layout.cells()
    missing = [state for state in tiers if state not in cells]
    if missing:
        raise ConfigError(
            f"offload= names {', '.join(missing)}, of which this table keeps no copy: its master is what is gathered, "
            "so name 'optimizer'."
        )
    return layout.replace(**{state: replace(cells[state], tier=tier) for state, tier in tiers.items()})


def _tier(where: str, tier: Any) -> Tier:
    if tier not in list(Tier):
        raise ConfigError(f"{where}: {described(tier)} is no tier.{did_you_mean(str(tier), [str(t) for t in Tier])}")
    return Tier(tier)
