"""Dtypes by their names in a config."""

from __future__ import annotations

from enum import Enum

import torch

__all__ = ["DtypeEnum"]


class DtypeEnum(Enum):
    """A dtype, by itself or any of its names: ``DtypeEnum("half") is DtypeEnum(torch.float16) is DtypeEnum.fp16``.

    Raises:
        ValueError: it is no name of fp32, fp16, bf16 or int8.
    """

    fp16 = torch.float16
    fp32 = torch.float32
    int8 = torch.int8
    bf16 = torch.bfloat16

    @classmethod
    def _missing_(cls, value: object) -> DtypeEnum | None:
        names = {"half": cls.fp16, "float": cls.fp32}
        for each in cls:
            names |= dict.fromkeys((each.name, str(each.value), str(each.value).removeprefix("torch.")), each)
        return names.get(value) if isinstance(value, str) else None
