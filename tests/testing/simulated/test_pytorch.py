"""What PyTorch itself does with the device's tensors, and with everything else while the device is there."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from shardfold.testing import run_ranks
from shardfold.testing.simulated import is_supported, simulated
from tests.support.simulated import F, on_device


@pytest.mark.parametrize("mode", ["check", "lazy"])
@pytest.mark.parametrize("reentrant", [True, False])
@on_device()
def test_a_recomputation_draws_the_same_numbers(reentrant: bool, mode: str) -> None:
    """Gradients under a checkpoint are those without one where dropout draws from the device's generator."""
    with simulated(mode):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to("sim")

        def gradient(recomputed: bool) -> torch.Tensor:
            torch.manual_seed(5)
            x = torch.ones(4, 8, device="sim", requires_grad=True)
            y = checkpoint(model, x, use_reentrant=reentrant) if recomputed else model(x)
            y.square().sum().backward()
            assert x.grad is not None
            return x.grad.cpu()

        assert torch.equal(gradient(True), gradient(False))


@pytest.mark.parametrize("mode", ["check", "lazy"])
@on_device()
def test_conjugate_and_negative_views(mode: str) -> None:
    """Products, copies both ways, numbers and parts of conjugate and negative views are the CPU's."""
    with simulated(mode):
        a = torch.randn(3, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        b = a.to("sim")
        assert torch.equal((b @ b.mH).cpu(), a @ a.mH)
        assert torch.equal(b.conj().cpu(), a.conj().resolve_conj())
        assert torch.equal(a.conj().to("sim").cpu(), a.conj().resolve_conj())
        assert torch.equal((b.conj() + 1).cpu(), a.conj() + 1)
        assert torch.equal(b.conj().imag.clone().cpu(), -a.imag)
        assert torch.equal(torch.empty_like(b).copy_(b.conj()).cpu(), a.conj().resolve_conj())
        assert b.conj()[0, 1].item() == a[0, 1].item().conjugate()


@on_device()
def test_tensors_are_saved_and_loaded() -> None:
    """torch.load onto the device, from it, and from a file mapped into memory; pickle; a storage of its own."""
    with simulated():
        here, there = torch.arange(3.0), torch.arange(3.0).to("sim")

        def loaded(value: Any, **how: Any) -> Any:
            file = io.BytesIO()
            torch.save(value, file)
            file.seek(0)
            return torch.load(file, **how)

        found = [
            loaded(there),
            loaded(there, map_location="sim"),
            loaded(here, map_location=torch.device("sim", 0)),
            loaded(here, map_location=lambda storage, _: storage.to(device="sim")),
            loaded({"w": nn.Parameter(there)}, weights_only=False)["w"].detach(),
            pickle.loads(pickle.dumps(there)),
            copy.deepcopy(there),
        ]
        assert [each.device.type for each in found] == ["sim"] * len(found)
        assert [each.tolist() for each in found] == [[0.0, 1.0, 2.0]] * len(found)
        assert loaded(there, map_location="cpu").device.type == "cpu"
        assert torch.UntypedStorage(8, device="sim").nbytes() == 8
        assert torch.UntypedStorage([1, 2], device="sim").tolist() == torch.UntypedStorage([1, 2]).tolist() == [1, 2]
        assert torch.UntypedStorage(8).nbytes() == 8


class _Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.known: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.known.append(func is torch.ones or func is torch.zeros_like or func is torch.Tensor.new_zeros)
        return func(*args, **(kwargs or {}))


class _Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "handled" if func is torch.zeros_like else super().__torch_function__(func, types, args, kwargs)


def _makes(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(2)


def _factories() -> None:
    plain = {torch.zeros, torch.ones}
    with simulated():
        pass
    assert {torch.zeros, torch.ones} == plain  # as PyTorch's own sets of them are asked
    with torch.device("meta"):  # entered for the first time
        layers = nn.Linear(2, 2).weight, nn.Embedding(3, 2).weight, nn.BatchNorm1d(3).running_mean, torch.ones(2)
        assert [value.device.type for value in layers if value is not None] == ["meta"] * 4
    for device in ("meta", "sim"):
        torch.set_default_device(device)
        assert torch.zeros(2).device.type == nn.Linear(2, 2).weight.device.type == device
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="only memory of the CPU can be pinned"):
        torch.ones(3, pin_memory=True)
    torch.set_default_device(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.func uses TorchScript
        assert torch.func.jvp(torch.sin, (torch.zeros(2),), (torch.ones(2),))[1].tolist() == [1.0, 1.0]
    for made in (torch.ones, torch.Tensor.new_zeros, torch.Generator, torch.Stream):
        assert pickle.loads(pickle.dumps(made)) is made
    with _Seen() as seen:
        torch.zeros_like(torch.ones(2)).new_zeros(2)
    assert seen.known == [True] * 3
    sub: Any = torch.ones(2).as_subclass(_Subclass)
    assert torch.zeros_like(sub) == "handled"
    traced = torch.fx.symbolic_trace(lambda x: torch.zeros_like(x) + 1)
    assert traced(torch.ones(2)).tolist() == [1.0, 1.0]
    assert torch.overrides.resolve_name(torch.ones) == "torch.ones"  # type: ignore[attr-defined]
    assert torch.compile(_makes, backend="aot_eager")(torch.ones(2)).tolist() == [2.0, 2.0]
    assert torch.ones(2, pin_memory=True).is_pinned() and not torch.ones(2).is_pinned()


@pytest.mark.soak
def test_functions_that_make_tensors_stay_pytorchs_own() -> None:
    """They take the device of torch.device(...) as a context and of set_default_device, modes and subclasses see them
    under the names that programs compare them with, and torch.func, torch.fx, torch.compile and pickle know them."""
    if not is_supported():
        pytest.skip("this version of PyTorch lacks what the simulated device is made of")
    run_ranks(_factories, 1, distributed=False)


@on_device()
def test_dropout_is_the_same_late() -> None:
    """A device that lags draws what one that does not draws, from the same seed."""
    found = []
    for mode in ("check", "lazy"):
        with simulated(mode, lag=100):
            torch.manual_seed(3)
            x, p = torch.ones(16, device="sim"), torch.full((4, 4), 0.5, device="sim")
            drawn = [F.dropout(x), torch.rand(4, device="sim"), p.bernoulli(), torch.multinomial(p, 2),
                     torch.randperm(9, device="sim"), torch.randn(4, device="sim")]  # fmt: skip
            found.append([value.tolist() for value in drawn])
    assert found[0] == found[1]


def _recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind(4, 6, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[0]

    return Last()


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 8)),
    "conv2d with groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2, bias=False), (2, 4, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), (1, 2, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2), (2, 4, 5, 5)),
    "lstm": (lambda: _recurrent(nn.LSTM), (3, 5, 4)),
    "gru": (lambda: _recurrent(nn.GRU), (3, 5, 4)),
    "rnn": (lambda: _recurrent(nn.RNN), (3, 5, 4)),
    "pooling and norms": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.GroupNorm(2, 4)), (2, 4, 8, 8)),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("mode", ["check", "lazy"])
@pytest.mark.parametrize("name", LAYERS)
@on_device()
def test_layers_train_as_on_the_cpu(name: str, mode: str) -> None:
    """Outputs and gradients of convolutions and recurrent layers, in fp32 with sums of some tens of numbers."""
    make, size = LAYERS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(*size)

    def gradients(device: str) -> list[torch.Tensor]:
        there = copy.deepcopy(model).to(device)
        given = x.to(device).requires_grad_()
        out = there(given)
        out.square().sum().backward()
        found = [out, given.grad, *(parameter.grad for parameter in there.parameters())]
        return [value.detach().cpu() for value in found if value is not None]

    with simulated(mode, lag=300) as sim:
        for here, there in zip(gradients("sim"), gradients("cpu"), strict=True):
            assert torch.allclose(here, there, rtol=1e-5, atol=1e-5)
        sim.expect_clean()


@pytest.mark.parametrize("mode", ["check", "lazy"])
@on_device()
def test_what_goes_to_the_host_without_a_wait_has_pinned_memory(mode: str) -> None:
    """`.to("cpu", non_blocking=True)` gives pinned memory that is written later; the host does not wait, and whoever
    synchronizes has the values, also in another dtype."""
    with simulated(mode, lag=100) as sim:
        there = torch.arange(4.0, device="sim")
        here, narrow = there.to("cpu", non_blocking=True), there.to("cpu", torch.int32, non_blocking=True)
        assert here.is_pinned() and narrow.is_pinned()
        sim.expect_clean(may_wait=False)
        torch.accelerator.synchronize()
        assert here.tolist() == narrow.tolist() == [0, 1, 2, 3]
        assert not there.to("cpu").is_pinned() and narrow.dtype == torch.int32


@on_device()
def test_a_copy_to_the_host_is_ordered_as_any_other() -> None:
    """Copies of two streams to one place, one of them asynchronous, are a race that is found."""
    with simulated() as sim:
        side = torch.Stream()
        there = torch.ones(4, device="sim")
        here = there.to("cpu", non_blocking=True)
        with side:
            here.to("sim", non_blocking=True)
        assert [race.kind for race in sim.races] == ["unordered"]
