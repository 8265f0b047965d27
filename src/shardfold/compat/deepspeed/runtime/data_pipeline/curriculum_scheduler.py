"""How difficult the data of a step may be, such as how long its sequences: from easy to hard over many steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.compat.deepspeed.utils.logging import logger
from shardfold.errors import UsageError, did_you_mean
from shardfold.plan.checks import described

__all__ = ["CurriculumScheduler"]

ROOT = ("total_curriculum_step", "difficulty_step", "root_degree")
NEEDS: dict[str, tuple[str, ...]] = {
    "fixed_linear": ROOT[:2],
    "fixed_root": ROOT,
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}
ALIGNED = 8  # what lengths of fp16 matrices are multiples of, for tensor cores


class CurriculumScheduler:
    """The difficulty of each step by one of DeepSpeed's schedules.

    ============== ====================================================================================================
    fixed_linear   grows by equal amounts over ``total_curriculum_step`` steps, in multiples of ``difficulty_step``
    fixed_root     the same along the ``root_degree``-th root: fast at first
    fixed_discrete ``difficulty[i]`` up to and with step ``max_step[i]``, and the last of them from there on
    custom         what the function of :meth:`set_custom_get_difficulty` says
    ============== ====================================================================================================

    Args:
        config: ``min_difficulty``, ``max_difficulty``, ``schedule_type``, and ``schedule_config`` with the words above;
            other keys of such a section of a config are of no matter here.

    Attributes:
        state: of these keys, and ``current_difficulty``, to save and to put back.
        custom_get_difficulty: what :meth:`set_custom_get_difficulty` was given.

    Raises:
        WrongArgument: a key is missing, or its value makes no schedule.
        UsageError: there is no schedule of that type.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        for name in ("min_difficulty", "max_difficulty", "schedule_type"):
            if name not in config:
                raise WrongArgument(f"CurriculumScheduler: the config has no {name!r}: add it.")
        kind = config["schedule_type"]
        if not isinstance(kind, str) or kind not in NEEDS:
            near = did_you_mean(kind, NEEDS) if isinstance(kind, str) else ""
            raise UsageError(f"CurriculumScheduler: schedule_type is {described(kind)}, which is unknown.{near}")
        self.state: dict[str, Any] = {
            "min_difficulty": config["min_difficulty"],
            "max_difficulty": config["max_difficulty"],
            "current_difficulty": config["min_difficulty"],
            "schedule_type": kind,
        }
        self.custom_get_difficulty: Callable[[int], Any] | None = None
        if NEEDS[kind]:
            self.state["schedule_config"] = _checked(kind, config.get("schedule_config"))

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], Any]) -> None:
        """Of the type ``custom``: from the number of a step to its difficulty."""
        self.custom_get_difficulty = schedule_function

    def get_difficulty(self, global_steps: int) -> Any:
        """Of a step, whatever was asked before.

        Raises:
            UsageError: the type is ``custom``, and no function was set.
        """
        kind = self.state["schedule_type"]
        if kind == "fixed_discrete":
            return self._discrete(global_steps)
        if kind != "custom":
            return self._root(global_steps, 1 if kind == "fixed_linear" else None)
        if self.custom_get_difficulty is None:
            raise UsageError(
                "CurriculumScheduler: schedule_type is 'custom': first give a function to set_custom_get_difficulty()."
            )
        return self.custom_get_difficulty(global_steps)

    def update_difficulty(self, global_steps: int) -> Any:
        """The same, kept as the current one; once that is the greatest, it stays."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]

    def _discrete(self, step: int) -> Any:
        said = self.state["schedule_config"]
        return next(
            (hard for hard, last in zip(said["difficulty"], said["max_step"], strict=False) if step <= last),
            said["difficulty"][-1],
        )

    def _root(self, step: int, degree: float | None) -> Any:
        least, most, said = self.state["min_difficulty"], self.state["max_difficulty"], self.state["schedule_config"]
        part = (step / said["total_curriculum_step"]) ** (1.0 / (said["root_degree"] if degree is None else degree))
        unit = said["difficulty_step"]
        reached = math.floor(part * (most - least) + least) // unit * unit
        first = math.ceil(least / unit) * unit  # the least that is a multiple: rounding down may end below least
        return min(max(reached, first), most)


def _checked(kind: str, said: Any) -> Mapping[str, Any]:
    """The ``schedule_config`` of a type."""
    where = f"CurriculumScheduler: schedule_config of {kind!r}"
    if not isinstance(said, Mapping):
        raise WrongArgument(f"{where} is {described(said)}: it is a dict with {', '.join(NEEDS[kind])}.")
    for name in NEEDS[kind]:
        if name not in said:
            raise WrongArgument(f"{where} has no {name!r}: add it.")
        if name in ROOT and not (isinstance(said[name], int | float) and said[name] > 0):
            raise WrongArgument(f"{where}: {name} is {described(said[name])}: it is a number above 0.")
    if kind == "fixed_discrete":
        hard, last = said["difficulty"], said["max_step"]
        if not last or len(hard) != len(last) + 1 or list(last) != sorted(last):
            raise WrongArgument(
                f"{where}: max_step is the last step of each difficulty but the last one, in order: of "
                f"{len(hard)} difficulties there are {len(last)} steps, {list(last)}."
            )
    elif said["difficulty_step"] % ALIGNED:
        logger.warning(
            "CurriculumScheduler: difficulty_step is %s: if difficulties are lengths of sequences, multiples of 8 in "
            "fp16, and of 16 in int8, let a GPU use its tensor cores.",
            said["difficulty_step"],
        )
    return said
