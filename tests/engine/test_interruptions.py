"""An interruption from outside (Ctrl+C) that falls into an operation: no rank can pair its operations any more, so all
of them raise in words, close without each other, and go on with an engine made anew."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.comm._boards import possible
from shardfold.testing import Ranks

SENTENCE = "so ranks cannot pair their operations any more: close the engine, make it anew and load a checkpoint."
PLACES = ("before the send", "behind the send", "in the wait", "in a message", "behind a message")


def made(layout: str) -> sf.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1))
    return sf.Engine(
        model, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), layout=layout, init=sf.Init(units=["0", "2"])
    )


def train(engine: sf.Engine) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(engine.rank))
    engine.backward(engine(x).square().mean())
    engine.step()


def interrupting(call: Callable[..., Any], *, first: bool = False) -> Callable[..., Any]:
    """``call``, and an interruption behind it; or, ``first``, in its place."""

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if not first:
            call(*args, **kwargs)
        raise KeyboardInterrupt

    return interrupted


@contextmanager
def at(engine: sf.Engine, place: str) -> Iterator[None]:
    """Inside, the first operation that comes to that place is interrupted there."""
    comm = engine.sharded.comm
    owner, name = {
        "before the send": (comm.transport, "reduce_scatter"),
        "behind the send": (comm.transport, "reduce_scatter"),
        "in the wait": (comm.agreement, "_wait"),
        "in a message": (comm.agreement.peers, "reduce"),
        "behind a message": (comm.agreement, "expect"),
    }[place]
    setattr(owner, name, interrupting(getattr(owner, name), first=place in ("before the send", "in the wait")))
    yield
    delattr(owner, name)


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except (sf.ShardfoldError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "nothing"


def lend(engine: sf.Engine) -> None:
    with engine.gathered():
        pass


def interrupted(layout: str, near: bool, who: tuple[int, ...], folder: str) -> list[tuple[str, list[str], bool]]:
    """For each place what the interrupted training raised, what each later call did, and whether an engine that is
    made anew and loads trains to the same values."""
    os.environ["SHARDFOLD_NEAR"] = str(int(near))
    engine = made(layout)
    train(engine)
    engine.save(f"{folder}/a", wait=True)
    train(engine)
    wanted = engine.state_dict()
    answers: list[tuple[str, list[str], bool]] = []
    for place in PLACES:
        for _ in range(2):  # whole parameters: from then on ranks tell what they expect
            train(engine)
        if engine.rank in who:
            with at(engine, place):
                first = said(partial(train, engine))
        else:
            first = said(partial(train, engine))
        if first == "nothing":  # what was interrupted elsewhere was the last that ranks do together in a step
            first = said(partial(lend, engine))
        load, save = partial(engine.load, f"{folder}/a"), partial(engine.save, f"{folder}/b")
        later = [said(call) for call in (load, partial(train, engine), engine.step, save, partial(lend, engine))]
        engine.close()
        engine = made(layout)
        engine.load(f"{folder}/a")
        train(engine)
        values: dict[str, Tensor] = engine.state_dict()
        answers.append((first, later, all(torch.equal(values[name], wanted[name]) for name in wanted)))
    engine.close()
    with suppress(KeyError):
        del os.environ["SHARDFOLD_NEAR"]
    return answers


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("layout", "near", "who"),
    [("zero3", False, (1,)), ("zero3", False, (0, 1)), ("zero2", False, (0,)), ("zero3", True, (0, 1))],
)
def test_an_interruption_inside_an_operation_ends_the_engine_on_every_rank(
    ranks: Ranks, layout: str, near: bool, who: tuple[int, ...], tmp_path: Path
) -> None:
    """The interrupted rank raises what interrupted it and the others the sentence; so does each later call; closing
    waits for nobody; an engine made anew trains on from a checkpoint, bit for bit."""
    if near and not possible():
        pytest.skip("the system does not let processes read each other's memory")
    for rank, answers in enumerate(ranks.run(interrupted, layout, near, who, str(tmp_path), world_size=2, timeout=90)):
        for place, (first, later, alike) in zip(PLACES, answers, strict=True):
            if rank in who:
                assert first == "KeyboardInterrupt: ", (place, first)
            else:
                assert "was interrupted (KeyboardInterrupt) at operation" in first, (place, first)
            assert all(each.startswith("OrderError: rank ") and each.endswith(SENTENCE) for each in later), (
                place,
                later,
            )
            assert alike, place
