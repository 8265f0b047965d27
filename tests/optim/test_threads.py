"""Updates in host memory are shared out among threads, and give the same on any number of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import shardfold as sf
from shardfold.optim import fused
from shardfold.optim.threads import UpdateThreads
from tests.support.options import grouped

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "Adam amsgrad": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.01, amsgrad=True),
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1),
}
PATIENCE = 60.0  # seconds after which a test that would hang fails


@pytest.fixture
def threads() -> Iterator[UpdateThreads]:
    made = UpdateThreads(3)
    yield made
    made.close()


class Uneven(nn.Module):
    """Parameters whose lengths are no multiples of a block, nor of a vector of the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(37, 101), nn.Tanh(), nn.Linear(101, 53), nn.Tanh(), nn.Linear(53, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def _trained(cores: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Tensor]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    torch.manual_seed(0)
    engine = sf.Engine(Uneven(), **grouped(layout="ddp", **options))
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        engine.backward(engine(torch.randn(8, 37, generator=draw)))
        engine.step()
    updater = engine._updater
    assert updater is not None
    assert (updater._threads._pool is not None) == (cores > 1)  # the threads have been used
    values = {f"parameter {name}": p.detach().clone() for name, p in engine.module.named_parameters()}
    for number, shard in enumerate(updater._fused.values()):
        values |= {f"{name} {number}": region.values().clone() for name, region in shard.moments.items()}
        assert shard.segment.master is not None
        values[f"master {number}"] = shard.segment.master.clone()
    engine.close()
    return values


@pytest.mark.sampled(12)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", [None, 1e-2], ids=["", "clipped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_the_same_on_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, name: str, clip: float | None, precision: str
) -> None:
    """Masters, moments and parameters are bit-equal on 1, 2 and 5 threads: every element is computed from its own
    values alone, and a block ends where a vector of the kernels does."""
    monkeypatch.setattr(fused, "CPU_BLOCK", 256)
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[name], "clip_norm": clip, "precision": precision}
    if precision == "fp32" and clip is not None:
        options["overlap"] = sf.Overlap(block=256)
    if precision == "fp32" and clip is None and name.startswith("SGD"):
        options["overlap"] = sf.Overlap(block=256)  # else nothing is cast or multiplied, and there is one block
    one, two, five = (_trained(cores, monkeypatch, **options) for cores in (1, 2, 5))
    for several in (two, five):
        assert one.keys() == several.keys()
        assert not [each for each in one if not torch.equal(one[each], several[each])]


def test_every_block_is_taken_once(threads: UpdateThreads) -> None:
    """Whatever a thread takes, no other does; the caller goes on when all are done."""
    done: list[list[int]] = []

    def work(blocks: Iterator[int]) -> None:
        done.append(list(blocks))

    threads.share(range(1000), work)
    assert sorted(block for each in done for block in each) == list(range(1000))
    threads.share([], work)
    assert len(done) <= 4 and done[-1] == []


def test_kernels_use_one_thread_each_and_others_keep_theirs(threads: UpdateThreads) -> None:
    """torch's number of threads is 1 on the threads, and what it was on the caller's and on those that begin later."""
    torch.set_num_threads(2)
    seen: list[int] = []

    def look(blocks: Iterator[int]) -> None:
        seen.append(torch.get_num_threads())
        list(blocks)

    try:
        threads.share(range(9), look)
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert torch.get_num_threads() == 2 and seen == [1, 1, 1, 2]
    finally:
        torch.set_num_threads(1)


def test_what_one_thread_raises_ends_the_others_first(threads: UpdateThreads) -> None:
    """The caller raises what a thread did, when no thread writes any more and with blocks left out."""
    raised = threading.Event()
    done: list[int] = []

    def work(blocks: Iterator[int]) -> None:
        for block in blocks:
            if block == 0:
                raised.set()
                raise RuntimeError("block 0")
            assert raised.wait(PATIENCE)
            done.append(block)

    with pytest.raises(RuntimeError, match="block 0"):
        threads.share(range(100_000), work)
    assert len(done) < 99_999
    before = len(done)
    threads.share(range(2), lambda blocks: list(blocks) and None)  # all threads are there again
    assert len(done) == before


def test_a_mode_sees_every_operation(threads: UpdateThreads) -> None:
    """Modes act on the thread that they were entered on: under one, the update stays there."""
    seen: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    value = torch.zeros(8)
    with Watch():
        threads.share(range(8), lambda blocks: [value[i : i + 1].add_(1) for i in blocks] and None)
    assert seen.count("add_") == 8 and value.sum() == 8


def test_threads_end_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the engine leaves no thread of the update."""
    monkeypatch.setattr(fused, "CPU_BLOCK", 256)
    _trained(2, monkeypatch, optimizer=OPTIMIZERS["AdamW"], precision="bf16")
    assert not [each.name for each in threading.enumerate() if each.name.startswith("shardfold-update")]
