"""The section ``weight_quantization``: weights of a model that is only asked, as codes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardfold.compat.deepspeed.config_check import Note
from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.errors import LayoutError, did_you_mean
from shardfold.plan.quantized import Quantized

__all__ = ["base_of", "codes_of"]

INITIALIZATION, POST = "quantized_initialization", "post_init_quant"
RULE = {"num_bits": 8, "group_size": 64, "group_dim": 0, "symmetric": False, "quantize_on_load": False}
OTHERWISE = {
    "group_dim": "weights of a group follow each other in memory",
    "symmetric": "levels lie evenly around zero",
}


def codes_of(bits: Any, group: Any, where: str) -> str:
    """The format of so many bits in groups of so many weights.

    Raises:
        DeepSpeedConfigError: there is none.
    """
    if bits not in (4, 8):
        raise DeepSpeedConfigError(f"{where} is {bits!r}: weights rest in 8 bits or in 4.")
    try:
        return Quantized(format=f"int{bits}/{group}").format
    except LayoutError:
        raise DeepSpeedConfigError(f"{where}: groups of {group!r} weights are not here; give group_size 64.") from None


def base_of(section: Any, where: str, notes: list[Note]) -> Quantized | None:
    """What weights rest as; None: as they are.

    Args:
        section: ``quantized_initialization``, a rule for all linear layers; or ``post_init_quant``, rules by a part of
            modules' names, which have to be one.
        where: it stands.
        notes: takes what has no effect.

    Raises:
        DeepSpeedConfigError: a key is unknown, or rules differ.
    """
    if not isinstance(section, Mapping):
        raise DeepSpeedConfigError(f"{where} is {section!r}: it is a dict with {INITIALIZATION} or {POST}.")
    _known(where, section, (INITIALIZATION, POST))
    whole, named = section.get(INITIALIZATION) or {}, section.get(POST) or {}
    if not whole and not named:
        return None
    rules = {f"{where}.{INITIALIZATION}": whole} if whole else {}
    rules |= {f"{where}.{POST}.{name}": rule for name, rule in named.items()}
    found: dict[str, str] = {}
    for place, rule in rules.items():
        if not isinstance(rule, Mapping):
            raise DeepSpeedConfigError(f"{place} is {rule!r}: it is a dict with num_bits and group_size.")
        _known(place, rule, RULE)
        found[place] = codes_of(rule.get("num_bits", 8), rule.get("group_size", 64), f"{place}.num_bits")
        notes += [Note(f"{place}.{name}", rule[name], why) for name, why in OTHERWISE.items() if name in rule]
    if len(set(found.values())) > 1:
        said = ", ".join(f"{place} {form}" for place, form in found.items())
        raise DeepSpeedConfigError(f"{said}: all weights in codes have one format here, so give one rule.")
    patterns = () if whole else tuple(f"*{name}*" for name in named)
    return Quantized(format=next(iter(found.values())), modules=patterns)


def _known(where: str, section: Mapping[str, Any], known: Any) -> None:
    for key in section:
        if key not in known:
            raise DeepSpeedConfigError(f"{where}.{key}: this key is unknown.{did_you_mean(str(key), known)}")
