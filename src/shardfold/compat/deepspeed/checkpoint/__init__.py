"""Checkpoints' helpers."""

from shardfold.compat.deepspeed.checkpoint.constants import *  # noqa: F403
from shardfold.compat.deepspeed.checkpoint.utils import (  # noqa: F401
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)
from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(__name__, modules=("constants", "ds_to_universal", "utils"))
