"""Of many blocks that are alike a few are traced, and what is repeated is what the whole model does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardfold.plan.layout import Precision
from shardfold.planner.division import Division
from shardfold.planner.ranking import MODES
from shardfold.planner.repeats import fold
from shardfold.planner.setting import Subject
from shardfold.planner.trace import Lane, Trace
from shardfold.tools.recipes.gpt import GPT, GPTConfig

DEEP = GPTConfig(d_model=32, layers=14, heads=2, context=16)


def _batch(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(256, (rows, DEEP.context)), torch.randint(256, (rows, DEEP.context))


def _whole(mode: str, model: nn.Module | None = None, batch: object = None) -> Trace:
    subject = Subject(model or GPT(DEEP), batch if batch is not None else _batch())
    subject._whole = True
    return subject.trace("bf16", mode)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["keep", "recompute", "select"])
def test_a_trace_by_a_few_blocks_is_that_of_all(mode: str) -> None:
    """Event by event, with bytes, work and names."""
    subject = Subject(GPT(DEEP), _batch())
    found, expected = subject.trace("bf16", mode), _whole(mode)
    assert subject._folded is not None and not subject._whole
    assert len(found.events) == len(expected.events)
    for ours, theirs in zip(found.events, expected.events, strict=True):
        assert ours == theirs
    assert (found.batch, found.buffers, found.touched) == (expected.batch, expected.buffers, expected.touched)


class Uneven(nn.Module):
    """Blocks that are alike, of which the second is run in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(14))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, layer in enumerate(self.layers):
            x = layer(x).relu().tanh() if n == 1 else layer(x).relu()
        return x.square().mean()


def test_where_blocks_differ_all_are_traced() -> None:
    """In what they do, in a setting of theirs, or as there are few."""
    batch = torch.randn(2, 8)
    subject = Subject(Uneven(), batch)
    assert subject.trace("bf16").events == _whole("keep", Uneven(), batch).events
    assert subject._whole
    other = GPT(DEEP)
    for n, block in enumerate(other.blocks):
        block.extra = 5.0 if n == 3 else 4.0  # type: ignore[assignment]
    units = [f"blocks.{n}" for n in range(DEEP.layers)]
    assert fold(Subject(other, _batch()).hollow, units) is None
    assert fold(Subject(GPT(GPTConfig(d_model=32, layers=4, heads=2, context=16)), _batch()).hollow, units[:4]) is None


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))


def _narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


LISTS = {
    "blocks": lambda: nn.Sequential(*(_wide() for _ in range(20))),
    "layers and functions": lambda: nn.Sequential(*(part for _ in range(20) for part in (nn.Linear(8, 8), nn.GELU()))),
    "two kinds": lambda: nn.Sequential(*(_wide() if n % 2 else _narrow() for n in range(25))),
    "three kinds": lambda: nn.Sequential(*(_wide() if n % 3 else _narrow() for n in range(31))),
    "with others around": lambda: nn.Sequential(
        nn.GELU(), nn.Linear(8, 8), *(_wide() for _ in range(20)), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)
    ),
}
"""Models that are lists."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", LISTS)
def test_a_model_that_is_a_list_and_kinds_that_take_turns_are_traced_by_a_few_blocks(which: str, mode: str) -> None:
    """Event by event; a thousand blocks take seconds so."""
    batch = torch.randn(2, 8)
    subject = Subject(LISTS[which](), batch)
    found, expected = subject.trace("bf16", mode), _whole(mode, LISTS[which](), batch)
    assert subject._folded is not None and not subject._whole
    assert len([*subject._folded.model.children()]) < len([*subject.model.children()]) - 6
    assert len(found.events) == len(expected.events)
    for ours, theirs in zip(found.events, expected.events, strict=True):
        assert ours == theirs


def test_a_run_of_blocks_is_found_within_a_list() -> None:
    """The longest, unless one of its blocks shares a parameter with another part, or lies in no unit."""
    layers = [nn.Linear(8, 8), *(_wide() for _ in range(20)), nn.Linear(8, 8)]
    units = [str(n) for n in range(22)]
    found = fold(nn.Sequential(*layers), units)
    assert found is not None and found.lists[""] == (20, 1, 1, 1)
    assert [found.kept(unit) for unit in units if found.kept(unit)] == [str(n) for n in range(7)]
    assert fold(nn.Sequential(*layers), [unit for unit in units if unit != "9"]) is None
    block = layers[8]
    assert isinstance(block, nn.Sequential) and isinstance(block[0], nn.Linear)
    tied = nn.Linear(8, 24)
    tied.weight = block[0].weight
    assert fold(nn.Sequential(*layers, tied), [*units, "22"]) is None


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("stage", "order", "mode"),
    [
        (0, "1f1b", "recompute"), (1, "1f1b", "recompute"), (2, "1f1b", "recompute"), (1, "zb-h1", "keep"),
        (2, "zb-h1", "recompute"), (1, "zb-h1", "select"),
    ],
)  # fmt: skip
def test_a_stage_by_a_few_of_its_blocks_is_the_whole_stage(stage: int, order: str, mode: str) -> None:
    """Event by event, with the buffers of all of its blocks; first, middle and last stages, backwards whole and in
    parts."""
    deep = GPTConfig(d_model=32, layers=20, heads=2, context=16)
    division = Division(pipeline=3, micro_batches=4, stage=stage, order=order)

    def traced(whole: bool) -> Trace:
        subject = Subject(GPT(deep), _batch(), division=division)
        (one,) = subject.stages.values()
        one._whole = whole
        found = subject.trace("bf16", mode)
        assert one._whole == whole
        return found

    found, expected = traced(False), traced(True)
    assert (found.batch, found.buffers, found.touched) == (expected.batch, expected.buffers, expected.touched)
    for ours, theirs in zip(found.events, expected.events, strict=True):
        assert ours[:2] + ours[4:6] == theirs[:2] + theirs[4:6] and ours.work.products == theirs.work.products
        # of other stages' blocks each makes a number of its own, in each forward
        assert 0 <= theirs.peak - ours.peak <= 256 and 0 <= theirs.level - ours.level <= 256


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("split", [False, True])
def test_a_stage_is_found_by_one_that_has_as_many_of_the_same_blocks(mode: str, split: bool) -> None:
    """What it does is what it did by itself, but for what stands for the blocks of other stages; a first or a last
    stage is found by no other."""
    deep, policy = GPTConfig(d_model=32, layers=16, heads=2, context=16), Precision.named("bf16")
    subjects = [Subject(GPT(deep), _batch(), division=Division(pipeline=4, stage=n)) for n in range(3)]
    first, *middle = (subject.stages[n] for n, subject in enumerate(subjects))
    own = middle[1].trace(policy, mode, 2, Lane(2, split))
    found = middle[0].of_another(middle[1], policy, mode, 2, Lane(2, split))
    assert found is not None and found.structure == own.structure
    units = [n for n, event in enumerate(own.events) if event.kind == "enter"]
    assert found.events[units[0] + 1 :] == own.events[units[0] + 1 :]
    assert found.levels[0] == pytest.approx(own.levels[0], rel=0.01)
    assert middle[0].of_another(first, policy, mode, 2, Lane(0, split)) is None
