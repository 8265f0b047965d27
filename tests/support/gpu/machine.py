"""The machine: devices, their memory and driver, versions, processor, who reaches whom."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

import shardfold
from shardfold import accelerator
from shardfold.launch import num_cores
from shardfold.plan.checks import human
from tests.support.gpu.day import ROOT
from tests.support.gpu.ranks import how_many
from tests.support.gpu.section import Asked, Notes
from tests.support.gpu.setting import SIM

__all__ = ["run"]

VARIABLES = ("CUDA_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "PYTORCH_", "TORCH_", "GLOO_", "SHARDFOLD_")
PACKAGES = ("triton", "deepspeed", "numpy", "pytest", "pydantic", "rich", "typer")
DRIVER = ["nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,pcie.link.gen.current,power.limit",
          "--format=csv,noheader"]  # fmt: skip
WAIT = 20.0  # seconds for a command


def run(asked: Asked, notes: Notes) -> None:
    """Notes a fact per line; one that cannot be told says why."""
    facts: dict[str, Callable[[], Any]] = {
        "system": platform.platform,
        "processor": _processor,
        "cores": num_cores,
        "memory of the host": _host_memory,
        "Python": lambda: sys.version.split()[0],
        "shardfold": lambda: f"{shardfold.__version__} {_said(['git', 'describe', '--always', '--dirty'])}".strip(),
        "torch": lambda: torch.__version__,
        "built for": lambda: f"CUDA {torch.version.cuda}, HIP {torch.version.hip}",
        "packages": _packages,
        "variables": lambda: {n: v for n, v in sorted(os.environ.items()) if n.startswith(VARIABLES)},
        "devices": lambda: f"{how_many(asked.device)} of the type {asked.device}",
    }
    if asked.device == SIM:
        facts["devices"] = lambda: f"the simulated one, in {asked.ranks} process(es)"
    elif asked.device != "cpu":
        facts |= _of_devices(asked.device)
    for name, tell in facts.items():
        try:
            value = tell()
        except Exception as error:
            value = f"not told ({type(error).__name__}: {error})"
        if value not in (None, "", {}):
            notes.fact(name, value)


def _of_devices(kind: str) -> dict[str, Callable[[], Any]]:
    module: Any = torch.get_device_module(kind)
    facts: dict[str, Callable[[], Any]] = {}
    for index in range(how_many(kind)):
        facts[f"{kind}:{index}"] = lambda index=index: _device(module, torch.device(kind, index))
    facts["reach each other's memory"] = lambda: _reach(module, how_many(kind))
    facts["collectives"] = lambda: "NCCL " + ".".join(str(part) for part in module.nccl.version())
    facts["cuDNN"] = lambda: torch.backends.cudnn.version()
    facts["driver"] = lambda: _said(DRIVER)
    facts["topology"] = lambda: _said(["nvidia-smi", "topo", "-m"])
    return facts


def _device(module: Any, device: torch.device) -> str:
    found = module.get_device_properties(device)
    version = f"{getattr(found, 'major', '?')}.{getattr(found, 'minor', '?')}"
    return (
        f"{found.name}, {human(found.total_memory)}, {getattr(found, 'multi_processor_count', '?')} multiprocessors, "
        f"capability {version}, {accelerator.identity(device)}"
    )


def _reach(module: Any, count: int) -> str:
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if not pairs:
        return "one device"
    lost = [f"{a} to {b}" for a, b in pairs if not module.can_device_access_peer(a, b)]
    return "all pairs" if not lost else "all but " + ", ".join(lost)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _host_memory() -> str:
    return human(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def _said(command: list[str]) -> str:
    """What a command prints; nothing where it is absent or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=WAIT)
    return done.stdout.strip() if done.returncode == 0 else ""
