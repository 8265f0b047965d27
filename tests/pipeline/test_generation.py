"""What a model gives comes from the last stage to all ranks: logits, and texts word by word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfold as sf
from shardfold.errors import UsageError
from shardfold.testing import Ranks
from tests.parallel.models import ADAM
from tests.pipeline.training import batches, compute, model_of, plain


def _logits(given: Any) -> Tensor:
    return given if isinstance(given, Tensor) else given.logits


def _gives(name: str, layout: str, order: str) -> None:
    engine = sf.Engine(
        model_of(name),
        optimizer=ADAM,
        layout=layout,
        parallel=sf.Parallel(mesh={"pipeline": 2}, pipeline=order),
        accumulate=2,
        clip_norm=0.1,
    )
    losses, norms, _, _ = plain(name, 2 * engine.data_ranks, 1)
    alone, module = model_of(name).eval(), engine.module.eval()
    tokens = batches(1, 1)[0][0][2 * engine.data_rank :][:2]
    more = {"use_cache": False} if name == "llama" else {}  # its cache is no tensor
    with torch.no_grad():
        for length in (3, 5):
            mine, expected = engine(tokens[:, :length], **more), alone(tokens[:, :length], **more)
            assert type(mine) is type(expected)
            torch.testing.assert_close(_logits(mine), _logits(expected), rtol=1e-12, atol=1e-12)
    if name == "llama":
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, **more}
        text = module.generate(tokens, **options)  # pyright: ignore[reportCallIssue]
        assert torch.equal(text, alone.generate(tokens, **options))  # pyright: ignore[reportCallIssue]
    module.train()
    mine = tuple(t.chunk(engine.data_ranks)[engine.data_rank] for t in batches(2 * engine.data_ranks, 1)[0])
    here = losses[0][2 * engine.data_rank :][:2]
    torch.testing.assert_close(engine.train_batch(mine, compute).item(), sum(here) / 2, rtol=1e-12, atol=0)
    torch.testing.assert_close(engine.step().grad_norm, norms[0], rtol=1e-12, atol=0)
    engine.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "layout", "order", "data"),
    [("llama", "zero3", "1f1b", 2), ("gpt-tied", "zero1", "zbv", 1),
     pytest.param("llama", "zero2", "interleaved:2", 1, marks=pytest.mark.soak)],
)  # fmt: skip
def test_what_the_model_gives_is_on_all_ranks(ranks: Ranks, name: str, layout: str, order: str, data: int) -> None:
    """Logits are one process's to 1e-12, texts are equal, and training goes on behind them."""
    ranks.run(_gives, name, layout, order, world_size=2 * data)


def _refused() -> dict[str, str]:
    engine, said = sf.Engine(model_of("llama"), layout="zero1", parallel={"pipeline": 2}), dict[str, str]()
    tokens, module = batches(1, 1)[0][0], engine.module.eval()
    calls: dict[str, Any] = {"cache": lambda: module(tokens, use_cache=True), "gradients": lambda: engine(tokens)}
    for name, call in calls.items():
        with torch.set_grad_enabled(name == "gradients"), pytest.raises(UsageError) as raised:
            call()
        said[name] = str(raised.value)
    with torch.no_grad():  # nothing is lost
        assert engine(tokens, use_cache=False).logits.isfinite().all()
    engine.close()
    return said


def test_what_cannot_come_from_the_last_stage_is_refused(ranks: Ranks) -> None:
    for said in ranks.run(_refused, world_size=2):
        assert "DynamicCache, which no stage can send: leave it out" in said["cache"]
        assert "inside of torch.no_grad(), engine(...) gives" in said["gradients"]
