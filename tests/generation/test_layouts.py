"""``sf.generate`` under layouts: weights are read where they are, ranks have other prompts, and training goes on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.generation import Generation
from shardfold.testing import Ranks
from tests.generation.models import VOCABULARY, alone, made, unequal

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def _prompts(rank: int) -> list[list[int]]:
    """Rank 0 has four, rank 1 none, rank 2 eight: they end at different times."""
    return unequal(4 * rank if rank else 4, 20, seed=rank) if rank != 1 else []


def _train(layout: str, generates: bool, gather: bool, mesh: Any) -> tuple[Any, ...]:
    """Four steps, with generation between them or not: answers, weights, and what is left over."""
    model = made()
    engine = sf.Engine(model, optimizer=ADAMW, layout=layout, parallel=mesh)
    model.train()
    found: list[Any] = []
    for step in range(4):
        batch = torch.randint(3, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        if generates and step in (0, 2):
            options: dict[str, Any] = {"temperature": 0, "chunk": 16, "pages": 30, "page_size": 4, "gather": gather}
            answers = sf.generate(engine, _prompts(engine.data_rank), max_tokens=9, **options)
            found.append({each.request: each.tokens for each in answers})
    whole = {name: value.clone() for name, value in engine.state_dict().items()} if mesh is None else {}
    transient = engine.memory().transient
    engine.close()
    return found, whole, transient


def _plain() -> list[dict[int, dict[int, list[int]]]]:
    """The same by plain PyTorch, each prompt by transformers alone."""
    model = made().train()
    optimizer = ADAMW(model.parameters())
    found = []
    for step in range(4):
        batch = torch.randint(3, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(step))
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, 2):
            model.eval()
            found.append({r: {i: alone(model, p, 9) for i, p in enumerate(_prompts(r))} for r in range(3)})
            model.train()
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("gather", [False, True], ids=["streamed", "gathered"])
@pytest.mark.parametrize("layout", ["zero3", "zero2", "fsdp2", "ddp", "hpz"])
def test_ranks_generate_between_steps_and_weights_are_those_without(ranks: Ranks, layout: str, gather: bool) -> None:
    """Each rank its own prompts, one of them none: tokens are those of plain PyTorch, weights bit-equal to a run that
    generates nothing, and nothing stays gathered."""
    expected = _plain()
    results = ranks.run(_train, layout, True, gather, None, world_size=3, timeout=200)
    without = ranks.run(_train, layout, False, gather, None, world_size=3, timeout=200)
    for rank, (found, whole, transient) in enumerate(results):
        assert found == [moment[rank] for moment in expected]
        assert all(torch.equal(value, without[rank][1][name]) for name, value in whole.items())
        assert transient == without[rank][2]


def test_auto_gathers_what_half_of_the_memory_of_each_rank_holds(ranks: Ranks) -> None:
    """One rank that has too little keeps all from it."""
    assert ranks.run(_auto, 1.1, world_size=2, timeout=100) == [True, True]
    assert ranks.run(_auto, 0.9, world_size=2, timeout=100) == [False, False]


def _auto(first: float) -> bool:
    """Whether the whole model is there: with memory beside the states for 2.2 models, on rank 0 for ``2 * first``."""
    model = made()
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    engine = sf.Engine(model, layout="zero3", optimizer=ADAMW)
    left = 2 * whole * (1.1 if engine.rank else first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardfold.generation._running.memory_of", lambda device: engine.memory().held + left)
        running = Generation(engine, gather="auto")
    found = engine.memory().transient
    running.close()
    engine.close()
    return found >= whole


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["zero3", "ddp"])
def test_ranks_of_a_tensor_axis_say_the_same(ranks: Ranks, layout: str) -> None:
    """Heads and vocabulary are split: all ranks of the axis draw what one rank alone draws."""
    found = ranks.run(_split, layout, world_size=2, timeout=200)
    model = made()
    expected = {each.request: each.tokens for each in sf.generate(model, unequal(6, 20), max_tokens=9, seed=3)}
    assert found == [expected, expected]


def _split(layout: str) -> dict[int, list[int]]:
    engine = sf.Engine(made(), layout=layout, parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto"))
    found = {each.request: each.tokens for each in sf.generate(engine, unequal(6, 20), max_tokens=9, seed=3)}
    engine.close()
    return found


def test_an_axis_of_sequence_is_refused(ranks: Ranks) -> None:
    ranks.run(_refused, world_size=2, timeout=100)


def _refused() -> None:
    engine = sf.Engine(made(), layout="zero3", parallel={"sequence": 2})
    with pytest.raises(sf.errors.UsageError, match="axis of sequence"):
        sf.generate(engine, [[3]], max_tokens=1)
    engine.close()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_an_adapter_of_peft_generates() -> None:
    """Inside of peft's wrapper, under an engine: what merged weights give."""
    peft: Any = pytest.importorskip("peft")
    model = made()
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config).eval()
    expected = [alone(wrapped, prompt, 9) for prompt in unequal(5, 20)]
    engine = sf.Engine(wrapped, optimizer=ADAMW, layout="zero3")
    found = {each.request: each.tokens for each in sf.generate(engine, unequal(5, 20), max_tokens=9, temperature=0)}
    assert [found[number] for number in range(5)] == expected
    engine.close()
