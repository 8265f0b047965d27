"""``offload=``: which states of a table rest in a slower tier, as one word or by name, and in which folders.

Where a part of the states may stay on the device, WHICH units keep theirs is decided here. The host updates while the
device computes nothing, but for the units whose gradients are there early and whose parameters are needed late: their
copies hide behind the backward of the others, and behind the forward of the next step. For the units that forward runs
first neither does: backward gives their gradients last, so the copy down is waited for by itself, and the next forward
needs their parameters first. So those stay, the root before all, whose gradients are complete when backward is over
(DeepSpeed's "twin-flow" takes parameters in any order; SuperOffload, arXiv 2509.21271, retains the last buckets of
backward for the same reason).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan.checks import FOLDERS, are_folders, described, folders_of, meant
from shardfold.plan.layout import ITEMSIZE, Layout, Tier
from shardfold.plan.placement import UnitSpec

__all__ = ["offloaded", "staying", "with_staying"]


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
UNDIVIDED: Mapping[str, str] = {"grads": "gradients of a unit are where its master is"}
"""Of which none may, and why."""
FOLDER = "folder"
"""The word that stands beside the states."""


def offloaded(layout: Layout, offload: str | Mapping[str, Any] | None) -> Layout:
    """The table with other tiers.

    Args:
        layout: any table.
        offload: a tier for gradients, master and moments, and for whatever else rests in a slower tier, as ``"host"``;
            or tiers by state, as ``{"optimizer": "host", "grads": "host"}``, where ``optimizer`` is master and moments;
            the same as text is ``"optimizer=host,grads=host"``; None: no change. Of the optimizer's states, or of
            params, a part may stay on the device: with ``"host:0.7"`` at least 0.7 of them rest in host memory (see
            ``Cell.share``).
            ``folder`` beside the states is where all that rests on disk is, or a list of folders, one for each drive
            (see ``Cell.folder``); as text ``"disk,folder=/mnt/a"`` or ``"optimizer=disk,folder=/mnt/a:/mnt/b"``.

    Raises:
        ConfigError: a state or tier is unknown, or a folder is named and nothing rests on disk.
        LayoutError: the table that this gives contradicts itself.
    """
    if offload is None:
        return layout
    if isinstance(offload, str) and "=" in offload:
        offload = _by_state(offload, layout)
    if isinstance(offload, (str, Tier)):
        offload = _alike(layout, offload)
    if not isinstance(offload, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"offload= is {described(offload)}: it is 'host', 'disk', or a dict of tiers by state, as "
            "{'optimizer': 'host', 'grads': 'host'}."
        )
    tiers: dict[str, tuple[Tier, float]] = {}
    for word, tier in offload.items():
        if word == FOLDER:
            continue
        if word not in WORDS:
            raise ConfigError(
                f"offload= names {word!r}, which is not a state.{did_you_mean(str(word), [*WORDS, FOLDER])}"
            )
        found, share = _tier(f"offload={{{word!r}: ...}}", tier)
        if share != 1 and word in UNDIVIDED:
            raise ConfigError(
                f"offload={{{word!r}: {tier!r}}}: {UNDIVIDED[word]}, so a part is of 'optimizer' or 'params': write "
                f"{str(found)!r} for {word}."
            )
        tiers.update(dict.fromkeys(WORDS[word], (found, share)))
    cells = layout.cells()
    missing = [state for state in tiers if state not in cells]
    if missing:
        raise ConfigError(
            f"offload= names {', '.join(missing)}, of which this table keeps no copy: its master is what is gathered, "
            "so name 'optimizer'."
        )
    for state, (tier, share) in tiers.items():
        folder = cells[state].folder if tier is Tier.DISK else None
        cells[state] = replace(cells[state], tier=tier, share=share, folder=folder)
    if FOLDER in offload:
        filed = [state for state, cell in cells.items() if cell.tier is Tier.DISK]
        if not filed:
            raise ConfigError(
                f"offload= names the folder {described(offload[FOLDER])}, but nothing rests on disk: say what does, as "
                "in {'optimizer': 'disk', 'folder': ...}, or leave it out."
            )
        if not are_folders(folders := folders_of(offload[FOLDER])):
            raise ConfigError(f"offload= has folder={described(offload[FOLDER])}: it is {FOLDERS}.")
        cells.update({state: replace(cells[state], folder=folders) for state in filed})
    return layout.replace(**cells)


def _alike(layout: Layout, given: str) -> dict[str, str]:
    """Tiers by state where one is named for all."""
    tier, share = _tier("offload=", given)
    slower = [state for state, cell in layout.cells().items() if cell.tier is not Tier.DEVICE]
    part = f"{tier}:{share!r}"
    return {state: part if state in SHARED else str(tier) for state in dict.fromkeys((*UPDATE, *slower))}


def _by_state(text: str, layout: Layout) -> dict[str, Any]:
    """What ``"optimizer=host,grads=disk"`` says, by state; ``"disk,folder=/mnt/a"`` too."""
    tiers: dict[str, Any] = {}
    for number, part in enumerate(parts := text.split(",")):
        state, equals, tier = (word.strip() for word in part.partition("="))
        if not equals and not number and all(each.partition("=")[0].strip() == FOLDER for each in parts[1:]):
            tiers.update(_alike(layout, state))
            continue
        if not equals:
            why = f"names no tier: write {state or 'grads'}=host"
            if state.partition(":")[0] in list(Tier):
                why = f"names no state: write optimizer={state}, or 'folder=' alone behind a tier of all"
            raise ConfigError(f"offload= is {text!r}, but {part.strip()!r} {why}.")
        if state in tiers:
            raise ConfigError(f"offload= is {text!r}, which names {state} twice.")
        tiers[state] = tier.split(os.pathsep) if state == FOLDER and os.pathsep in tier else tier
    return tiers


def _tier(where: str, given: Any) -> tuple[Tier, float]:
    """The tier, and which part of a state rests there."""
    tier, colon, part = given.partition(":") if isinstance(given, str) and given not in list(Tier) else (given, "", "")
    if tier not in list(Tier):
        raise ConfigError(f"{where}: {described(tier)} is not a tier.{_meant(str(tier))}")
    if not colon:
        return Tier(tier), 1.0
    try:
        share = float(part)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        folder = " A folder is named beside it, as in 'disk,folder=/mnt/nvme0'." if os.sep in part else ""
        raise ConfigError(
            f"{where}: after '{tier}:' give which part of the bytes is kept there at least, above 0 and at most 1, as "
            f"in '{tier}:0.7', and not {part!r}.{folder}"
        )
    return Tier(tier), share


def _meant(given: str) -> str:
    if os.sep in given:
        return " A folder is named beside the tier, as in 'disk,folder=/mnt/nvme0'."
    return meant(given, [str(tier) for tier in Tier])


# -- which units stay


def with_staying(units: Sequence[UnitSpec], layout: Layout, near: Callable[[Layout], Layout]) -> list[UnitSpec]:
    """The units under a bound ``layout``, those that stay with tables of their own: what ``near`` gives for each."""
    stay = staying(units, layout)

    def changed(unit: UnitSpec) -> UnitSpec:
        return replace(unit, segments=tuple(replace(s, table=near(s.table_or(layout))) for s in unit.segments))

    return [changed(unit) if unit.name in stay else unit for unit in units]


def staying(units: Sequence[UnitSpec], layout: Layout) -> set[str]:
    """Names of the units, which are in the order of their forward, whose states stay: as many as fit into what
    ``layout.share`` leaves, roots first, then in that order. Of units whose params stay those between them that do not
    are spread evenly, so that each of these comes while others compute."""
    sizes = {unit.name: _num_bytes(unit, layout) for unit in units}
    moved = sum(sizes.values())
    least = layout.share * moved
    found: set[str] = set()
    order = sorted(units, key=lambda unit: not unit.root)
    for unit in [*_spread(order, sizes, moved - least), *order] if layout.shares_params else order:
        if unit.name not in found and sizes[unit.name] and moved - sizes[unit.name] >= least:
            found.add(unit.name)
            moved -= sizes[unit.name]
    return found


def _spread(units: Sequence[UnitSpec], sizes: Mapping[str, float], room: float) -> Iterator[UnitSpec]:
    """Roots, and of the others every one with which they still have no more than their part of what is left."""
    left = room - sum(sizes[unit.name] for unit in units if unit.root)
    inner = sum(sizes[unit.name] for unit in units if not unit.root)
    passed = taken = 0.0
    for unit in units:
        if unit.root:
            yield unit
            continue
        passed += sizes[unit.name]
        if taken + sizes[unit.name] <= left * passed / inner:
            taken += sizes[unit.name]
            yield unit


def _num_bytes(unit: UnitSpec, layout: Layout) -> float:
    """In proportion to its optimizer's states; or, of params, their bytes on all ranks together."""
    if layout.shares_params:
        return sum(segment.value_bytes(segment.length) for segment in unit.segments)
    return sum(s.length * ITEMSIZE[s.dtype_for("master", layout)] for s in unit.segments if s.trainable)
