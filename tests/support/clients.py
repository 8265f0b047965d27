"""What the tests of real clients share: the door, tiny models with fixed weights, something to read, a clean slate.

Clients keep process-wide state (accelerate's, transformers' notion of the present DeepSpeed config), so each test runs
all its cases in fresh processes of their own, one case after the other, and none runs in the pool.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.testing import run_ranks

VOCAB, CONTEXT = 61, 12
RANKS = 2

FP32_TOL = 1e-5
"""Largest difference of a loss, a norm or a weight in fp32 from the client's own training without DeepSpeed."""
BF16_TOL = 3e-2
"""The same of a loss under bf16, where the reference is the client's own autocast over fp32 weights."""
BF16_STRAY = 2 * (2**-6) ** 0.5
"""How far apart weights may be after some steps of Adam under bf16, as part of the way that they went (`strayed`).

A gradient in bf16 is off by some roundings of 2**-8, say e = 2**-6 of its tensor's typical element. Adam takes a step
of about the rate whatever the size of an element, so what is smaller than that error may go either way: a part e of the
elements, each by twice its step. The square of the distance is then 4 e of the square of the way."""


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip where one of the packages is not installed, without importing any in the process of the tests."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def on_ranks(function: Any, *args: Any, ranks: int = RANKS) -> list[Any]:
    """Run ``function(*args)`` in fresh processes under the face of DeepSpeed; the clients' own warnings are theirs."""
    return run_ranks(_with_face, ranks, function, *args, timeout=280, warnings_as_errors=False)


def _with_face(function: Any, *args: Any) -> Any:
    import shardfold.compat

    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    shardfold.compat.install()
    import deepspeed

    assert deepspeed.initialize.__module__.startswith("shardfold."), deepspeed.initialize
    return function(*args)


def fresh() -> None:
    """Forget what accelerate and transformers remember of the run before."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    gc.collect()


def llama(**sizes: Any) -> Any:
    """The config of a Llama with no token of special meaning."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": VOCAB, **sizes}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def start(folder: Path, **sizes: Any) -> Path:
    """Write a model with random weights to start from, the same for every case; return where. Called by all ranks."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    if dist.get_rank() == 0:
        LlamaForCausalLM(llama(**sizes)).save_pretrained(folder / "start")
    dist.barrier()
    return folder / "start"


def sequences(count: int) -> Tensor:
    """``(count, CONTEXT)`` arithmetic sequences modulo `VOCAB`, which a small model can learn."""
    draw = torch.Generator().manual_seed(1)
    starts, strides = torch.randint(VOCAB, (2, count, 1), generator=draw)
    return (starts + strides % 5 * torch.arange(CONTEXT)) % VOCAB


def config(stage: int, **more: Any) -> dict[str, Any]:
    """A DeepSpeed config as users of the Trainer write it."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        **more,
    }


def apart(a: Iterable[float], b: Iterable[float]) -> float:
    """Largest difference of two equally long rows of numbers."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """What a client saved as ``model.safetensors``, in fp32."""
    from safetensors.torch import load_file

    return {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}


def strayed(a: dict[str, Tensor], b: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """How far training went apart, as part of the way: |a - b| / |b - start|, the largest of any tensor.

    Of each difference what ``a`` may owe to having been saved in bf16, 2**-8 of the element, does not count."""
    assert a.keys() == b.keys() == start.keys(), (a.keys() ^ b.keys(), b.keys() ^ start.keys())
    off = {name: ((a[name] - b[name]).abs() - 2**-8 * b[name].abs()).clamp(min=0.0) for name in a}
    return max(float(off[name].norm() / (b[name] - start[name]).norm()) for name in a)


def weights_apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference of an element of two state dicts with the same names."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
