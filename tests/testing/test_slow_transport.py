"""A link without root that is slow or drops what it is given."""

from __future__ import annotations

from functools import partial
from time import monotonic

import pytest
import torch

import shardfold as sf
from shardfold.testing import Ranks
from shardfold.testing.slow_transport import SlowTransport
from tests.support import models


def _train(latency: float | None, drop: bool) -> tuple[list[float], float, str]:
    """Losses, seconds of the last step, and what was raised."""
    torch.manual_seed(0)
    engine = sf.Engine(
        models.small(), optimizer=partial(torch.optim.SGD, lr=0.1), layout=sf.PRESETS["zero3"].replace(reduce="int8"),
        runtime=sf.Runtime(patience=1.0, timeout=3.0),
    )  # fmt: skip
    slow = SlowTransport.around(engine, latency=latency, rate=1e9) if latency is not None else None
    losses: list[float] = []
    took, raised = 0.0, ""
    try:
        for number, batch in enumerate(models.batches(4)):
            begun = monotonic()
            if drop and number == 3 and slow is not None and engine.rank == 1:
                slow.drop_next()
            loss = engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            took = monotonic() - begun
    except sf.errors.ShardfoldError as error:
        raised = f"{type(error).__name__}: {error}"
    engine.close()
    return losses, took, raised


@pytest.mark.soak
def test_what_is_late_changes_nothing_but_the_time(ranks: Ranks) -> None:
    plain = ranks.run(_train, None, False, world_size=2)
    slow = ranks.run(_train, 0.02, False, world_size=2)
    for (losses, _, _), (same, took, raised) in zip(plain, slow, strict=True):
        assert same == losses and not raised
        assert took > 4 * 0.02  # gathers one behind another, at least: a bound that no load of the machine undercuts


@pytest.mark.soak
def test_what_is_dropped_is_told_of_on_every_rank(ranks: Ranks) -> None:
    for losses, _, raised in ranks.run(_train, 0.0, True, world_size=2):
        assert len(losses) == 3 and "rank 1" in raised, raised


@pytest.mark.parametrize("options", [{"latency": -1.0}, {"rate": 0.0}])
def test_what_is_no_link_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(sf.errors.ConfigError, match="seconds of 0 or more"):
        SlowTransport(None, **options)  # pyright: ignore
