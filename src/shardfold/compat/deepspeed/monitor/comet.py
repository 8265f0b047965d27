"""Comet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.monitor.base import Event, Monitor, is_rank_0

__all__ = ["CometMonitor"]


class CometMonitor(Monitor):
    """Starts an experiment, and logs each quantity into it at most once in ``samples_log_interval`` samples."""

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
        self.samples_log_interval: int = comet_config.samples_log_interval
        self.experiment: Any = None
        self._last: dict[str, int] = {}
        if self.enabled and is_rank_0():
            try:
                import comet_ml  # pyright: ignore[reportMissingImports]
            except ImportError:
                raise DeepSpeedConfigError(
                    "comet.enabled is true, but the package is missing: pip install comet_ml."
                ) from None
            names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
            self.experiment = comet_ml.start(**{name: getattr(comet_config, name) for name in names})
            if comet_config.experiment_name is not None:
                self.experiment.set_name(comet_config.experiment_name)

    def write_events(self, event_list: Iterable[Event]) -> None:
        if self.experiment is None:
            return
        for name, value, samples in ((event[0], event[1], event[2]) for event in event_list):
            if name not in self._last or samples - self._last[name] >= self.samples_log_interval:
                self._last[name] = samples
                self.experiment.log_metric(name=name, value=value, step=samples)
