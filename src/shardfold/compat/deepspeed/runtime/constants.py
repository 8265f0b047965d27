"""``deepspeed.runtime.constants``: the names of a config's keys and sections, and their defaults, in capitals.

``TRAIN_BATCH_SIZE`` is ``"train_batch_size"``, ``TRAIN_BATCH_SIZE_DEFAULT`` what holds where it is absent.
"""

from __future__ import annotations

from typing import Any

from shardfold.compat.deepspeed.config_check import SECTIONS
from shardfold.compat.deepspeed.config_keys import KEYS

ROUTE_TRAIN, ROUTE_PREDICT, ROUTE_EVAL, ROUTE_ENCODE = "train", "predict", "eval", "encode"
TYPE, PARAMS, ENABLED = "type", "params", "enabled"
BFLOAT16, FP16 = "bf16", "fp16"
ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER = "adam", "adamw", "lamb"
LION_OPTIMIZER, ADAGRAD_OPTIMIZER, MUON_OPTIMIZER = "lion", "adagrad", "muon"

_TOP = {path for path in (*KEYS, *SECTIONS) if path and "." not in path}


def __getattr__(name: str) -> Any:
    key = name.lower()
    if name.isupper() and key in _TOP:
        return key
    if name.isupper() and (plain := key.removesuffix("_default")) in KEYS and plain != key:
        return KEYS[plain].default
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name.upper() for name in _TOP), *(f"{n.upper()}_DEFAULT" for n in _TOP & KEYS.keys())})
