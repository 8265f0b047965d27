"""``deepspeed.runtime.config``: the config under the name that clients import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardfold.compat.deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError
from shardfold.compat.deepspeed.lazy import attach
from shardfold.compat.deepspeed.runtime.constants import (
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    MUADAM_OPTIMIZER,
    MUADAMW_OPTIMIZER,
    MUON_OPTIMIZER,
    MUSGD_OPTIMIZER,
)

TENSOR_CORE_ALIGN_SIZE = 8
ADAM_W_MODE, ADAM_W_MODE_DEFAULT, TORCH_ADAM_PARAM = "adam_w_mode", True, "torch_adam"
EXPERT_PARALLEL = "expert_parallel"
DEEPSPEED_OPTIMIZERS = [
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    MUADAM_OPTIMIZER,
    MUADAMW_OPTIMIZER,
    MUSGD_OPTIMIZER,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
]


class DeepSpeedConfigWriter:
    """A config that is put together and written to a file.

    Attributes:
        data: the config's dict.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = dict(data or {})

    def add_config(self, key: str, value: Any) -> None:
        """Sets a key."""
        self.data[key] = value

    def load_config(self, filename: str) -> None:
        """Takes the config of a file of JSON in place of what there is."""
        with open(filename, encoding="utf-8") as file:
            self.data = json.load(file)

    def write_config(self, filename: str) -> None:
        """Writes a file of JSON."""
        with open(filename, "w", encoding="utf-8") as file:
            json.dump(self.data, file)


__getattr__, __dir__ = attach(__name__)

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError", "DeepSpeedConfigWriter"]
__all__ += [name for name in dir() if name.isupper()]  # pyright: ignore[reportUnsupportedDunderAll]
