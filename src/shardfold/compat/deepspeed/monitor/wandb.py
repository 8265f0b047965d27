"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.monitor.base import Event, Monitor, is_rank_0

__all__ = ["WandbMonitor"]


class WandbMonitor(Monitor):
    """Starts a run of ``project``, and logs into it."""

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        self.group, self.team, self.project = wandb_config.group, wandb_config.team, wandb_config.project
        if self.enabled and is_rank_0():
            _wandb().init(project=self.project, group=self.group, entity=self.team)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """As ``wandb.log``."""
        if self.enabled and is_rank_0():
            _wandb().log(data, step=step, commit=commit)

    def write_events(self, event_list: Iterable[Event]) -> None:
        for event in event_list:
            self.log({event[0]: event[1]}, step=event[2])


def _wandb() -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DeepSpeedConfigError("wandb.enabled is true, but the package is missing: pip install wandb.") from None
    return wandb
