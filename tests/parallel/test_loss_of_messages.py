"""Each collective of a step is needed: training without any one of them is found to be other training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.errors import ModelError
from shardfold.testing import Ranks
from tests.parallel.lossy import losing
from tests.parallel.models import ADAM, batches, loss_on, make
from tests.support.options import grouped

SOAK = pytest.mark.soak


def _numbers(name: str, options: dict[str, Any], steps: int, lost: int | None) -> tuple[list[str], list[float] | None]:
    """Of steps in which the one message is lost: losses and norms, and the loss behind them; None: it is refused."""
    engine = sf.Engine(make(name), optimizer=ADAM, **grouped(clip_norm=0.1, **options))
    found: list[float] | None = []
    with losing(engine, lost) as seen:
        try:
            for batch in batches(steps):
                loss = loss_on(engine, *batch)
                engine.backward(loss)
                found += [loss.item(), engine.step().grad_norm]
        except ModelError as error:
            assert "differs between ranks" in str(error)
            found = None
    if found is not None:
        with torch.no_grad():
            found.append(loss_on(engine, *batches(3)[2]).item())
    engine.close()
    return seen, found


def _unnoticed(name: str, options: dict[str, Any], steps: int) -> tuple[int, list[str]]:
    """How many collectives the steps have, and those whose loss changes no number on this rank."""
    seen, right = _numbers(name, options, steps, None)
    assert right is not None
    same = []
    for lost, what in enumerate(seen):
        _, numbers = _numbers(name, options, steps, lost)
        if numbers is not None and all(abs(a - b) <= 1e-9 * abs(b) for a, b in zip(numbers, right, strict=True)):
            same.append(f"{lost}: {what}")
    return len(seen), same


# Of 12 words of 16 elements: the loss makes the gradients of the head, and of what it is given, in forward, and an
# embedding reads no weight in backward; zero3 gathers their unit there all the same.
UNREAD = "gather of 192"
TENSOR, BOTH = {"mesh": {"tensor": 2}, "tensor": "auto"}, {"mesh": {"sequence": 2, "tensor": 2}, "tensor": "auto"}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "world", "options"),
    [
        ("gpt-tied", 2, {**TENSOR, "layout": "ddp", "sequence_parallel": True}),
        pytest.param("gpt-tied", 4, {**TENSOR, "layout": "zero3", "sequence_parallel": True}, marks=SOAK),
        pytest.param("qwen3", 4, {**TENSOR, "layout": "zero1"}, marks=SOAK),
        pytest.param("llama-1kv", 4, {**TENSOR, "layout": "zero2"}, marks=SOAK),
        pytest.param("gpt2", 4, {**TENSOR, "layout": "hsdp"}, marks=SOAK),
        pytest.param("mixtral", 2, {**TENSOR, "layout": "ddp"}, marks=SOAK),
        pytest.param("gpt", 4, {"mesh": {"sequence": 2}, "attention": "ulysses", "layout": "zero3"}, marks=SOAK),
        pytest.param("llama", 3, {"mesh": {"sequence": 3}, "attention": "ring", "layout": "zero1"}, marks=SOAK),
        pytest.param("gpt", 4, {**BOTH, "attention": "ulysses", "layout": "ddp"}, marks=SOAK),
        pytest.param("gpt", 4, {**BOTH, "attention": "ring", "layout": "ddp"}, marks=SOAK),
    ],
)
def test_no_message_may_be_lost(ranks: Ranks, name: str, world: int, options: dict[str, Any]) -> None:
    """Where any one collective of a step, or of two where data are divided too, brings nothing from other ranks, a
    loss, a norm or the next loss is another on some rank, or the engine finds gradients that have to be equal to
    differ."""
    found = ranks.run(_unnoticed, name, options, 1 if world == 2 else 2, world_size=world, timeout=900)
    assert found[0][0] >= 10
    tied = name == "gpt-tied"
    lost = set.intersection(*(set(same) for _, same in found))
    assert {what.partition(": ")[2] for what in lost} == ({UNREAD} if options["layout"] == "zero3" and tied else set())
