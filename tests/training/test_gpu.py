"""What a CUDA device must show; skipped where there is none. CPU and GPU losses agree in fp32 without TF32.

python -m pytest tests/training/test_gpu.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.testing import Ranks
from tests.support import models

pytestmark = pytest.mark.gpu

ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)


def _losses(layout: Any, device: str, precision: str, steps: int, **options: Any) -> list[float]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    engine = sf.Engine(
        models.small(), optimizer=ADAMW, layout=layout, device=device, precision=precision, clip_norm=1.0, **options
    )
    losses = []
    for tokens, targets in models.batches(steps):
        mine = [t.chunk(engine.world_size)[engine.rank].to(engine.device) for t in (tokens, targets)]
        loss = engine(*mine)
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(loss.item()))
    report = engine.memory()
    engine.close()
    assert report.transient == 0
    return losses


@pytest.mark.parametrize("layout", list(sf.PRESETS))
def test_one_gpu_trains_as_the_cpu_does(layout: str) -> None:
    assert _losses(layout, "cuda", "fp32", 20) == pytest.approx(_losses(layout, "cpu", "fp32", 20), rel=1e-5)


@pytest.mark.parametrize("layout", list(sf.PRESETS))
def test_two_processes_share_a_gpu_over_gloo(ranks: Ranks, layout: str) -> None:
    alone = _losses(layout, "cpu", "fp32", 10)
    for losses in ranks.run(_losses, layout, "cuda:0", "fp32", 10, world_size=2):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("layout", ["ddp", "zero3", "fsdp2"])
def test_bf16_on_a_gpu_follows_fp32(layout: str) -> None:
    assert _losses(layout, "cuda", "bf16", 10) == pytest.approx(_losses(layout, "cuda", "fp32", 10), rel=2e-2)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_moments_may_rest_elsewhere(tier: str) -> None:
    """In pinned memory or in a file, fetched beside the computation; also where a thread of its own updates."""
    near, far = _losses("zero2", "cuda", "bf16", 10), sf.PRESETS["zero2"].edit("moments", tier=tier)
    assert _losses(far, "cuda", "bf16", 10) == pytest.approx(near, rel=1e-5)
    beside = sf.Overlap(update_thread=True)
    assert _losses(far, "cuda", "bf16", 10, overlap=beside) == pytest.approx(near, rel=1e-5)


def test_tf32_rounds_the_inputs_of_matrix_products() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(512, 512, bias=False).cuda(), torch.randn(512, 512, device="cuda")
    exact = x.double() @ model.weight.double().t()
    errors = []
    for allow in (True, False):
        engine = sf.Engine(model, precision=sf.Precision(tf32=allow), device="cuda")
        with torch.no_grad():
            errors.append(((engine(x) - exact).abs().max() / exact.abs().max()).item())
        engine.close()
    assert errors[1] < 1e-5 < errors[0] < 1e-2


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_step_does_not_stop_the_host(layout: str) -> None:
    """Any synchronization of the host inside forward, backward or step raises under this debug mode."""
    torch.manual_seed(0)
    engine = sf.Engine(models.small(), optimizer=ADAMW, layout=layout, device="cuda", clip_norm=1.0)
    batches = [[t.cuda() for t in batch] for batch in models.batches(4)]
    for i, batch in enumerate(batches):
        torch.cuda.set_sync_debug_mode("error" if i > 1 else "default")
        try:
            engine.backward(engine(*batch))
            report = engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert report.step == 4 and report.grad_norm is not None
    engine.close()
