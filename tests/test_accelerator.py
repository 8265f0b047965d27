"""Which devices train, what they are asked for, and what a machine without one answers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold import accelerator
from shardfold.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("mps", "'mps'\\): PyTorch's module for it has no Stream, current_stream, stream, .* 'cpu' here"),
        ("hpu", "'hpu'\\): models are trained on 'cpu' here"),
        ("meta", "'meta'\\): models are trained on 'cpu' here"),
        ("xpu:1", "'xpu:1'\\): PyTorch finds none of the type xpu here"),
    ],
)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="says what a machine without an accelerator does")
def test_a_device_that_cannot_train_is_refused_with_what_it_lacks(device: str, words: str) -> None:
    """No type of device is taken for the CPU: it is refused, and the sentence says what its module does not offer."""
    with pytest.raises(ConfigError, match=words):
        sf.Engine(nn.Linear(2, 2), runtime=sf.Runtime(device=device))


def test_every_type_that_trains_offers_all_that_is_asked_for() -> None:
    """The modules of CUDA (which is ROCm's too) and XPU have every name that is needed."""
    assert accelerator.lacking(torch.device("cuda")) == accelerator.lacking(torch.device("xpu")) == []


def test_on_the_cpu_there_are_no_streams() -> None:
    """What asks for streams, figures and pinned memory of the CPU gets none, and what runs inside runs as it is."""
    assert accelerator.new_stream(CPU) is accelerator.current_stream(CPU) is None
    assert accelerator.allocated(CPU) is accelerator.peak(CPU) is accelerator.total_memory(CPU) is None
    assert accelerator.indexed(CPU) == CPU and accelerator.count(CPU) == 0
    assert not accelerator.host_memory((2,), torch.uint8, CPU).is_pinned()
    with accelerator.on(None):
        accelerator.synchronize(CPU)


@pytest.mark.parametrize(
    ("known", "limit", "dtype"),
    [
        ({}, None, torch.float32),
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, None, torch.float32),
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False}, None, torch.float32),  # it would be emulated
        ({"avx512_bf16": True}, None, torch.bfloat16),
        ({"amx_bf16": True}, "AVX512_CORE_AMX", torch.bfloat16),
        ({"avx512_bf16": True}, "avx512_core_bf16", torch.bfloat16),
        ({"avx512_bf16": True}, "DEFAULT", torch.bfloat16),
        ({"avx512_bf16": True, "amx_bf16": True}, "AVX2", torch.float32),
        ({"avx512_bf16": True, "amx_bf16": True}, "AVX512_CORE_VNNI", torch.float32),
        ({"neon": True, "bf16": True}, None, torch.bfloat16),
        ({"neon": True, "bf16": False}, None, torch.float32),
    ],
)
def test_products_are_in_bf16_where_the_cpu_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, known: dict[str, bool], limit: str | None, dtype: torch.dtype
) -> None:
    """On x86 and ARM, unless oneDNN is told to leave them alone; fp32 without oneDNN, and where PyTorch does not tell
    what a CPU has."""
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    found = [accelerator._cpu_multiplies_bf16.__wrapped__()]
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    found.append(accelerator._cpu_multiplies_bf16.__wrapped__())
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    found.append(accelerator._cpu_multiplies_bf16.__wrapped__())
    assert found == [dtype is torch.bfloat16, False, False]


def test_products_of_the_cpu_here_are_decided_once() -> None:
    """It is equal in each process of a machine, and one of two dtypes; meta tensors are traced for the CPU."""
    assert accelerator.product_dtype(CPU) in (torch.float32, torch.bfloat16)
    assert accelerator.product_dtype(CPU) is accelerator.product_dtype(torch.device("meta"))


def test_a_seed_holds_inside_only() -> None:
    """Numbers inside follow from the seed; behind it the generator goes on as if nothing had been drawn."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with accelerator.seeded(CPU, 5):
        inside = torch.rand(4)
    assert torch.equal(torch.rand(2), expected)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4), inside)


def test_names_of_devices_follow_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without a number is this local rank's; one with a number stays."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(accelerator, "count", lambda device: 2)
    assert str(accelerator.indexed(torch.device("cuda"))) == "cuda:1"
    assert str(accelerator.indexed(torch.device("cuda:0"))) == "cuda:0"
