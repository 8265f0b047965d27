"""``deepspeed.runtime.config_utils``: looking things up in a config's dict."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "DeepSpeedConfigObject",
    "dict_raise_error_on_duplicate_keys",
    "get_dict_param",
    "get_list_param",
    "get_scalar_param",
]


class DeepSpeedConfigObject:
    """Shows its attributes."""

    def repr(self) -> dict[str, Any]:
        """The attributes by name."""
        return vars(self)

    def __repr__(self) -> str:
        return json.dumps(vars(self), sort_keys=True, indent=4, default=str)


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """The value of a key, or the default where it is absent."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """What ``json.load`` takes as ``object_pairs_hook``.

    Raises:
        ValueError: a key is there twice.
    """
    twice = [key for key, count in Counter(key for key, _ in ordered_pairs).items() if count > 1]
    if twice:
        raise ValueError(f"Duplicate keys in DeepSpeed config: {twice}.")
    return dict(ordered_pairs)
