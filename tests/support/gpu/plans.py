"""Peaks of whole steps, with activations and gradients, as planned beside what the device's allocator counted; and the
seconds that the device's built-in profile gives, beside those of the clock."""

from __future__ import annotations

import gc
import importlib.util
import time
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardfold as sf
from shardfold import accelerator
from shardfold.plan.checks import human
from shardfold.plan.lifetimes import WORKSPACE, Behaviour
from shardfold.planner.division import Division
from shardfold.planner.hardware import DEVICES, Device
from shardfold.planner.memory import plan_memory
from shardfold.planner.seconds import plan_seconds
from shardfold.planner.setting import Subject
from shardfold.planner.tracing import loss_of
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from tests.support.gpu.memory import difference
from tests.support.gpu.ranks import Field, Here, how_many
from tests.support.gpu.section import Asked, Notes, Outcome, Skip
from tests.support.gpu.setting import Setting, rank_settings
from tests.support.gpu.watched import reserved_peak

__all__ = ["ABOVE", "BELOW", "CASES", "REAL", "batch_of", "model_of", "run"]

ABOVE, BELOW = 0.06, 0.01
"""The plan's promise: a peak is at most so much above what is measured, and at most so much below."""
NEEDS = 8.0  # seconds that a case is begun with
STEPS, TIMED = 3, 6
PIXELS = 224

#: Model, layout, precision, activations.
CASES = (
    ("gpt", "ddp", "bf16", "keep"), ("gpt", "zero3", "bf16", "keep"), ("gpt", "zero3", "bf16", "recompute"),
    ("gpt", "zero2", "fp32", "keep"), ("gpt", "fsdp2", "bf16", "recompute"), ("gpt", "offload", "bf16", "keep"),
    ("gpt", "infinity", "bf16", "recompute"), ("llama", "zero3", "bf16", "keep"), ("bert", "zero1", "bf16", "keep"),
    ("vit", "zero2", "bf16", "keep"), ("resnet", "zero1", "fp32", "keep"), ("llama", "ddp", "fp32", "recompute"),
)  # fmt: skip


class Size(NamedTuple):
    """Of the models and of a micro-batch."""

    width: int
    layers: int
    rows: int
    length: int


REAL, REHEARSED = Size(1024, 8, 8, 512), Size(256, 2, 2, 64)


def run(asked: Asked, notes: Notes) -> None:
    if asked.device == "cpu":
        notes.not_run("all cases", "benchmarks/planned.py compares plans with what a CPU holds")
        return
    size = REHEARSED if asked.small else REAL
    with Field(asked.device, notes.clock) as field:
        for setting in rank_settings(asked.device, asked.ranks, how_many(asked.device)):
            for case in CASES:
                notes.attempt(
                    f"{', '.join(case)} ({setting})",
                    lambda at=setting, of=case: _compared(field, at, of, size), needs=NEEDS,
                )  # fmt: skip


def _compared(field: Field, setting: Setting, case: tuple[str, ...], size: Size) -> tuple[str, dict[str, Any]]:
    answers = field.run(setting, _measured, case, size)
    planned, found, reserved, seconds, expected, where = max(answers, key=lambda each: each[1])
    off = difference(planned, found)
    figures: dict[str, Any] = {"peak": human(found), "planned": human(planned), "off": f"{off:+.2%}"}
    if reserved is not None:
        figures["reserved"] = human(reserved)
    figures |= {"step, ms": round(1e3 * seconds, 2), "planned, ms": expected and round(1e3 * expected, 2)}
    if not -BELOW <= off <= ABOVE:
        raise Outcome(f"the peak is planned {off:+.2%} off: {where}", **figures)
    return "", figures


def _measured(here: Here, case: tuple[str, ...], size: Size) -> tuple[float, int, int | None, float, float | None, str]:
    name, layout, precision, mode = case
    few = size._replace(rows=1, layers=2)
    _stepped(_engine(here, case, few), batch_of(name, few, here.device), STEPS).close()  # libraries take memory
    gc.collect()
    accelerator.synchronize(here.device)
    accelerator.give_back(here.device)
    before = accelerator.allocated(here.device) or 0
    engine, batch, seconds = _engine(here, case, size), batch_of(name, size, here.device), list[float]()
    try:
        _stepped(engine, batch, STEPS)
        accelerator.synchronize(here.device)
        accelerator.reset_peak(here.device)
        for _ in range(TIMED):
            begun = time.perf_counter()
            _stepped(engine, batch, 1)
            accelerator.synchronize(here.device)
            seconds.append(time.perf_counter() - begun)
        found = (accelerator.peak(here.device) or 0) - before
        mesh = engine.mesh.sizes.axes
    finally:
        engine.close()
    batch = batch_of(name, size, torch.device("cpu"))
    subject = Subject(model_of(name, size), batch, division=Division(streams=here.setting.is_real))
    with nullcontext() if here.setting.is_real else sdpa_kernel(SDPBackend.MATH):  # the simulated device has no other
        trace = subject.trace(precision, mode)
    transport = "gloo" if here.setting.shared else "nccl"
    behaviour = Behaviour(streams=True, transport=transport, workspace=WORKSPACE if here.setting.is_real else 0.0)
    setting = subject.setting(trace, layout=layout, precision=precision, mesh=mesh, behaviour=behaviour)
    plan = plan_memory(setting, trace)
    profile = _profile(here.device)
    expected = plan_seconds(setting, plan, profile).step if profile is not None else None
    return plan.peak, found, reserved_peak(here.device), median(seconds), expected, plan.top.where


def _profile(device: torch.device) -> Device | None:
    """The built-in one whose name is in that of the device."""
    name = getattr(torch.get_device_module(device), "get_device_name", lambda _: "")(device)
    return next((found for word, found in DEVICES.items() if word in name), None)


def _engine(here: Here, case: tuple[str, ...], size: Size) -> sf.Engine:
    name, layout, precision, mode = case
    torch.manual_seed(0)
    return sf.Engine(
        model_of(name, size), optimizer=partial(torch.optim.AdamW, lr=1e-4), layout=layout, precision=precision,
        activations=mode, runtime=sf.Runtime(device=here.device),
    )  # fmt: skip


def _stepped(engine: sf.Engine, batch: dict[str, Tensor], steps: int) -> sf.Engine:
    for _ in range(steps):
        engine.backward(loss_of(engine, batch))
        engine.step()
    return engine


def model_of(name: str, size: Size) -> nn.Module:
    heads, text = max(size.width // 64, 1), {"vocab_size": 8192, "pad_token_id": 0}
    if name == "gpt":
        return GPT(GPTConfig(d_model=size.width, layers=size.layers, heads=heads, context=size.length))
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    import transformers

    common = {
        "hidden_size": size.width, "intermediate_size": 2 * size.width, "num_hidden_layers": size.layers,
        "num_attention_heads": heads,
    }  # fmt: skip
    if name == "llama":
        config = transformers.LlamaConfig(**text, **common, max_position_embeddings=size.length)
        return transformers.LlamaForCausalLM(config).train()
    if name == "bert":
        config = transformers.BertConfig(**text, **common, max_position_embeddings=size.length)
        return transformers.BertForMaskedLM(config).train()
    if name == "vit":
        config = transformers.ViTConfig(**common, image_size=PIXELS, patch_size=16, num_labels=1000)
        return transformers.ViTForImageClassification(config).train()
    config = transformers.ResNetConfig(num_labels=1000)
    return transformers.ResNetForImageClassification(config).train()


def batch_of(name: str, size: Size, device: torch.device) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    if name in ("vit", "resnet"):
        images = torch.randn(size.rows, 3, PIXELS, PIXELS, generator=drawn)
        return {"pixel_values": images.to(device), "labels": torch.zeros(size.rows, dtype=torch.long, device=device)}
    tokens = torch.randint(3, 200, (size.rows, size.length), generator=drawn).to(device)
    names = ("tokens", "targets") if name == "gpt" else ("input_ids", "labels")
    return {names[0]: tokens, names[1]: tokens.clone()}
