"""Memory of the simulated device: true storages, views, resizing, pools, pinned memory, lifetimes."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from shardfold.errors import UsageError
from shardfold.testing.simulated import is_supported, simulated
from tests.support.simulated import on_device

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def _module() -> Any:
    return torch.get_device_module("sim")


@on_device()
def test_every_dtype_has_memory() -> None:
    """What is written to a tensor of any dtype is read back, and it has as many bytes as on the CPU."""
    with simulated():
        for dtype in DTYPES:
            there = torch.tensor([1, 0, 1]).to(dtype)
            here = there.to("sim")
            assert here.dtype == dtype and here.device == torch.device("sim", 0)
            assert here.untyped_storage().nbytes() == there.untyped_storage().nbytes()
            assert torch.equal(here.cpu().view(torch.uint8), there.view(torch.uint8))


@on_device()
def test_views_share_memory() -> None:
    """Slices, transposes, other shapes and dtypes are the same bytes; sizes, strides and offsets are PyTorch's."""
    with simulated():
        x = torch.arange(12, dtype=torch.float32).to("sim")
        y, z = x.view(3, 4), x[4:8]
        z.fill_(-1)
        assert y[1].tolist() == [-1.0] * 4 and z.storage_offset() == 4
        assert y.t().stride() == (1, 4) and y.t()[0].tolist() == [0.0, -1.0, 8.0]
        assert z.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert z.data_ptr() == x.data_ptr() + 16 and z.is_set_to(x[4:8])
        assert z.view(torch.int32)[0].item() == torch.tensor(-1.0).view(torch.int32).item()
        assert x.as_strided((2, 2), (6, 1)).tolist() == [[0.0, 1.0], [-1.0, -1.0]]
        assert y.expand(2, 3, 4).sum().item() == 2 * x.sum().item()
        assert torch.empty(0, device="sim").tolist() == [] and torch.zeros((), device="sim").item() == 0.0


@on_device()
def test_a_storage_comes_and_goes() -> None:
    """resize_(0) gives memory back and resize_(n) takes it again, with undefined values; views stay views."""
    with simulated():
        x = torch.ones(8, device="sim")
        view, storage = x[2:4], x.untyped_storage()
        before = _module().memory_allocated()
        assert storage.size() == storage.nbytes() == 32 and storage.resizable()
        storage.resize_(0)
        assert storage.size() == 0 and _module().memory_allocated() == before - 512
        storage.resize_(32)
        assert storage.size() == 32 and _module().memory_allocated() == before
        assert view.isnan().all().item()
        x.fill_(2)
        assert view.tolist() == [2.0, 2.0]
        with pytest.raises(UsageError, match="cannot grow to 64"):
            storage.resize_(64)


@on_device()
def test_a_tensor_grows_as_elsewhere() -> None:
    """Tensor.resize_ keeps what was there, and out= takes a tensor of another size."""
    with simulated():
        x = torch.arange(4.0).to("sim")
        assert x.resize_(2).tolist() == [0.0, 1.0] and x.resize_(8)[:2].tolist() == [0.0, 1.0]
        out = torch.empty(0, device="sim")
        torch.add(torch.ones(3, device="sim"), 1, out=out)
        assert out.tolist() == [2.0] * 3


@on_device()
def test_memory_is_counted() -> None:
    """Allocated bytes and their peak follow tensors as they come and go, each of whole granules of 512 bytes, as CUDA's
    allocator counts them; the peak can be started again."""
    with simulated() as sim:
        start = _module().memory_allocated()
        x = torch.zeros(1000, device="sim")
        y = x + 1
        assert _module().memory_allocated() - start == 8192
        del x
        assert _module().memory_allocated() - start == 4096
        assert sim.memory_peak - start == 8192 == _module().max_memory_allocated() - start
        _module().reset_peak_memory_stats()
        assert _module().max_memory_allocated() - start == 4096
        del y
        assert _module().memory_allocated() == start


@on_device()
def test_an_allocation_beyond_the_limit_is_refused() -> None:
    """In one sentence with what was asked for, what is held and the limit, which a program sees too; views, new memory
    of a storage that was freed and what fits exactly are counted as any. The limit ends with its block."""
    start = _module().memory_allocated()
    with simulated(memory=start + 4096):
        assert _module().mem_get_info() == (4096, start + 4096)
        assert _module().get_device_properties().total_memory == start + 4096
        x, y = torch.zeros(512, device="sim"), torch.zeros(257, device="sim")
        views = [x[1:] for _ in range(9)]
        z = torch.zeros(128, device="sim")
        held, limit = f"{start + 4096:,}", f"{start + 4096:,}"
        with pytest.raises(
            torch.OutOfMemoryError, match=rf"\(512 bytes\), .*\({held} bytes\) are .*\({limit} bytes\)\."
        ):
            torch.zeros(1, device="sim")
        x.untyped_storage().resize_(0)
        w = torch.zeros(1, device="sim")
        with pytest.raises(torch.OutOfMemoryError):
            x.untyped_storage().resize_(2048)
        del w
        x.untyped_storage().resize_(2048)
        del y, z, views
    assert torch.zeros(4096, device="sim").numel() == 4096


@on_device()
def test_memory_that_a_stream_still_uses_is_held() -> None:
    """What was freed and is recorded for a stream counts until that stream is done: an allocation that does not fit
    before waits for it, which is a wait of the host; what no wait can make fit is refused."""
    start = _module().memory_allocated()
    for mode in ("check", "lazy"):
        with simulated(mode, lag=10**6, memory=start + 2048) as sim:
            side = _module().Stream()
            x = torch.zeros(512, device="sim")
            side.wait_stream(_module().current_stream())
            with _module().stream(side):
                x.add_(1)
            x.record_stream(side)
            del x
            again = torch.zeros(512, device="sim")
            waited = sum(times for (what, _), times in sim.host_syncs.items() if "freed memory" in what)
            assert waited == (mode == "lazy")
            with pytest.raises(torch.OutOfMemoryError):
                torch.zeros(1, device="sim")
            sim.expect_clean()
            del again


@on_device()
def test_new_memory_has_no_values() -> None:
    """What nobody has written to is NaN, so that whoever reads it finds out."""
    with simulated():
        assert torch.empty(4, device="sim").isnan().all().item()
        assert torch.empty_like(torch.zeros(2, 2, device="sim")).isnan().all().item()


@on_device()
def test_memory_lives_as_long_as_its_storage() -> None:
    """A storage outlives its tensor, and what autograd saves lives until backward; nothing dies early or twice."""
    with simulated():
        storage = torch.full((4,), 3.0, device="sim").untyped_storage()
        for _ in range(200):  # new memory everywhere
            torch.empty(4, device="sim").fill_(7)
        gc.collect()
        again = torch.empty(0, device="sim").set_(storage, 0, (4,), (1,))
        assert again.tolist() == [3.0] * 4
        x = torch.ones(4, device="sim", requires_grad=True)
        loss = ((x * 2).exp()).sum()
        for _ in range(200):
            torch.empty(4, device="sim").fill_(7)
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad.cpu(), 2 * torch.full((4,), 2.0).exp())


@on_device()
def test_copies_have_memory_of_their_own() -> None:
    """clone, deepcopy of a model, torch.save and torch.load."""
    with simulated():
        model = nn.Linear(4, 4).to("sim")
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.weight.zero_()
        assert model.weight.abs().sum().item() > 0
        assert other.weight.device.type == "sim"


@on_device()
def test_parameters_stay_the_same_objects_when_a_module_moves() -> None:
    """As on CUDA: an optimizer that was made before the move goes on with them."""
    with simulated():
        model = nn.Linear(4, 4)
        weight = model.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model.to("sim")
        assert model.weight is weight and weight.device.type == "sim"
        model(torch.ones(1, 4, device="sim")).sum().backward()
        before = weight.detach().cpu()
        optimizer.step()
        assert torch.equal(weight.detach().cpu(), before - 0.5)
        model.cpu()
        assert model.weight is weight and weight.device.type == "cpu"


@on_device()
def test_pinned_memory() -> None:
    """Memory of the host is pinned when asked for; copies from and to it do not stop the host; others do."""
    with simulated() as sim:
        host = torch.zeros(4, pin_memory=True)
        assert host.is_pinned() and not torch.zeros(4).is_pinned() and torch.ones(2).pin_memory().is_pinned()
        assert torch.empty_like(host, pin_memory=True).is_pinned()
        x = torch.full((4,), 2.0, device="sim")
        host.copy_(x, non_blocking=True)
        host.to("sim", non_blocking=True)
        assert not sim.host_syncs
        _module().synchronize()
        assert host.tolist() == [2.0] * 4
        for _ in range(50):  # what is not pinned is not taken for pinned because it lies where something pinned was
            torch.zeros(64, pin_memory=True)
            assert not torch.zeros(64).is_pinned()


@pytest.mark.soak
@pytest.mark.skipif(not is_supported(), reason="PyTorch lacks what the simulated device is made of")
def test_a_process_ends_well_with_tensors_alive() -> None:
    """Tensors, streams and threads of the device that are left when the interpreter ends do not crash it."""
    program = """
import torch
from shardfold.testing.simulated import simulated
with simulated("lazy") as sim:
    kept = [torch.ones(8, device="sim") for _ in range(10)]
    side = torch.sim.Stream()
    model = torch.nn.Linear(4, 4).to("sim")
    loss = model(torch.ones(1, 4, device="sim")).sum()
torch.kept, torch.loss = kept, loss
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
