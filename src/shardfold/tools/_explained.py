"""What `shardfold explain --config` prints of a DeepSpeed config, also of one that a client still fills in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardfold.compat.deepspeed.config_check import AUTO, check
from shardfold.compat.deepspeed.config_keys import KEYS
from shardfold.compat.deepspeed.config_read import TRIAD, Settings, read
from shardfold.compat.deepspeed.config_source import load
from shardfold.compat.deepspeed.config_text import effective, said
from shardfold.plan.explain import explain_preset

__all__ = ["explain_config"]

TRAIN, MICRO, _ = TRIAD


def explain_config(config: Path, *, mesh: Mapping[str, int], params: int, blocks: int | None = None) -> str:
    """What a config becomes: its layout's table and program with their cost, every effective value, the notes.

    Values that are ``"auto"`` are taken as DeepSpeed's defaults, which a line says.

    Args:
        config: its file.
        mesh: ranks between and within nodes.
        params: parameters of the model that it is shown for.
        blocks: of that model; None: as many as decoders of that size have.

    Raises:
        DeepSpeedConfigError: it cannot be honoured.
    """
    ranks = mesh["inter"] * mesh["intra"]
    raw, where = load(config)
    autos = check(raw, where).autos
    settings = _filled(raw, autos, ranks) if autos else read(config, world_size=ranks)
    if settings.mesh is not None:
        of_data = ranks // settings.sizes.tensor
        intra = settings.mesh.get("intra", of_data)
        mesh = {"inter": of_data // intra, "intra": intra}
    parts = [
        f"{config} on {ranks} ranks: layout {settings.layout}{_tiers(settings)}",
        _said_of_autos(autos, settings),
        explain_preset(settings.table, mesh=mesh, precision=settings.precision, params=params, blocks=blocks),
        effective(settings),
        said(settings.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def _filled(raw: Mapping[str, Any], autos: list[str], ranks: int) -> Settings:
    """A config with defaults where values are ``"auto"``; a batch is of one sample where it says nothing else."""
    given = _without_autos(raw)
    if {TRAIN, MICRO} & set(autos) and not {TRAIN, MICRO} & set(given):
        given[MICRO] = 1
    settings = read(given, world_size=ranks)
    return replace(settings, origins={**settings.origins, **{path: AUTO for path in autos if path in KEYS}})


def _without_autos(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_autos(value) if isinstance(value, Mapping) else value
        for name, value in section.items()
        if value != AUTO
    }


def _said_of_autos(autos: list[str], settings: Settings) -> str:
    """One sentence: which values are not known yet, and what stands for them here."""
    if not autos:
        return ""
    each = ", ".join(f"{path} = {_json(settings[path])}" if path in KEYS else f"{path} left out" for path in autos)
    return (
        "values of 'auto' are filled in by the client that trains (transformers' Trainer, Accelerate) from its own "
        f"arguments; here they are DeepSpeed's defaults: {each}. For others, write them in place of 'auto'."
    )


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _tiers(settings: Settings) -> str:
    """What of the layout rests in a slower tier."""
    by_tier: dict[str, list[str]] = {}
    for state, tier in settings.offload.items():
        by_tier.setdefault(tier, []).append(state)
    return "".join(f", {' and '.join(states)} in the {tier} tier" for tier, states in by_tier.items())
