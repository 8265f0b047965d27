"""What one rank alone is refused is told to all: they raise too, say what it was and where, and can go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfold as sf
from shardfold.errors import ShardfoldError
from shardfold.launch import free_port
from shardfold.testing import Ranks
from tests.engine.test_failed_engines import forked
from tests.support.options import grouped

SGD = partial(torch.optim.SGD, lr=0.1)
LIMIT = 60.0  # seconds; a rank that is not told waits for half an hour


def said_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ShardfoldError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def trained(engine: sf.Engine) -> list[float]:
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    with engine.gathered():
        return [p.sum().item() for p in engine.module.parameters()]


def small(layout: str = "zero1", **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    return sf.Engine(nn.Linear(4, 4), optimizer=SGD, **grouped(layout=layout, **options))


# -- the mesh

MESHES: dict[str, tuple[list[Any], str]] = {  # by rank, and what is said of them
    "does not fit": ([None, {"intra": 3}], "rank 1: mesh intra=3 does not multiply up to the 2 ranks there are"),
    "unknown axis": ([{"intr": 2}, None], "rank 0: mesh names the axis 'intr', which is unknown"),
    "no number": ([None, {"intra": "2"}], "rank 1: parallel= has '2' for 'intra'"),
}


def _mesh(meshes: list[Any]) -> tuple[str, list[float]]:
    """What an engine of these sizes raises, and what the next one trains to."""
    rank = dist.get_rank()
    said = said_of(lambda: small(mesh=meshes[rank]))
    with closing(small()) as engine:
        return said, trained(engine)


@pytest.mark.parametrize("kind", MESHES)
def test_a_mesh_that_one_rank_is_refused_is_refused_on_all(ranks: Ranks, kind: str) -> None:
    """The rank itself raises its own sentence, the others one that names it; the next engine is made and trains."""
    meshes, words = MESHES[kind]
    alone = next(rank for rank, mesh in enumerate(meshes) if mesh is not None)
    answers = ranks.run(_mesh, meshes, world_size=2, timeout=LIMIT)
    own = words.partition(": ")[2]
    for rank, (said, _) in enumerate(answers):
        assert said.startswith("LayoutError: ") and own in said, said
        assert (words in said) is (rank != alone), said
    assert answers[0][1] == answers[1][1]


def test_meshes_of_other_sizes_on_one_rank_raise_on_all(ranks: Ranks) -> None:
    """Sizes that fit and differ would have ranks make different groups; both are named."""
    meshes = [{"intra": 4}] * 3 + [{"inter": 2, "intra": 2}]
    answers = ranks.run(_mesh, meshes, world_size=4, timeout=LIMIT)
    for said, values in answers:
        assert said.startswith("LayoutError: "), said
        assert "inter=1 x intra=4 on rank" in said and "inter=2 x intra=2 on rank" in said, said
        assert values == answers[0][1]


def mesh_in_a_script() -> None:
    """As above, where the engine itself starts the default group."""
    meshes, words = MESHES["does not fit"]
    rank = int(os.environ["RANK"])
    assert words.partition(": ")[2] in said_of(lambda: small(mesh=meshes[rank]))
    with closing(small()) as engine:
        trained(engine)


@pytest.mark.soak
def test_the_default_group_outlives_a_mesh_that_one_rank_is_refused(ranks: Ranks) -> None:
    """Under torchrun's environment: the ranks agree about whether there is still a group."""
    call = f"from {__name__} import mesh_in_a_script\nmesh_in_a_script()"
    assert ranks.run(forked, call, free_port(), world_size=2, distributed=False, timeout=LIMIT) == [0, 0]


# -- other arguments

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {  # and what the rank that gave them is told
    "a value": ({"accumulate": 0}, "ConfigError: accumulate=0: it is the number of micro-batches"),
    "a preset": ({"layout": "zero33"}, "LayoutError: layout 'zero33' is unknown. Did you mean 'zero3'?"),
    "a name": ({"stage": 3}, "ConfigError: Engine() has no argument 'stage'. Did you mean 'layout'?"),
    "what is found out later": ({"units": ["nope"]}, "ModelError: "),
}


def _arguments(alone: int, given: dict[str, Any]) -> tuple[str, list[float]]:
    """What an engine raises that one rank gives other arguments, and what the next one trains to."""
    said = said_of(lambda: small(**{"layout": "zero2", **(given if dist.get_rank() == alone else {})}))
    with closing(small()) as engine:
        return said, trained(engine)


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_an_argument_that_one_rank_is_refused_is_refused_on_all(ranks: Ranks, kind: str) -> None:
    """However early it is refused: the rank raises its own sentence, the other one that names it, and the next engine
    is made and trains."""
    given, own = ARGUMENTS[kind]
    for alone in (0, 1):
        answers = ranks.run(_arguments, alone, given, world_size=2, timeout=LIMIT)
        assert answers[alone][0].startswith(own), answers
        other = answers[1 - alone][0]
        assert f"rank {alone}: {answers[alone][0].partition(': ')[2]}"[:80] in other, answers
        assert answers[0][1] == answers[1][1]


# -- gradients


def _gradient(layout: str, alone: int | None) -> tuple[list[str], bool, list[float], list[float]]:
    """A gradient put into ``.grad`` on rank ``alone`` where gradients have another form; what the step raises, whether
    nothing changed, and the values behind the mended step, and of a run in which nothing happened."""
    with closing(small(layout, accumulate=2)) as plain:
        for _ in range(2):
            plain.backward(plain(torch.ones(2, 4)).sum())
        plain.step()
        with plain.gathered():
            wanted = [p.sum().item() for p in plain.module.parameters()]
    with closing(small(layout, accumulate=2)) as engine:
        weight: Any = engine.module.weight
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).sum())
        if engine.rank == alone:
            weight.grad = torch.ones(4, 4)
        said = [said_of(engine.step)]
        steps = engine.steps
        had = alone == engine.rank or engine.module.bias.grad is not None  # what is shown is shown again
        if engine.rank == alone:
            weight.grad = None
        said.append(said_of(engine.step))
        engine.zero_grad()
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        with engine.gathered():
            return said, had and steps == 0, [p.sum().item() for p in engine.module.parameters()], wanted


CALLS: dict[str, Callable[[sf.Engine], Any]] = {
    "backward": lambda engine: engine.backward(engine(torch.ones(2, 4)).sum()),
    "gathered": lambda engine: engine.gathered(of="grads").__enter__(),
}


def _gradient_before(call: str, layout: str, alone: int) -> tuple[list[str], list[float], list[float]]:
    """The same before a call that looks at gradients too: what it raises, and the step behind ``zero_grad()``; the
    values behind that, and of a run in which nothing happened."""
    values: list[list[float]] = []
    said: list[str] = []
    for wrong in (False, True):
        with closing(small(layout, accumulate=2)) as engine:
            weight: Any = engine.module.weight
            if wrong:
                for _ in range(1 + (call == "gathered")):  # whose gradients are summed in the last backward
                    engine.backward(engine(torch.ones(2, 4)).sum())
                if engine.rank == alone:
                    weight.grad = torch.ones(4, 4)
                said.append(said_of(lambda engine=engine: CALLS[call](engine)))
                if engine.rank == alone:
                    weight.grad = None
                engine.zero_grad()
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 4)).sum())
            said.append(said_of(engine.step))
            with engine.gathered():
                values.append([p.sum().item() for p in engine.module.parameters()])
    return said, values[0], values[1]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("call", "layout"), [("backward", "zero3"), ("gathered", "zero2"), ("gathered", "zero3")])
@pytest.mark.parametrize("alone", [0, 1])
def test_a_gradient_that_another_call_refuses_on_one_rank_is_refused_on_all(
    ranks: Ranks, call: str, layout: str, alone: int
) -> None:
    """A backward and ``gathered(of="grads")`` say it as the step does; behind zero_grad() both train on."""
    for rank, (said, wanted, values) in enumerate(
        ranks.run(_gradient_before, call, layout, alone, world_size=2, timeout=LIMIT)
    ):
        own = "the .grad of 'weight' was set by hand"
        assert own in said[1], said
        assert said[1].startswith("UsageError" if rank == alone else "ConfigError"), said
        assert (f"rank {alone}: {own}" in said[1]) is (rank != alone), said
        assert (said[0], said[2]) == ("nothing was raised",) * 2
        assert values == wanted, said


def _begun(alone: int) -> list[str]:
    with closing(small("zero2", accumulate=2)) as engine:
        weight: Any = engine.module.weight
        engine.backward(engine(torch.ones(2, 4)).sum())
        if engine.rank == alone:
            weight.grad = torch.ones(4, 4)
        said = [said_of(lambda: CALLS["backward"](engine))]
        weight.grad = None
        return [*said, said_of(lambda: CALLS["backward"](engine))]


def test_a_backward_that_others_have_begun_is_given_up(ranks: Ranks) -> None:
    """Where parameters are whole a rank begins its backward before it has heard the others: it cannot take that back,
    so both ranks hear what was refused, and neither goes on with this engine."""
    own = "the .grad of 'weight' was set by hand"
    refused, begun = ranks.run(_begun, 0, world_size=2, timeout=LIMIT)
    assert refused[0].startswith(f"UsageError: {own}")
    for text in (refused[1], *begun):
        assert text.startswith("OrderError: ") and f"rank 0: {own}" in text, begun


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
@pytest.mark.parametrize("alone", [0, 1])
def test_a_gradient_that_the_step_refuses_on_one_rank_is_refused_on_all(ranks: Ranks, layout: str, alone: int) -> None:
    """The rank raises its own sentence, the other one that names it, and nothing is updated; behind zero_grad() both
    train on as if nothing had been."""
    for rank, (said, kept, values, wanted) in enumerate(
        ranks.run(_gradient, layout, alone, world_size=2, timeout=LIMIT)
    ):
        own = "the .grad of 'weight' was set by hand"
        assert own in said[0], said
        assert said[0].startswith("UsageError" if rank == alone else "ConfigError"), said
        assert (f"rank {alone}: {own}" in said[0]) is (rank != alone), said
        assert kept, said
        assert values == wanted, said
