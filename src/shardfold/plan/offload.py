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


SHARED = ("master", "moments")
"""Of which a part may stay on the device."""


def offloaded(layout: Layout, offload: str | Mapping[str, str] | None) -> Layout:
    """The table with other tiers.

    Args:
        layout: any table.
        offload: a tier for gradients, master and moments, and for whatever else rests in a slower tier, as ``"host"``;
            or tiers by state, as ``{"optimizer": "host", "grads": "host"}``, where ``optimizer`` is master and moments;
            the same as text is ``"optimizer=host,grads=host"``; None: no change. Of the optimizer's states a part may
            stay on the device: with ``"host:0.7"`` at least 0.7 of them rest in host memory (see ``Cell.share``).

    Raises:
        ConfigError: a state or tier is unknown.
        LayoutError: the table that this gives contradicts itself.
    """
    if offload is None:
        return layout
    if isinstance(offload, str) and "=" in offload:
        offload = _by_state(offload)
    if isinstance(offload, (str, Tier)):
        tier, share = _tier("offload=", offload)
        slower = [state for state, cell in layout.cells().items() if cell.tier is not Tier.DEVICE]
        return layout.edit(*dict.fromkeys((*UPDATE, *slower)), tier=tier).edit(*SHARED, share=share)
    if not isinstance(offload, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"offload= is {described(offload)}: it is 'host', 'disk', or a dict of tiers by state, as "
            "{'optimizer': 'host', 'grads': 'host'}."
        )
    tiers: dict[str, tuple[Tier, float]] = {}
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
    return layout.replace(
        **{state: replace(cells[state], tier=tier, share=share) for state, (tier, share) in tiers.items()}
    )


def _by_state(text: str) -> dict[str, str]:
    """What ``"optimizer=host,grads=disk"`` says, by state."""
    tiers: dict[str, str] = {}
    for part in text.split(","):
        state, equals, tier = (word.strip() for word in part.partition("="))
        if not equals:
            raise ConfigError(
                f"offload= is {text!r}, but {part.strip()!r} names no tier: write {state or 'grads'}=host."
            )
        if state in tiers:
            raise ConfigError(f"offload= is {text!r}, which names {state} twice.")
        tiers[state] = tier
    return tiers


def _tier(where: str, given: Any) -> tuple[Tier, float]:
    """The tier, and which part of a state rests there."""
    tier, colon, part = given.partition(":") if isinstance(given, str) and given not in list(Tier) else (given, "", "")
    if tier not in list(Tier):
        raise ConfigError(f"{where}: {described(tier)} is no tier.{did_you_mean(str(tier), [str(t) for t in Tier])}")
    if not colon:
        return Tier(tier), 1.0
    try:
        share = float(part)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"{where}: behind '{tier}:' comes which part of the bytes rests there at least, above 0 and at most 1, as "
            f"in '{tier}:0.7', and not {part!r}."
        )
    return Tier(tier), share
