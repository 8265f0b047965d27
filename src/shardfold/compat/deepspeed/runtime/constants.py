"""``deepspeed.runtime.constants``: the names of a config's keys and sections, and their defaults, in capitals.

``TRAIN_BATCH_SIZE`` is ``"train_batch_size"``, ``TRAIN_BATCH_SIZE_DEFAULT`` what holds in DeepSpeed where it is absent.
"""

from __future__ import annotations

from typing import Any

from shardfold.compat.deepspeed.config_check import SECTIONS
from shardfold.compat.deepspeed.config_keys import KEYS

BFLOAT16 = "bf16"
BFLOAT16_OLD = "bfloat16"
COMMUNICATION_DATA_TYPE_DEFAULT = None
FP16 = "fp16"
PIPE_REPLICATED = "ds_pipe_replicated"
ROUTE_ENCODE = "encode"
ROUTE_EVAL = "eval"
ROUTE_PREDICT = "predict"
ROUTE_TRAIN = "train"

# Words of the sections that name what they choose
PARAMS, ENABLED = "params", "enabled"
ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER = "adam", "adamw", "lamb"
LION_OPTIMIZER, ADAGRAD_OPTIMIZER, MUON_OPTIMIZER = "lion", "adagrad", "muon"
MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER = "muadam", "muadamw", "musgd"


_TOP = {path for path in (*KEYS, *SECTIONS) if path and "." not in path}


def __getattr__(name: str) -> Any:
    """The config's keys and sections, and their defaults."""
    key = name.lower()
    if name.isupper() and key in _TOP:
        return key
    if name.isupper() and (plain := key.removesuffix("_default")) in KEYS and plain != key:
        return KEYS[plain].default
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name.upper() for name in _TOP), *(f"{n.upper()}_DEFAULT" for n in _TOP & KEYS.keys())})
