"""What users give: what values have to be, which arguments calls know, and how messages show either.

Folders, and numbers of bytes (``"1.5GiB"``), are values that several arguments take.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from math import inf
from numbers import Integral, Real
from typing import Any, TypeVar

from shardfold.errors import ConfigError, did_you_mean, nearest

__all__ = [
    "FOLDERS",
    "Folders",
    "are_folders",
    "changes_of",
    "check_flags",
    "check_times",
    "described",
    "folders_of",
    "human",
    "is_flag",
    "is_integer",
    "is_number",
    "keywords",
    "known_arguments",
    "meant",
    "on_this_rank",
    "parse_bytes",
    "regrouped",
    "unknown",
]


LONGEST = 1e9  # seconds, 31 years: what process groups take
SHORT = 60  # characters of a value that a message shows


def is_integer(value: Any, least: float = -inf, most: float = inf) -> bool:
    """Whether it is a whole number (of Python or NumPy, and not True or False) in that range."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def is_number(value: Any, least: float = -inf, most: float = inf) -> bool:
    """Whether it is a real number (not NaN, True or False) in that range, which a float can hold."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return least <= float(value) <= most
    except OverflowError:
        return False


def is_flag(value: Any) -> bool:
    """Whether it is True or False, or 1 or 0."""
    return isinstance(value, int) and value in (0, 1)


def described(value: Any) -> str:
    """A value as a message has it: short ones themselves, of others the type."""
    if value is None or (isinstance(value, (str, bytes, int, float, list, tuple)) and len(repr(value)) <= SHORT):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def changes_of(settings: Any) -> str:
    """What a dataclass has otherwise than by default, as arguments.

    Examples:
        >>> changes_of(sf.Clip(norm=1.0))
        'norm=1.0'
    """
    given = [(each.name, getattr(settings, each.name), each.default) for each in fields(settings)]
    return ", ".join(f"{name}={value!r}" for name, value, usual in given if value != usual) or "all as by default"


def check_flags(call: str, **flags: Any) -> None:
    """
    Raises:
        ConfigError: one of the arguments of ``call``, by their names, is neither True nor False.
    """
    for name, value in flags.items():
        if not is_flag(value):
            raise ConfigError(f"{call}: {name}= is {described(value)}: it is True or False.")


def check_times(call: str, *, patience: Any, timeout: Any) -> None:
    """
    Raises:
        ConfigError: one of them is no time that ranks can wait.
    """
    times: Mapping[str, Any] = {"patience": patience, "timeout": timeout}
    for name, value in times.items():
        if not is_number(value, 0, LONGEST) or value == 0:
            raise ConfigError(
                f"{call}: {name}= is {described(value)}: it is a number of seconds, more than 0 and at most 1e9."
            )


# -- names of arguments


Target = TypeVar("Target", bound=Callable[..., Any])

ELSEWHERE: Mapping[str, Collection[str]] = {
    "offload": (
        "cpu_offload",
        "offload_optimizer",
        "offload_param",
        "offload_parameters",
        "nvme_path",
        "nvme_offload_dir",
    ),
    "layout": (
        "stage",
        "zero_stage",
        "zero_optimization",
        "sharding_strategy",
        "strategy",
        "cpu_offload",
        "offload",
        "offload_optimizer",
        "offload_param",
        "tier",
        "reshard_after_forward",
    ),
    "accumulate": ("gradient_accumulation_steps", "accumulation_steps", "grad_accum", "train_batch_size"),
    "clip_norm": ("gradient_clipping", "max_grad_norm", "max_norm", "clip_grad"),
    "lr_schedule": ("lr_scheduler", "scheduler"),
    "precision": ("mixed_precision", "mp_policy", "torch_dtype", "dtype", "bf16", "fp16", "amp"),
    "mesh": (
        "device_mesh",
        "topology",
        "tensor_parallel",
        "sequence_parallel_size",
        "context_parallel_size",
        "mpu",
        "process_group",
    ),
    "units": ("auto_wrap_policy", "wrap_policy"),
    "activations": ("activation_checkpointing", "gradient_checkpointing", "checkpointing"),
    "overlap": ("overlap_comm", "forward_prefetch", "backward_prefetch", "bucket_size", "reduce_bucket_size"),
    "optimizer": ("optim", "model_parameters"),
    "weights": ("state_dict", "checkpoint"),
    "world_size": ("nproc", "nprocs", "nproc_per_node", "num_ranks"),
    "prefetch": ("prefetch_bucket_size", "stage3_prefetch_bucket_size"),
    "path": ("save_dir", "load_dir", "checkpoint_dir"),
    "dim": ("partition_dim",),
    "compute": ("param_dtype",),
    "reduce": ("reduce_dtype",),
    "lr": ("learning_rate",),
    "host": ("cpu", "ram"),
    "disk": ("nvme", "ssd"),
    "device": ("gpu", "cuda"),
    "patience": ("desync_timeout",),
}
"""What DeepSpeed, FSDP, Accelerate and Megatron-LM call what is an argument, or a word of one, here. Of those that a
call knows the first is meant."""

GROUPS: Mapping[str, tuple[str, Collection[str]]] = {
    "parallel": ("sf.Parallel(", ("mesh", "tensor", "sequence_parallel", "attention", "pipeline", "stages")),
    "runtime": ("sf.Runtime(", ("device", "timeout", "patience", "debug", "compile")),
    "init": ("sf.Init(", ("weights", "seed", "units")),
    "clip_norm": ("sf.Clip(", ("clip",)),
    "layout": ("sf.PRESETS['zero3'].replace(outer=sf.Outer(", ("outer",)),
}
"""Arguments of an engine that are values, how such a value is made, and what is in it."""
AUTO = "layout=sf.Auto(sample=...)"


def known_arguments(target: Target) -> Target:
    """Decorates a public function, or a class and its public methods: a call with a keyword that they do not have
    raises :class:`ConfigError`, which names the nearest one that they have; one without a keyword that it needs, too.
    Signatures stay as they are."""
    made: Any = target
    if not inspect.isclass(made):
        return _checked(made)
    inherited = {name for base in made.__mro__[1:] for name in vars(base)}
    for name, own in list(vars(made).items()):
        if name != "__init__" and (name.startswith("_") or name in inherited):
            continue
        if isinstance(own, staticmethod | classmethod):
            setattr(made, name, type(own)(_checked(own.__func__)))
        elif inspect.isfunction(own):
            setattr(made, name, _checked(own))
    return target


def keywords(target: Callable[..., Any]) -> list[str] | None:
    """The names that a call may give; None: any."""
    parameters = inspect.signature(target).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    named = (each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
    return [each.name for each in named if each.name != "self"]


def unknown(call: str, given: Iterable[str], known: Sequence[str]) -> str:
    """The sentence about the first name that was ``given`` to a ``call`` and is none of the ``known``, or nothing."""
    strange = [name for name in given if name not in known]
    if not strange:
        return ""
    if spelled := regrouped(strange, known):
        return f"{call} has no argument {strange[0]!r}: give {spelled}."
    return f"{call} has no argument {strange[0]!r}.{meant(strange[0], known)}"


def regrouped(names: Sequence[str], known: Collection[str]) -> str:
    """How the first of these ``names`` is given to an engine, and with it those in the same value; empty: it is in
    none, or the ``known`` are no engine's arguments.

    Examples:
        >>> sf.plan.checks.regrouped(["mesh", "seed", "tensor"], ["parallel", "runtime", "init"])
        'parallel=sf.Parallel(mesh=..., tensor=...)'
    """
    if not {"parallel", "runtime", "init"} <= {*known}:
        return ""
    if names[0] == "sample":
        return AUTO
    for holder, (makes, inside) in GROUPS.items():
        if names[0] in inside:
            fields = [f"{name}=..." for name in names if name in inside] if len(inside) > 1 else ["..."]
            return f"{holder}={makes}{', '.join(fields)}{')' * makes.count('(')}"
    return ""


def meant(name: str, known: Sequence[str]) -> str:
    """The one of the ``known`` that others call ``name`` or that is nearest to it, as a question; else all of them."""
    ours = [ours for ours, names in ELSEWHERE.items() if name in names]
    for each in ours:
        if each in known:
            return f" Did you mean {each!r}?"
    inside = [each for _, names in GROUPS.values() for each in names]
    for each in ours or [nearest(name, [*known, *inside]) or name]:
        if each not in known and (spelled := regrouped([each], known)):
            return f" Did you mean {spelled}?"
    return did_you_mean(name, known) if known else ""


def _checked(function: Any) -> Any:
    # Looked at when a call has failed only: what is right costs no more than one more call.
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            known = keywords(function)
            if known is not None and (said := unknown(_title(function), kwargs, known)):
                raise ConfigError(said) from None
            if lacking := _lacking(function, args, kwargs):
                raise ConfigError(f"{_title(function)} lacks {', '.join(lacking)}: give {lacking[0]}=.") from None
            raise

    return checked


def _lacking(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Arguments that have no default, are given by keyword only, and are not."""
    signature = inspect.signature(function)
    try:
        bound = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return []
    each = signature.parameters.values()
    return [
        one.name for one in each if one.kind is one.KEYWORD_ONLY and one.default is one.empty and one.name not in bound
    ]


def _title(function: Any) -> str:
    """A call as messages have it: ``Engine()``, ``Engine.save()``."""
    return f"{function.__qualname__.removesuffix('.__init__')}()"


# -- folders


Folders = str | tuple[str, ...] | None
FOLDERS = "the path of a folder, or several in a list, one for each drive, or None for the system's for temporary files"
"""What a cell's folder is."""


def folders_of(given: Any) -> Any:
    """Paths as text, several as a tuple; what is no folder comes back as it is."""
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        return tuple(folders_of(each) for each in given)
    return os.fspath(given) if isinstance(given, os.PathLike) else given


def are_folders(given: Any) -> bool:
    """Whether it is what :func:`folders_of` makes of folders."""
    names = given if isinstance(given, tuple) else (given,)
    return given is None or bool(names and all(isinstance(each, str) and each.strip() for each in names))


def on_this_rank(folder: str, local_rank: str) -> str:
    """The folder that is meant here: ``~`` is the user's home, and ``{local_rank}`` this rank's number on its node."""
    return os.path.expanduser(folder.replace("{local_rank}", local_rank))


# -- numbers of bytes


DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS = {**DECIMAL, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int | None:
    """The number of bytes that ``"500MB"``, ``"1.5GiB"`` or ``"4096"`` names; None if it names none above 0, or names
    bits, as ``"12Gib"`` does."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS or (match[2].endswith("b") and not match[2].islower()):
        return None
    return int(float(match[1]) * UNITS[match[2].upper()]) or None


def human(num_bytes: float) -> str:
    """``num_bytes`` in binary units, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    raise AssertionError
