"""A collective that fails says where in the program it stands, and a profiler sees the program's own words."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.engine.track import Section
from shardfold.errors import CollectiveError, OrderError
from shardfold.plan.program import MARKERS, Op
from shardfold.testing import Ranks
from shardfold.torch_internals import top_saved_hooks
from tests.support.options import grouped

HERE = "   <-- here"
SGD = partial(torch.optim.SGD, lr=0.1)


def _engine(layout: str, **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    return sf.Engine(model, optimizer=SGD, **grouped(layout=layout, units=["*"], **options))


def _leave(engine: sf.Engine) -> None:
    engine.close()
    raise LookupError


def _broken(where: str, layout: str, recorded: bool) -> str:
    """Rank 1 closes its engine in the middle of a pass; what rank 0 says then."""
    engine = _engine(layout)
    x = torch.ones(2, 8)

    def train() -> Tensor:
        loss = engine(x).square().mean()
        engine.backward(loss)
        return loss

    try:
        if recorded:
            for _ in range(2):
                train()
                engine.step()
        if engine.rank == 1:
            block = engine.module[6]
            if where == "forward":
                block.register_forward_hook(lambda *_: _leave(engine))
            else:
                block.register_forward_hook(lambda m, a, out: out.register_hook(lambda grad: _leave(engine)) and None)
        train()
    except LookupError:
        return ""
    except CollectiveError as error:
        engine.close()
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(("where", "layout"), [("forward", "zero3"), ("backward", "zero3"), ("backward", "zero2")])
def test_a_broken_collective_prints_the_program_around_it(ranks: Ranks, where: str, layout: str) -> None:
    """The sentence names the operation; behind it the section stands in few lines, in which exactly one is marked: a
    collective, or the wait for one, of a unit behind the one where the other rank left; or the end of the pass, where
    ranks wait for those that still read from them."""
    text = ranks.run(_broken, where, layout, True, world_size=2, timeout=60)[0]
    sentence, section, *lines = text.split("\n")
    assert "rank 1 has closed its engine" in sentence
    assert section == {"forward": "forward:", "backward": "last:"}[where]
    marked = [line.removesuffix(HERE).split() for line in lines if line.endswith(HERE)]
    assert len(marked) == 1 and len(lines) <= 11, text
    verb, *operands = marked[0]
    assert verb in ("ALL_GATHER", "WAIT", "END"), text
    if operands:
        assert int(operands[0]) > 6 if where == "forward" else int(operands[0]) <= 6, text


@pytest.mark.parametrize(("where", "layout"), [("forward", "zero3"), ("backward", "zero2"), ("backward", "ddp")])
def test_a_broken_round_of_asking_marks_what_is_asked_about(ranks: Ranks, where: str, layout: str) -> None:
    """The first passes ask before each unit; the section is in definition order, and marked is the first operation of
    the unit that rank 0 needs, or has gradients of: behind the one where the other rank left."""
    said = ranks.run(_broken, where, layout, False, world_size=2, timeout=60)[0]
    sentence, section, *lines = said.split("\n")
    assert "a round of asking" in sentence and "rank 1 has closed its engine" in sentence
    assert section == {"forward": "forward:", "backward": "last:"}[where]
    marked = [line.removesuffix(HERE).split() for line in lines if line.endswith(HERE)]
    assert len(marked) == 1 and len(lines) <= 11, said
    verb, *operands = marked[0]
    assert (
        verb
        == {"forward": "ALL_GATHER", "zero2": "REDUCE_SCATTER", "ddp": "ALL_REDUCE"}[
            where if where == "forward" else layout
        ]
    ), said
    assert int(operands[0]) in ((6, 7) if where == "forward" else (5, 6)), said


def _elsewhere(layout: str) -> str:
    """Rank 1 asks for a mean where rank 0 runs backward."""
    engine = _engine(layout)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    loss = engine(torch.ones(2, 8)).square().mean()
    with pytest.raises(OrderError) as raised:
        engine.backward(loss) if engine.rank == 0 else engine.mean(1.0)
    engine.close()
    return str(raised.value)


def test_ranks_that_go_apart_behind_an_announcement_see_where_they_are(ranks: Ranks) -> None:
    """Where parameters are whole the answer of a meeting is looked at when a pass is about to send first: the operation
    that it has come to is marked. So it is in a pass that all ranks had expected, which waits for its first gather."""
    said = ranks.run(_elsewhere, "ddp", world_size=2, timeout=60)[0]
    sentence, *lines = said.split("\n")
    assert "about to do different things" in sentence
    assert [line.removesuffix(HERE).split()[0] for line in lines if line.endswith(HERE)] == ["ALL_REDUCE"], said
    said = ranks.run(_elsewhere, "zero3", world_size=2, timeout=60)[0]
    sentence, *lines = said.split("\n")
    assert "about to do different things" in sentence
    assert [line.removesuffix(HERE).split()[0] for line in lines if line.endswith(HERE)] == ["ALL_GATHER"], said


def _apart(timeout: float) -> str:
    """Rank 1 stays away from the step; what rank 0 says."""
    engine = _engine("zero2", timeout=timeout)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    if engine.rank == 1:
        engine.close()
        return ""
    try:
        engine.step()
    except CollectiveError as error:
        engine.close()
        return str(error)
    return "nothing was raised"


def test_between_sections_no_program_is_printed(ranks: Ranks) -> None:
    said = ranks.run(_apart, 60.0, world_size=2, timeout=60)[0]
    assert "rank 1 has closed its engine" in said and "\n" not in said and HERE not in said


def _traced(layout: str, clip: sf.numerics.Clip) -> tuple[set[str], set[str], set[str]]:
    """Operations of a step that follows the recorded order, what a profiler saw of it, and what it saw of the first."""
    engine = _engine(layout, clip=clip)

    def step() -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            engine.step()
        return {event.name for event in profile.events() or ()}

    first = step()
    engine.backward(engine(torch.ones(2, 8)).square().mean())  # outside of the profiler
    engine.step()
    found, program = step(), engine.program
    sections = (program.forward, program.last, program.step)
    engine.close()
    return {str(op) for ops in sections for op in ops if op.verb not in MARKERS}, found, first


@pytest.mark.parametrize(
    ("layout", "clip", "verb"),
    [("zero3", sf.numerics.Clip(norm=1.0), "NORM"), ("zero2", sf.numerics.Clip(value=0.5), "CLAMP")],
)
def test_a_profiler_sees_every_operation_by_the_name_that_the_program_prints(
    ranks: Ranks, layout: str, clip: sf.numerics.Clip, verb: str
) -> None:
    for expected, found, first in ranks.run(_traced, layout, clip, world_size=2):
        assert {verb, "UPDATE 0"} <= expected <= found
        assert {text for text in expected if not text.startswith("GRADS")} <= first  # a pass that asks


def _observed() -> tuple[set[str], list[str], list[str]]:
    """Operations of a step that follows the recorded order, what an observer saw of it, and of one behind it."""
    engine, seen = _engine("zero3"), list[str]()

    def step(observer: Any) -> list[str]:
        seen.clear()
        Section.observer = observer
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
        Section.observer = None
        return [*seen]

    step(None)
    found = step(lambda section, number: seen.append(f"{section.name} {section.at == number} {section.ops[number]}"))
    program, after = engine.program, step(None)
    sections = {"forward": program.forward, "last": program.last, "step": program.step}
    engine.close()
    expected = {f"{name} True {op}" for name, ops in sections.items() for op in ops if op.verb not in MARKERS}
    return expected, found, after


def test_an_observer_is_called_in_front_of_each_operation(ranks: Ranks) -> None:
    """Once, and only as long as there is one."""
    for expected, found, after in ranks.run(_observed, world_size=2):
        assert set(found) == expected and not after


class Skipping(nn.Module):
    """Four layers, of which forward never uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.layers[0], self.layers[1], self.layers[3]):
            x = layer(x)
        return x.sum()


def _sums_and_gradients() -> list[str]:
    """The sums that a recorded backward starts and the layers' own backwards, in order."""
    torch.manual_seed(0)
    engine = sf.Engine(Skipping(), optimizer=SGD, layout="ddp", init=sf.Init(units=["layers.*"]))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
    loss = engine(torch.ones(2, 4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.backward(loss)
    engine.close()
    events = sorted(profile.events() or (), key=lambda event: event.time_range.start)
    names = [event.name.removeprefix("ALL_REDUCE layers.")[:1] for event in events if "ALL_REDUCE" in event.name]
    assert sorted(names) == ["0", "1", "2", "3"]
    return [event.name[:19] for event in events if event.name.startswith(("ALL_REDUCE", "AddmmBackward"))]


def test_no_sum_waits_for_a_unit_that_no_backward_has_had_gradients_of(ranks: Ranks) -> None:
    """Under ddp a unit is summed when its gradients are there, in the recorded order; one that had none in any recorded
    backward comes behind END, so that those behind it are sent while backward computes."""
    back = "AddmmBackward0"
    expected = [back, "ALL_REDUCE layers.3", back, "ALL_REDUCE layers.1", back, "ALL_REDUCE layers.0"]
    for found in ranks.run(_sums_and_gradients, world_size=2):
        assert found == [*expected, "ALL_REDUCE layers.2"]


def test_behind_the_last_operation_what_is_waited_for_is_marked() -> None:
    """And a section in which that is not is not printed: it would point at something else."""
    gather, other = (Op("ALL_GATHER", unit, ("intra",), "fp32", "params", "flat") for unit in "ab")
    section = Section("forward", [gather, Op("F", "a"), Op("FREE", "a"), Op("END")], lambda op: None)
    section.do(range(4))
    assert [line for line in section.where(gather).split("\n") if line.endswith(HERE)] == [f"  {gather}{HERE}"]
    assert section.where().endswith(HERE), "of what waits for nothing by name the last one is"
    assert section.where(other) == ""


def _closed_inside() -> bool:
    engine = _engine("zero3")
    engine.module[6].register_forward_hook(lambda *_: _leave(engine))
    with pytest.raises(LookupError):
        engine(torch.ones(2, 8))
    return top_saved_hooks() is None


def test_an_engine_that_is_closed_inside_of_its_forward_leaves_no_hooks_on_autograd(ranks: Ranks) -> None:
    assert all(ranks.run(_closed_inside, world_size=2))
