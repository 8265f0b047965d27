"""The names in ``docs/from-deepspeed.md``: modules, the names whose behaviour no test checks, and what is refused."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator
from types import ModuleType

from shardfold.compat.deepspeed.absent import ABSENT

PACKAGE = "shardfold.compat.deepspeed"
__all__ = ["MODULES", "markdown", "names"]

#: modules with public names, below ``deepspeed``
MODULES: tuple[str, ...] = (
    "",
    "accelerator",
    "checkpoint.utils",
    "checkpointing",
    "comm",
    "comm.config",
    "constants",
    "env_report",
    "git_version_info",
    "launcher.constants",
    "launcher.launch",
    "launcher.runner",
    "moe.layer",
    "moe.sharded_moe",
    "moe.utils",
    "monitor.comet",
    "monitor.config",
    "monitor.csv_monitor",
    "monitor.monitor",
    "monitor.tensorboard",
    "monitor.wandb",
    "ops.adagrad",
    "ops.adam",
    "ops.lamb",
    "ops.lion",
    "ops.op_builder",
    "profiling.config",
    "profiling.flops_profiler",
    "runtime.activation_checkpointing.config",
    "runtime.bf16_optimizer",
    "runtime.config",
    "runtime.dataloader",
    "runtime.engine",
    "runtime.fp16.fused_optimizer",
    "runtime.fp16.unfused_optimizer",
    "runtime.lr_schedules",
    "runtime.pipe",
    "runtime.pipe.engine",
    "runtime.pipe.module",
    "runtime.pipe.topology",
    "runtime.precision_config",
    "runtime.sequence_parallel.parallel_state_sp",
    "runtime.sequence_parallel.ulysses_sp",
    "runtime.utils",
    "runtime.zero.config",
    "runtime.zero.leaf_module_config",
    "runtime.zero.offload_config",
    "runtime.zero.partition_parameters",
    "runtime.zero.stage3",
    "runtime.zero.stage_1_and_2",
    "runtime.zero.utils",
    "sequence.layer",
    "utils",
    "utils.comms_logging",
    "utils.groups",
    "utils.logging",
    "utils.timer",
    "utils.zero_to_fp32",
    "zero",
)


def names(module: ModuleType, path: str) -> list[str]:
    """The module's public objects, without submodules and what is absent."""
    listed = getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]
    return sorted(
        name
        for name in listed
        if f"{path}.{name}".lstrip(".") not in ABSENT
        and not isinstance(value := getattr(module, name), ModuleType)
        and getattr(value, "__module__", "") != f"{PACKAGE}.lazy"
    )


def markdown(tests: Iterable[str]) -> str:
    """Modules and the engine with the names whose signature alone is tested; then the refused names, by reason.

    Args:
        tests: texts of tests; what a name does counts as tested where the name is a word of one.
    """
    words = {word for text in tests for word in re.findall(r"\w+", text)}
    return "\n".join([*_here(words), "", *_refused()])


def _here(words: set[str]) -> Iterator[str]:
    from torch import nn

    from shardfold.compat.deepspeed.engine import DeepSpeedEngine

    left: dict[str, list[str]] = {}
    for path in MODULES:
        place = "runtime.activation_checkpointing.checkpointing" if path == "checkpointing" else path
        module = importlib.import_module(f"{PACKAGE}.{place}".rstrip("."))
        left[f"deepspeed.{path}".rstrip(".")] = [name for name in names(module, path) if name not in words]
    members = sorted(name for name in dir(DeepSpeedEngine) if not name.startswith("_") and not hasattr(nn.Module, name))
    left["DeepSpeedEngine"] = [name for name in members if name not in words]
    whole = ", ".join(f"`{path}`" for path, found in left.items() if not found)
    yield f"Tests check what every public name of these modules does: {whole}."
    yield ""
    yield "Of the names listed here tests compare kind and parameters alone; of the others they check the behaviour:"
    yield ""
    for path, found in left.items():
        if found:
            yield f"- `{path}`: {', '.join(f'`{name}`' for name in found)}"


def _refused() -> Iterator[str]:
    yield "These can be imported, and their use raises the sentence behind them:"
    yield ""
    for reason in dict.fromkeys(ABSENT.values()):
        said = ", ".join(f"`{name}`" for name, why in ABSENT.items() if why == reason)
        yield f"- {said}: {reason}"
