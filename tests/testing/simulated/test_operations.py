"""Operations on the simulated device give what they give on the CPU; autograd, hooks, random numbers, autocast."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardfold.testing.simulated import simulated
from tests.support.simulated import F, Gpt, on_device


def _module() -> Any:
    return torch.get_device_module("sim")


def _same(here: Any, there: Any) -> bool:
    if isinstance(here, torch.Tensor):
        return here.dtype == there.dtype and here.stride() == there.stride() and torch.equal(here.cpu(), there)
    if isinstance(here, (tuple, list)):
        return all(_same(a, b) for a, b in zip(here, there, strict=True))
    return here == there


def _draw(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "pointwise": lambda x: (x * 2 + 1, x.exp(), x.clamp(0, 1), -x, x / 3, x > 0, torch.where(x > 0, x, x * 0.5)),
    "wrapped numbers": lambda x: (x.double() * 0.1, 0.1 * x, x + 1, (x * 0.1).long() + 2, 1 - x),
    "reductions": lambda x: (x.sum(), x.mean(1), x.max(1), x.std(), x.norm(), x.argmax(0), x.cumsum(0), x.var(0)),
    "products": lambda x: (x @ x.t(), torch.einsum("ij,kj->ik", x, x), torch.bmm(x[None], x.t()[None]), x.mv(x[0])),
    "in place": lambda x: (x.clone().add_(1), x.clone().mul_(x), x.clone().zero_(), x.clone().copy_(x.flip(0))),
    "shapes": lambda x: (x.t(), torch.cat([x, x]), torch.stack([x, x]), x.chunk(2), x.split([1, 3]), x[:, ::2]),
    "indices": lambda x: (x[[0, 2]], x[x > 0], x.gather(1, (x > 0).long()), x.index_select(0, (x[0, :2] > 9).long())),
    "writes": lambda x: (x.clone().index_add_(0, (x[:2, 0] > 9).long(), x[:2]), x.clone().masked_fill_(x > 0, 3.0)),
    "sorting": lambda x: (x.sort(1), x.topk(2), x.unique(), x.nonzero(), x.median()),
    "lists": lambda x: (torch._foreach_add([x, x], 1.0), torch._foreach_norm([x, x]), torch._foreach_mul([x], [x])),
    "host": lambda x: (x.tolist(), x.sum().item(), bool((x > 0).any()), torch.equal(x, x), x.allclose(x + 1e-9)),
    "out": lambda x: (torch.add(x, 1, out=torch.empty_like(x)), torch.mm(x, x.t(), out=x.new_empty(4, 4))),
    "layers": lambda x: (F.gelu(x), F.softmax(x, -1), F.log_softmax(x, 0), F.layer_norm(x, (6,)), F.silu(x)),
    "modes": lambda x: [F.batch_norm(x, x.new_zeros(6), x.new_ones(6), training=mode) for mode in (True, False)],
    "makers": lambda x: (x.new_zeros(2), torch.zeros_like(x), torch.full((2,), 3.0, device=x.device),
                         torch.arange(5, device=x.device), torch.eye(3, device=x.device)),
}  # fmt: skip


@pytest.mark.sampled(30)
@pytest.mark.parametrize("mode", ["check", "lazy"])
@pytest.mark.parametrize("name", PROGRAMS)
@on_device()
def test_operations_give_what_the_cpu_gives(name: str, mode: str) -> None:
    """The same values, dtypes and strides, also when the device stays behind and where the meta device is asked."""
    x = _draw(4, 6)
    with simulated(mode, lag=500) as sim:
        for _ in range(2):  # the second time its shapes are known
            assert _same(PROGRAMS[name](x.to("sim")), PROGRAMS[name](x))
        sim.expect_clean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["check", "lazy"])
@on_device()
def test_training_gives_what_the_cpu_gives(mode: str) -> None:
    """A transformer's losses and parameters, three steps; attention is computed by other kernels."""
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))

    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Gpt(depth=1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        there, losses = ids.to(device), []
        for _ in range(3):
            loss = F.cross_entropy(model(there[:, :-1]).reshape(-1, 32), there[:, 1:].reshape(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [value.detach().cpu() for value in (*losses, *model.parameters())]

    with simulated(mode, lag=300) as sim:
        found = train("sim")
        sim.expect_clean()
    for here, there in zip(found, train("cpu"), strict=True):
        assert torch.allclose(here, there, rtol=1e-5, atol=1e-6)  # fp32, a few hundred summands


@pytest.mark.parametrize("activation", [F.silu, F.mish])
@on_device()
def test_the_backward_of_an_activation_is_one_kernel(activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As on every device that has one for it: beside the gradient nothing is allocated."""
    with simulated():
        x = torch.ones(1024, device="sim", requires_grad=True)
        y = activation(x)
        grad = torch.ones_like(y)
        _module().reset_peak_memory_stats()
        before = _module().memory_allocated()
        (found,) = torch.autograd.grad(y, x, grad)
        assert _module().max_memory_allocated() - before == found.nbytes


@on_device()
def test_recomputation_and_hooks() -> None:
    """torch.utils.checkpoint, and hooks of tensors, nodes and modules, run as elsewhere."""
    with simulated() as sim:
        seen: list[str] = []
        layer = nn.Linear(4, 4).to("sim")
        layer.register_full_backward_hook(lambda *_: seen.append("module"))
        x = torch.ones(2, 4, device="sim", requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=False)
        y.register_hook(lambda grad: seen.append("tensor"))
        x.register_post_accumulate_grad_hook(lambda _: seen.append("grad"))
        y.sum().backward()
        assert seen == ["tensor", "module", "grad"] or set(seen) == {"tensor", "module", "grad"}
        sim.expect_clean()


def _boom(*_: Any) -> None:
    raise ValueError("boom")


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise ValueError("boom")


def _with(kind: str, x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    if kind == "tensor hook":
        y.register_hook(_boom)
    elif kind == "post-accumulate hook":
        x.register_post_accumulate_grad_hook(_boom)
    elif kind == "node hook":
        assert y.grad_fn is not None
        y.grad_fn.register_hook(_boom)
    elif kind == "node prehook":
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(_boom)
    elif kind == "saved tensor":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, _boom):
            y = y * y
    elif kind == "callback":
        y.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(_boom))  # type: ignore
    else:
        y = _Raises.apply(y)
    return y


KINDS = ["tensor hook", "post-accumulate hook", "node hook", "node prehook", "saved tensor", "callback", "function"]


@pytest.mark.parametrize("kind", KINDS)
@on_device()
def test_what_a_backward_raises_reaches_its_caller(kind: str) -> None:
    """With its own traceback; the process lives, and the next backward is right."""
    with simulated():
        for _ in range(3):
            x = torch.ones(4, device="sim", requires_grad=True)
            with pytest.raises(ValueError, match="boom") as raised:
                _with(kind, x).sum().backward()
            assert any(entry.name in ("_boom", "backward") for entry in raised.traceback)
            z = torch.ones(4, device="sim", requires_grad=True)
            (z * 2).sum().backward()
            assert z.grad is not None and z.grad.tolist() == [2.0] * 4


@on_device()
def test_random_numbers_are_the_devices_own() -> None:
    """torch.manual_seed seeds them; drawing them does not move the CPU's; their state is read and set."""
    with simulated():
        torch.manual_seed(3)
        expected = torch.randn(4)
        torch.manual_seed(3)
        first = torch.randn(4, device="sim").tolist()
        assert torch.randn(4).tolist() == expected.tolist()
        torch.manual_seed(3)
        assert torch.randn(4, device="sim").tolist() == first
        state = _module().get_rng_state()
        drop = F.dropout(torch.ones(64, device="sim"), 0.5).tolist()
        _module().set_rng_state(state)
        assert F.dropout(torch.ones(64, device="sim"), 0.5).tolist() == drop
        with torch.random.fork_rng([0], device_type="sim"):
            _module().manual_seed(3)
            assert torch.randn(4, device="sim").tolist() == first
        own = torch.Generator("sim").manual_seed(5)
        assert isinstance(own, torch.Generator) and isinstance(torch.Generator(), torch.Generator)
        a = torch.randn(4, device="sim", generator=own).tolist()
        assert torch.randn(4, device="sim", generator=own.manual_seed(5)).tolist() == a


@on_device()
def test_autocast_computes_products_in_16_bits() -> None:
    """Products are 16 bits wide under autocast, softmax and losses 32; outside nothing changes."""
    with simulated():
        x = torch.ones(4, 4, device="sim")
        with torch.autocast("sim", torch.bfloat16):
            assert (x @ x).dtype == F.linear(x, x).dtype == torch.bfloat16
            assert F.softmax((x @ x), -1).dtype == torch.float32
            assert F.cross_entropy(x @ x, torch.zeros(4, dtype=torch.long, device="sim")).dtype == torch.float32
        assert (x @ x).dtype == torch.float32


@on_device()
def test_threads_of_the_users_own_use_the_device() -> None:
    """Each thread has a current stream of its own, the default one at first."""
    with simulated() as sim:
        seen: list[int] = []

        def work() -> None:
            seen.append(_module().current_stream().stream_id)
            torch.ones(4, device="sim").add_(1)

        with _module().stream(_module().Stream()) as own:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert _module().current_stream() == own
        assert seen == [0]
        sim.expect_clean()


@on_device()
def test_a_backward_runs_on_the_stream_that_it_was_called_on() -> None:
    """So one that is called on a stream which did not wait for the forward is a race, with autograd's node named."""
    with simulated() as sim:
        x = torch.ones(4, device="sim", requires_grad=True)
        loss = x.exp().sum()
        own = _module().Stream()
        with _module().stream(own):
            loss.backward()
        races = [str(race) for race in sim.races]
        assert any("backward (ExpBackward0)" in race and "test_operations.py" in race for race in races), races
