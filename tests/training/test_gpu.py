"""What a device must show; skipped where there is none. CPU and GPU losses agree in fp32 without TF32.

python -m pytest tests/training/test_gpu.py                                 # on CUDA
SHARDFOLD_TEST_DEVICE=sim python -m pytest tests/training/test_gpu.py       # a rehearsal on the simulated device
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.testing import Ranks
from tests.support import models
from tests.support.gpu.setting import SIM, GivenDevice
from tests.support.gpu.watched import waits
from tests.support.options import grouped

pytestmark = pytest.mark.gpu

ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)


def _losses(layout: Any, device: str, precision: str, steps: int, **options: Any) -> list[float]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    engine = sf.Engine(
        models.small(),
        optimizer=ADAMW,
        **grouped(layout=layout, device=device, clip_norm=1.0, **options),
        precision=precision,
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
def test_one_gpu_trains_as_the_cpu_does(gpu: GivenDevice, layout: str) -> None:
    """fp32 losses of 20 steps are those of the CPU."""
    assert _losses(layout, gpu.type, "fp32", 20) == pytest.approx(_losses(layout, "cpu", "fp32", 20), rel=1e-5)


@pytest.mark.parametrize("layout", list(sf.PRESETS))
def test_two_processes_share_a_gpu_over_gloo(gpu: GivenDevice, ranks: Ranks, layout: str) -> None:
    """Two ranks on one device train as one on the CPU."""
    if gpu.type == SIM:
        pytest.skip("Gloo does not carry tensors of the simulated device, of which each process has its own")
    alone = _losses(layout, "cpu", "fp32", 10)
    for losses in ranks.run(_losses, layout, f"{gpu.type}:0", "fp32", 10, world_size=2):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("layout", ["ddp", "zero3", "fsdp2"])
def test_bf16_on_a_gpu_follows_fp32(gpu: GivenDevice, layout: str) -> None:
    """Losses in bf16 are those in fp32 to two digits."""
    assert _losses(layout, gpu.type, "bf16", 10) == pytest.approx(_losses(layout, gpu.type, "fp32", 10), rel=2e-2)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_moments_may_rest_elsewhere(gpu: GivenDevice, tier: str) -> None:
    """In pinned memory or in a file, fetched beside the computation; also where a thread of its own updates."""
    near, far = _losses("zero2", gpu.type, "bf16", 10), sf.PRESETS["zero2"].edit("moments", tier=tier)
    assert _losses(far, gpu.type, "bf16", 10) == pytest.approx(near, rel=1e-5)
    beside = sf.Overlap(update_thread=True)
    assert _losses(far, gpu.type, "bf16", 10, overlap=beside) == pytest.approx(near, rel=1e-5)


def test_tf32_rounds_the_inputs_of_matrix_products(gpu: GivenDevice) -> None:
    """`Precision(tf32=...)` decides whether products on NVIDIA's devices have 10 bits or 23."""
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512, bias=False).to(gpu.type)
    x = torch.randn(512, 512).to(gpu.type)
    exact = x.double() @ model.weight.double().t()
    errors = []
    for allow in (True, False):
        engine = sf.Engine(model, precision=sf.Precision(tf32=allow), runtime=sf.Runtime(device=gpu.type))
        with torch.no_grad():
            errors.append(((engine(x) - exact).abs().max() / exact.abs().max()).item())
        engine.close()
    assert errors[1] < 1e-5 and errors[0] < 1e-2
    if gpu.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0):
        assert errors[0] > 1e-5


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_step_does_not_stop_the_host(gpu: GivenDevice, layout: str) -> None:
    """From the third on, forward, backward and step wait for nothing."""
    torch.manual_seed(0)
    engine = sf.Engine(
        models.small(), optimizer=ADAMW, layout=layout, runtime=sf.Runtime(device=gpu.type), clip_norm=1.0
    )
    batches = [[t.to(engine.device) for t in batch] for batch in models.batches(4)]
    for batch in batches[:2]:
        engine.backward(engine(*batch))
        engine.step()
    with waits(engine.device, gpu.sim) as found:
        for batch in batches[2:]:
            engine.backward(engine(*batch))
            report = engine.step()
    assert not found
    assert report.step == 4 and report.grad_norm is not None
    engine.close()
