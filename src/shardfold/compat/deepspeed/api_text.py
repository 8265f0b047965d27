"""The table of names in ``docs/from-deepspeed.md``: what is here, where it is tested, and what is not."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from types import ModuleType

from shardfold.compat.deepspeed.absent import ABSENT

__all__ = ["TESTED", "markdown", "names"]

#: ``{module, below deepspeed: the file of ``tests/compat`` that says what its names do}``
TESTED: dict[str, str] = {
    "": "test_initialize.py",
    "accelerator": "test_modules.py",
    "checkpoint.utils": "test_modules.py",
    "checkpointing": "test_modules.py",
    "comm": "test_modules.py",
    "comm.config": "test_names.py",
    "constants": "test_modules.py",
    "env_report": "test_install.py",
    "git_version_info": "test_names.py",
    "launcher.constants": "test_names.py",
    "launcher.launch": "test_behaviours.py",
    "launcher.multinode_runner": "test_behaviours.py",
    "launcher.runner": "test_names.py",
    "moe.layer": "test_moe.py",
    "moe.sharded_moe": "test_moe.py",
    "moe.utils": "test_behaviours.py",
    "monitor.comet": "test_observers.py",
    "monitor.config": "test_names.py",
    "monitor.csv_monitor": "test_observers.py",
    "monitor.monitor": "test_observers.py",
    "monitor.tensorboard": "test_observers.py",
    "monitor.wandb": "test_observers.py",
    "ops.adagrad": "test_modules.py",
    "ops.adam": "test_modules.py",
    "ops.lamb": "test_modules.py",
    "ops.lion": "test_modules.py",
    "ops.op_builder": "test_behaviours.py",
    "profiling.config": "test_names.py",
    "profiling.flops_profiler": "test_observers.py",
    "runtime.activation_checkpointing.config": "test_names.py",
    "runtime.bf16_optimizer": "test_documented.py",
    "runtime.config": "test_config.py",
    "runtime.config_utils": "test_behaviours.py",
    "runtime.data_pipeline.curriculum_scheduler": "test_behaviours.py",
    "runtime.dataloader": "test_initialize.py",
    "runtime.engine": "test_engine.py",
    "runtime.fp16.fused_optimizer": "test_documented.py",
    "runtime.fp16.unfused_optimizer": "test_documented.py",
    "runtime.lr_schedules": "test_modules.py",
    "runtime.pipe": "test_behaviours.py",
    "runtime.pipe.engine": "test_pipeline.py",
    "runtime.pipe.module": "test_pipeline.py",
    "runtime.pipe.schedule": "test_behaviours.py",
    "runtime.pipe.topology": "test_behaviours.py",
    "runtime.precision_config": "test_names.py",
    "runtime.sequence_parallel.parallel_state_sp": "test_ulysses.py",
    "runtime.sequence_parallel.ulysses_sp": "test_ulysses.py",
    "runtime.utils": "test_modules.py",
    "runtime.zero.config": "test_names.py",
    "runtime.zero.leaf_module_config": "test_behaviours.py",
    "runtime.zero.offload_config": "test_names.py",
    "runtime.zero.partition_parameters": "test_zero.py",
    "runtime.zero.stage3": "test_zero.py",
    "runtime.zero.stage_1_and_2": "test_zero.py",
    "runtime.zero.utils": "test_behaviours.py",
    "sequence.layer": "test_ulysses.py",
    "utils": "test_modules.py",
    "utils.bwc": "test_behaviours.py",
    "utils.comms_logging": "test_modules.py",
    "utils.exceptions": "test_behaviours.py",
    "utils.groups": "test_modules.py",
    "utils.logging": "test_modules.py",
    "utils.module_utils": "test_behaviours.py",
    "utils.numa": "test_behaviours.py",
    "utils.timer": "test_modules.py",
    "utils.torch": "test_behaviours.py",
    "utils.zero_to_fp32": "test_saving.py",
    "zero": "test_zero.py",
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


def markdown(tests: Mapping[str, str]) -> str:
    """Modules with their names and tests, methods of the engine, then what is absent by its reason.

    Args:
        tests: ``{file of tests: its text}``; a name counts as tested where it is a word of the text.
    """
    words = {file: set(re.findall(r"\w+", text)) for file, text in tests.items()}
    return "\n".join([*_here(words), "", *_engine(words), "", *_refused()])


def _here(words: Mapping[str, set[str]]) -> Iterator[str]:
    yield "| module | what its names do is tested | of these the tests compare the name, its kind and its parameters |"
    yield "|---|---|---|"
    for path, test in TESTED.items():
        place = "runtime.activation_checkpointing.checkpointing" if path == "checkpointing" else path
        module = importlib.import_module(f"{__package__}.{place}".rstrip("."))
        row = " | ".join(_by_test(names(module, path), test, words))
        yield f"| `{f'deepspeed.{path}'.rstrip('.')}` | {row} |"


def _by_test(found: list[str], test: str, words: Mapping[str, set[str]]) -> Iterator[str]:
    """Names by the file that has them, the one named first; then those that no file has."""
    left = dict.fromkeys(found)
    said: list[str] = []
    for file in dict.fromkeys([test, *sorted(words)]):
        here = [name for name in left if name in words.get(file, ())]
        if here:
            said.append(f"{file}: " + ", ".join(f"`{name}`" for name in here))
        for name in here:
            del left[name]
    yield "; ".join(said)
    yield ", ".join(f"`{name}`" for name in left)


def _engine(words: Mapping[str, set[str]]) -> Iterator[str]:
    from torch import nn

    from shardfold.compat.deepspeed.engine import DeepSpeedEngine

    methods = sorted(name for name in dir(DeepSpeedEngine) if not name.startswith("_") and not hasattr(nn.Module, name))
    tested, compared = _by_test(methods, "test_engine.py", words)
    yield "Of `DeepSpeedEngine`, besides an `nn.Module`'s:"
    yield ""
    yield "| tested in | members |"
    yield "|---|---|"
    for part in tested.split("; "):
        file, _, said = part.partition(": ")
        yield f"| {file} | {said} |"
    yield f"| by name and parameters alone | {compared} |"


def _refused() -> Iterator[str]:
    yield "| refused | with the sentence |"
    yield "|---|---|"
    for reason in dict.fromkeys(ABSENT.values()):
        said = ", ".join(f"`{name}`" for name, why in ABSENT.items() if why == reason)
        yield f"| {said} | {reason} |"
