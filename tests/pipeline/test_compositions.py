"""Compositions of stages train, evaluate, save and load as plain PyTorch does, in fp64 to 1e-12."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, OrderError
from shardfold.testing import Ranks
from tests.support.compositions import Composition, Form, batch, check, compute, make_engine, run

CALLS = (("train", 0), ("train", 1), ("eval", 2))
SAVES = (("train", 0), ("save_load", 1), ("train", 2), ("eval", 3))
LAYERS = [nn.Linear, nn.Embedding]


def _of(form: Form, order: str, layout: str, calls: Any = CALLS, data: int = 1, **options: Any) -> Composition:
    accumulate = options.pop("accumulate", 2)
    return Composition(0, form, 2, data, order, layout, accumulate, "adamw", options, calls)


# Who reads a weight: another module than its own, in the same stage or in another one of the same rank.
READ = [
    _of(Form(2, head="read"), "interleaved:2", "infinity"),
    _of(Form(2, head="read"), "looped-bfs:2", "infinity", overlap=sf.Overlap(order="any")),
    _of(Form(2, head="early", loss="head"), "zbv", "infinity"),
    _of(Form(2, loss="head"), "zbv", "infinity"),
    _of(Form(2, tied=True, loss="embedding"), "1f1b", "zero2"),
    _of(Form(2, head="read", tied=True, loss="embedding"), "dualpipev", "infinity"),
]
# Several parameters that stages have together, which each defines in another order; names of which ranks know others.
TIED = [
    _of(Form(2, tied=True, alike=(0, 1)), "interleaved-zb:2", "zero2", clip_norm=0.3),
    _of(Form(4, tied=True, alike=(0, 3)), "interleaved:2", "infinity", units=LAYERS),
    _of(Form(4, alike=(1, 3)), "dualpipev", "zero1", SAVES),
]
# Buffers around the pieces, of which every stage runs the code.
AROUND = [
    _of(Form(2, counts=True, buffers=True), "1f1b", "ddp", SAVES),
    _of(Form(2, counts=True), "zbv", "zero3", SAVES, accumulate=3),
]
# With two ranks of data, which take other branches.
DATA = [
    _of(Form(2, head="read"), "interleaved:2", "hpz", data=2),
    _of(Form(2, head="early", branches=True), "looped-bfs:2", "zero3", data=2, units=LAYERS, accumulate=4),
    _of(Form(2, counts=True, branches=True), "zbv", "fsdp2", data=2, units=LAYERS),
]


def _run(works: list[Composition], path: str) -> None:
    for number, work in enumerate(works):
        run(work, str(Path(path) / str(number)))


@pytest.mark.parametrize("works", [READ, TIED, AROUND], ids=["read", "tied", "around"])
def test_what_several_stages_read_is_that_of_plain_pytorch(
    ranks: Ranks, tmp_path: Path, works: list[Composition]
) -> None:
    """Losses, evaluations and state dicts behind each step."""
    ranks.run(_run, works, str(tmp_path), world_size=2)


def _what_stays_behind_a_pass() -> list[int]:
    found: list[int] = []
    for work in READ:
        engine = make_engine(work)
        engine.train_batch(batch(work, 0, engine.data_rank), compute)
        found.append(engine.memory().transient)
        engine.step()
        engine.close()
    return found


def test_no_weights_of_another_stage_stay_until_the_step(ranks: Ranks) -> None:
    for found in ranks.run(_what_stays_behind_a_pass, world_size=2):
        assert found == [0] * len(READ)


def test_ranks_of_data_are_in_one_stage_at_a_time(ranks: Ranks, tmp_path: Path) -> None:
    """A rank that still needs a unit of a stage is helped in that stage, whichever the others are about to run."""
    ranks.run(_run, DATA, str(tmp_path), world_size=4)


def _refused() -> None:
    work = _of(Form(2, shared=(0, 1)), "dualpipev", "zero3", units=LAYERS)
    with pytest.raises((ConfigError, OrderError), match=r"'blocks\.0\.up' has parts in several stages of a rank"):
        make_engine(work)


def test_a_module_of_two_stages_of_a_rank_is_refused(ranks: Ranks) -> None:
    """Each of them would gather and free it by itself."""
    ranks.run(_refused, world_size=2)


class _Groups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32, device=x.device)
        return x + torch.tanh(F.grouped_mm(x, self.weight, offs=ends))


def _multiplies() -> None:
    for precision, tolerance in (("fp32", 1e-5), ("fp16", 1e-2)):
        torch.manual_seed(0)
        plain = nn.Sequential(*(_Groups() for _ in range(3)))
        torch.manual_seed(0)
        model = nn.Sequential(*(_Groups() for _ in range(3)))
        engine = sf.Engine(model, layout="ddp", parallel={"pipeline": 2}, precision=precision)
        x = torch.randn(8, 8)
        loss = engine.eval_batch(x, lambda model, x: model(x).float().square().mean())
        torch.testing.assert_close(loss.item(), plain(x).square().mean().item(), rtol=tolerance, atol=0)
        engine.close()


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no F.grouped_mm")
def test_an_operation_whose_shapes_are_known_in_bf16_only_runs_in_stages(ranks: Ranks) -> None:
    """PyTorch's kernel for shapes of ``grouped_mm`` refuses fp32 and fp16, which the one for values takes."""
    ranks.run(_multiplies, world_size=2)


DRAWS = {2: (1, 3), 4: (1002,)}


@pytest.mark.parametrize("size", [2, 4])
def test_random_compositions_are_plain_pytorch(ranks: Ranks, size: int) -> None:
    """What is drawn from some numbers; each either trains, or is refused on all ranks when the engine is made."""
    said = ranks.run(check, list(DRAWS[size]), size, world_size=size)
    assert [list(map(bool, each)) for each in said] == [[False] * len(DRAWS[size])] * size


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("first", range(10_000, 10_200, 20))
def test_many_random_compositions_are_plain_pytorch(ranks: Ranks, size: int, first: int) -> None:
    said = ranks.run(check, list(range(first, first + 20)), size, world_size=size, timeout=600)
    assert len({tuple(map(bool, each)) for each in said}) == 1


@pytest.mark.skipif("SHARDFOLD_COMPOSITION" not in os.environ, reason="runs the one of that number")
@pytest.mark.parametrize("size", [2, 4])
def test_a_composition_again(ranks: Ranks, size: int) -> None:
    """The composition whose number is in ``SHARDFOLD_COMPOSITION``."""
    print(ranks.run(check, [int(os.environ["SHARDFOLD_COMPOSITION"])], size, world_size=size)[0])
