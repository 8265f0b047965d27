"""One rank sends nothing, so its gradients stay where autograd made them; everything that reads them finds them."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import Ranks
from shardfold.tiers import pages as exact
from tests.support import models
from tests.support.options import grouped

WIDE = 96  # its weights are large enough to be kept as they are


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.tied = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.tied.weight = self.first.weight
        self.unused = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.second(self.first(x).relu()).relu()).square().mean()


def _inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDE, generator=generator) for _ in range(count)]


def _engine(optimizer: Any = torch.optim.AdamW, **more: Any) -> sf.Engine:
    return sf.Engine(Net(), optimizer=partial(optimizer, lr=1e-2), **grouped(layout="zero2", **more))


def _adopted(engine: sf.Engine) -> int:
    return sum(len(segment.adopted) for unit in engine.units for segment in unit.trainable)


def _plain(rounds: int, between: Any = None, optimizer: Any = torch.optim.AdamW, backwards: int = 1) -> dict[str, Any]:
    model = Net()
    own = optimizer([p for n, p in model.named_parameters() if "unused" not in n], lr=1e-2, fused=True)
    for x in _inputs(rounds):
        for _ in range(backwards):
            model(x).backward()
        if between is not None:
            between(model)
        own.step()
        own.zero_grad()
    return model.state_dict()


def _same(engine: sf.Engine, expected: dict[str, Tensor]) -> list[str]:
    state = engine.state_dict()
    wrong = [name for name, value in expected.items() if not torch.allclose(state[name], value, rtol=1e-6, atol=1e-7)]
    engine.close()
    return wrong


def _halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def _train(kind: str) -> tuple[list[str], list[int]]:
    """A loop of that kind; what differs from plain PyTorch, and how many gradients were not copied at each step."""
    # A norm may be rounded otherwise, of which AdamW makes steps where gradients are near zero.
    optimizer = torch.optim.SGD if kind in ("sgd", "clipped") else torch.optim.AdamW
    engine = _engine(optimizer, clip_norm=0.05 if kind == "clipped" else None)
    kept: list[int] = []
    for x in _inputs(4):
        for _ in range(2 if kind == "twice" else 1):
            engine.backward(engine(x))
        if kind == "changed":
            _halve(engine.module)
        if kind == "read":
            with engine.gathered("first.weight", of="grads") as grad:
                assert torch.equal(grad, engine.module.first.weight.grad)
            _halve(engine.module)  # what is shown now is what was read
        kept.append(_adopted(engine))
        engine.step()
        assert _adopted(engine) == 0
    between = {
        "changed": _halve,
        "read": _halve,
        "clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    }
    return _same(engine, _plain(4, between.get(kind), optimizer, 2 if kind == "twice" else 1)), kept


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", ["plain", "changed", "read", "twice", "clipped", "sgd"])
def test_gradients_that_are_not_copied_train_as_those_that_are(ranks: Ranks, kind: str) -> None:
    wrong, kept = ranks.run(_train, kind, world_size=1)[0]
    assert wrong == []
    copied = {"read": 1, "twice": 2}.get(kind, 0)  # ``unused`` has none, ``tied`` shares one: two weights are large
    assert kept == [2 - copied] * 4 or (kind == "read" and all(count < 2 for count in kept))


def _memory() -> tuple[int, float]:
    engine = sf.Engine(models.small(), optimizer=partial(torch.optim.AdamW, lr=1e-3), layout="zero3")
    engine.backward(engine(*models.batches(1)[0]))
    engine.step()
    report = engine.memory()
    engine.close()
    return report.held, report.table + report.padding


def test_what_is_held_is_still_what_the_table_says(ranks: Ranks) -> None:
    held, said = ranks.run(_memory, world_size=1)[0]
    assert held == said


HEAP = """
import torch
from shardfold.tiers.disk import DiskTier
from shardfold.tiers.pages import keep

def is_mapped(tensor):
    [heap] = [line.split()[0] for line in open("/proc/self/maps") if "[heap]" in line]
    first, stop = (int(word, 16) for word in heap.split("-"))
    return not first <= tensor.data_ptr() < stop

class Owner: ...

owner = Owner()
keep(owner)
before = torch.empty(2**21)
tier = DiskTier(torch.device("cpu"), FOLDER)
during = torch.empty(2**21)
tier.close()
after = torch.empty(2**21)
print(is_mapped(before), is_mapped(during), is_mapped(after))
"""


@pytest.mark.skipif(exact._mallopt is None, reason="needs glibc")
def test_what_is_freed_beside_files_goes_back_to_the_system(tmp_path: Path) -> None:
    """While states rest in files, large blocks are no part of the heap, whose holes make memory grow with the number of
    units; before and behind they are, and may be kept."""
    words = [sys.executable, "-c", HEAP.replace("FOLDER", repr(str(tmp_path)))]
    assert subprocess.run(words, capture_output=True, check=True, text=True).stdout.split() == [
        "False",
        "True",
        "False",
    ]


def test_one_rank_keeps_a_gigabyte_for_its_next_step_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine of one rank frees stays with the process up to the documented bound, in bytes as glibc is told;
    a larger bound would hold memory that other programs need."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(exact, "_mallopt", lambda what, num_bytes: told.append((what, num_bytes)))
    monkeypatch.setattr(exact, "_outside", dict(exact._outside))
    owner = type("Owner", (), {})()
    exact.keep(owner)
    assert [num_bytes for what, num_bytes in told if what == exact.M_TRIM_THRESHOLD][-1:] == [2**30]
    assert exact.M_TRIM_THRESHOLD == -1  # malloc.h
