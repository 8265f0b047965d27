"""The sections ``offload_optimizer`` and ``offload_param``: in which tier each state rests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardfold.compat.deepspeed.config_check import Note
from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.plan.layout import Layout
from shardfold.plan.offload import offloaded
from shardfold.plan.presets import named

__all__ = ["offload_of", "older_words", "path_of", "table_of"]

OPTIMIZER, PARAM = "zero_optimization.offload_optimizer.", "zero_optimization.offload_param."
RATIO = f"{OPTIMIZER}ratio"
OLDER = {"zero_optimization.cpu_offload": OPTIMIZER, "zero_optimization.cpu_offload_param": PARAM}

Get = Callable[[str], Any]


def older_words(given: dict[str, Any]) -> None:
    """Adds what older words, which are in ``given`` by path, say as the sections do.

    Raises:
        DeepSpeedConfigError: both are given.
    """
    for path, section in OLDER.items():
        if not given.get(path):
            continue
        if also := next((other for other in given if other.startswith(section)), None):
            raise DeepSpeedConfigError(
                f"{path} is an older word for {section}device, and {also} is given too: keep the second."
            )
        given[f"{section}device"] = "cpu"


def offload_of(get: Get, stage: int, notes: list[Note], early: bool) -> tuple[dict[str, str], dict[str, str | None]]:
    """The tier of each state that does not rest on the device, and the folder of each that rests in a file.

    Raises:
        DeepSpeedConfigError: a file is asked for and no folder is named, or an option does not go with it.
    """
    asked = {
        path: str(get(f"{path}device")) for path in (OPTIMIZER, PARAM) if get(f"{path}device") not in (None, "none")
    }
    for path, lowest in ((OPTIMIZER, 1), (PARAM, 3)):
        if path in asked and stage < lowest:
            stages = "stage 3" if lowest == 3 else "stages 1, 2 and 3"
            notes.append(Note(f"{path}device", asked.pop(path), f"it is for {stages}, and the stage is {stage}"))
    if OPTIMIZER in asked and not get("zero_optimization.compute_grad_norm"):
        raise DeepSpeedConfigError(
            "zero_optimization.compute_grad_norm is false, which does not support offload_optimizer: leave one out."
        )
    part = f":{get(RATIO)}" if OPTIMIZER in asked and get(RATIO) != 1 else ""
    if part and not get(RATIO):
        notes.append(Note(RATIO, 0, "no part of the optimizer's states rests there"))
        del asked[OPTIMIZER]
    elif part and PARAM in asked:
        notes.append(Note(RATIO, get(RATIO), "with the parameters all of the optimizer's states rest in a slower tier"))
        part = ""
    for path in [path for path, device in asked.items() if device == "nvme"]:
        if stage < 3:  # as DeepSpeed does, which swaps at stage 3 only
            notes.append(Note(f"{path}device", asked[path], "it rests in host memory: files are for stage 3"))
            asked[path] = "cpu"
        elif get(f"{path}nvme_path") is None and not early:
            raise DeepSpeedConfigError(
                f"{path}device is 'nvme' and there is no {path}nvme_path: give the folder of the file."
            )
    if not asked:
        return {}, {}
    there = {path: "disk" if device == "nvme" else "host" for path, device in asked.items()}
    optimizer = there.get(OPTIMIZER, "host")
    tiers = {"master": f"{optimizer}{part}", "moments": f"{optimizer}{part}"}
    if stage >= 2:
        tiers["grads"] = optimizer
    if PARAM in asked:
        tiers["params"] = there[PARAM]
        if OPTIMIZER not in asked:
            why = "with parameters, gradients and the optimizer's states rest in host memory, where they are updated"
            notes.append(Note(f"{PARAM}device", asked[PARAM], why))
    filed = [state for state, tier in tiers.items() if tier.startswith("disk")]
    return tiers, {state: get(f"{path_of(state)}nvme_path") for state in filed}


def path_of(state: str) -> str:
    """The section that says where a state rests, as the beginning of its keys."""
    return PARAM if state == "params" else OPTIMIZER


def table_of(preset: str, tiers: Mapping[str, str], folders: Mapping[str, str | None]) -> str | Layout:
    """The preset's name, or its table with these tiers; ``folders``: of the states in files."""
    if not tiers:
        return preset
    table = offloaded(named(preset), tiers)
    for state, folder in folders.items():
        table = table.edit(state, folder=folder)
    return table
