"""The table of names in ``docs/from-deepspeed.md``: what is here, where it is tested, and what is not."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

from shardfold.compat.deepspeed.absent import ABSENT

__all__ = ["TESTED", "markdown", "names"]

#: ``{module, below deepspeed: the file of tests that says what its names do}``
TESTED: dict[str, str] = {
    "": "test_face_initialize.py",
    "accelerator": "test_face_modules.py",
    "checkpoint.utils": "test_face_modules.py",
    "checkpointing": "test_face_modules.py",
    "comm": "test_face_modules.py",
    "comm.config": "test_face_names.py",
    "constants": "test_face_modules.py",
    "env_report": "test_face_install.py",
    "git_version_info": "test_face_names.py",
    "launcher.constants": "test_face_names.py",
    "launcher.runner": "test_face_names.py",
    "monitor.comet": "test_face_observers.py",
    "monitor.config": "test_face_names.py",
    "monitor.csv_monitor": "test_face_observers.py",
    "monitor.monitor": "test_face_observers.py",
    "monitor.tensorboard": "test_face_observers.py",
    "monitor.wandb": "test_face_observers.py",
    "ops.adagrad": "test_face_modules.py",
    "ops.adam": "test_face_modules.py",
    "ops.lamb": "test_face_modules.py",
    "ops.lion": "test_face_modules.py",
    "profiling.config": "test_face_names.py",
    "profiling.flops_profiler": "test_face_observers.py",
    "runtime.activation_checkpointing.config": "test_face_names.py",
    "runtime.config": "test_face_config.py",
    "runtime.dataloader": "test_face_initialize.py",
    "runtime.engine": "test_face_engine.py",
    "runtime.lr_schedules": "test_face_modules.py",
    "runtime.precision_config": "test_face_names.py",
    "runtime.utils": "test_face_modules.py",
    "runtime.zero.config": "test_face_names.py",
    "runtime.zero.offload_config": "test_face_names.py",
    "runtime.zero.partition_parameters": "test_face_zero.py",
    "runtime.zero.stage3": "test_face_zero.py",
    "runtime.zero.stage_1_and_2": "test_face_zero.py",
    "utils": "test_face_modules.py",
    "utils.comms_logging": "test_face_modules.py",
    "utils.groups": "test_face_modules.py",
    "utils.logging": "test_face_modules.py",
    "utils.timer": "test_face_modules.py",
    "utils.zero_to_fp32": "test_face_saving.py",
    "zero": "test_face_zero.py",
}


def names(module: ModuleType, path: str) -> list[str]:
    """The module's public objects, without submodules and what is absent."""
    listed = getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]
    return sorted(
        name
        for name in listed
        if f"{path}.{name}".lstrip(".") not in ABSENT
        and not isinstance(value := getattr(module, name), ModuleType)
        and getattr(value, "__module__", "") != f"{__package__}.lazy"
    )


def markdown() -> str:
    """Modules with their names and tests, methods of the engine, then what is absent by its reason."""
    return "\n".join([*_here(), "", *_engine(), "", *_refused()])


def _here() -> Iterator[str]:
    yield "| module | names | tested in |"
    yield "|---|---|---|"
    for path, test in TESTED.items():
        place = "runtime.activation_checkpointing.checkpointing" if path == "checkpointing" else path
        module = importlib.import_module(f"{__package__}.{place}".rstrip("."))
        said = ", ".join(f"`{name}`" for name in names(module, path))
        yield f"| `{f'deepspeed.{path}'.rstrip('.')}` | {said} | {test} |"


def _engine() -> Iterator[str]:
    from torch import nn

    from shardfold.compat.deepspeed.engine import DeepSpeedEngine

    methods = sorted(name for name in dir(DeepSpeedEngine) if not name.startswith("_") and not hasattr(nn.Module, name))
    yield "Of `DeepSpeedEngine`, besides an `nn.Module`'s (tested in test_face_engine.py and test_face_saving.py):"
    yield ", ".join(f"`{name}`" for name in methods) + "."


def _refused() -> Iterator[str]:
    yield "| refused | with the sentence |"
    yield "|---|---|"
    for reason in dict.fromkeys(ABSENT.values()):
        said = ", ".join(f"`{name}`" for name, why in ABSENT.items() if why == reason)
        yield f"| {said} | {reason} |"
