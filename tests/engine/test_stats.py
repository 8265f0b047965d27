"""`engine.stats()`: times, rates, waiting and bytes as data, each held beside what it must be."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import shardfold as sf
from shardfold import accelerator
from shardfold.engine.peak_rate import PeakFlops, peak_of
from shardfold.engine.stats import Clock
from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from tests.support import models
from tests.support.options import grouped

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
LAYOUTS = list(sf.PRESETS)
DELAY = 0.05


def make(layout: str, **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = {"inter": 2, "intra": world // 2} if layout in ("hsdp", "hpz") and world % 2 == 0 else None
    return sf.Engine(models.small(), optimizer=ADAMW, **grouped(layout=layout, mesh=mesh, **options))


def backward(engine: sf.Engine, number: int = 0) -> None:
    tokens, targets = models.batches(number + 1)[number]
    engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in (tokens, targets))))


def test_before_anything_happened_nothing_is_made_up() -> None:
    stats = make("ddp").stats(peak_flops=1e12)
    assert (stats.steps, stats.skipped) == (0, 0)
    assert stats.step_seconds is stats.tokens_per_second is stats.samples_per_second is stats.mfu is None
    assert stats.exposed_seconds is None and stats.transient_peak is None
    numel = sum(p.numel() for p in models.small().parameters())
    assert stats.mfu_formula == f"(6 x {numel} trainable parameters) x tokens/s / 1e+12 peak FLOP/s"
    assert [line.split()[:2] for line in repr(stats).splitlines()] == [["Stats", "of"], ["at", "rest"]]
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.steps = 1  # type: ignore[misc]


def _after_steps(layout: str) -> tuple[sf.Stats, sf.MemoryReport, sf.TrafficReport, float]:
    engine = make(layout, accumulate=2)
    begin = time.perf_counter()
    for number in range(4):
        for _ in range(2):
            backward(engine, number)
            engine.step(tokens=100 + engine.rank, samples=12)
    comm = engine.sharded.comm
    before, sequence = comm.meter.asked, comm.agreement.sequence
    stats = engine.stats(peak_flops=1e9)
    assert (
        engine.sharded.comm.meter.asked == before and engine.sharded.comm.agreement.sequence == sequence
    )  # asking sends nothing
    answer = stats, engine.memory(), engine.traffic(), time.perf_counter() - begin
    engine.close()
    return answer


@pytest.mark.sampled(9)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rates_bytes_and_mfu_are_what_was_told_measured_and_held(ranks: Ranks, layout: str) -> None:
    answers = ranks.run(_after_steps, layout, world_size=4 if layout in ("hsdp", "hpz") else 2)
    for rank, (stats, memory, traffic, elapsed) in enumerate(answers):
        assert stats.steps == 4 and stats.skipped == 0
        assert stats.memory == memory and stats.traffic == traffic and stats.traffic.sent > 0
        assert stats.step_seconds is not None and 0 < stats.step_seconds < elapsed
        assert stats.exposed_seconds is not None and 0 < stats.exposed_seconds < elapsed
        # Rates are of this rank, over the same steps: micro-batches add up.
        assert stats.tokens_per_second == pytest.approx(2 * (100 + rank) / stats.step_seconds, rel=1e-9)
        assert stats.samples_per_second == pytest.approx(24 / stats.step_seconds, rel=1e-9)
        numel = sum(p.numel() for p in models.small().parameters())
        assert stats.mfu == pytest.approx(6 * numel * stats.tokens_per_second / 1e9)
        assert stats.mfu_formula == (
            f"(6 x {numel} trainable parameters) x {stats.tokens_per_second:.6g} tokens/s / 1e+09 peak FLOP/s"
        )


def test_what_is_known_is_shown_in_a_few_short_lines() -> None:
    engine = make("ddp")
    for number in range(3):
        backward(engine, number)
        engine.step(tokens=100)
    stats = engine.stats(peak_flops=1e9)
    head, *rows = repr(stats).splitlines()
    assert head == "Stats of 3 steps"
    assert [row[2:20].strip() for row in rows] == ["a step", "of it waiting", "tokens/s", "MFU", "at rest"]
    assert f"{stats.mfu:.1%} = {stats.mfu_formula}" in rows[3] and max(map(len, rows)) <= 120
    engine.close()


GPU = {"compute": "bf16"}, {"autocast": "fp16"}, {"compute": "fp32"}, {"compute": "fp32", "tf32": False}


def test_the_peak_of_a_device_is_its_makers_or_its_own_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the dtype of products; of fp32 only where they cannot run in TF32. Of a CPU nothing is printed."""
    policies = [sf.Precision(**each) for each in GPU]  # type: ignore[arg-type]
    device = torch.device("cpu")
    assert [peak_of(None, device, each).flops for each in policies] == [None] * 4
    monkeypatch.setattr(accelerator, "product", lambda _: "NVIDIA H100 80GB HBM3")
    assert [peak_of(None, device, each).flops for each in policies] == [989e12, 989e12, None, 67e12]
    assert str(peak_of(None, device, policies[0])) == "9.89e+14 peak FLOP/s (H100, bf16)"
    profile = tmp_path / "machine.json"
    profile.write_text('{"name": "mine", "memory": 1, "flops": {"bf16": 2e9, "fp32": 1e9}, "bandwidth": 1}')
    assert [peak_of(profile, device, each).flops for each in policies] == [2e9, 1e9, 1e9, 1e9]
    with pytest.raises(ConfigError, match=r"peak_flops='.*none.json', which is no file.*the file of a profile"):
        peak_of(str(tmp_path / "none.json"), device, policies[0])
    profile.write_text("2e9")
    with pytest.raises(ConfigError, match="is not a profile of a machine"):
        peak_of(profile, device, policies[0])


class Late:
    """What a collective that comes late looks like to whoever waits for it; ``took``: a busy machine sleeps longer."""

    took = 0.0

    def wait(self, timeout: Any = None) -> None:
        begin = time.perf_counter()
        time.sleep(DELAY)
        self.took = time.perf_counter() - begin


def test_a_delay_of_50_ms_in_a_wait_is_exposed_communication() -> None:
    engine = make("zero3")
    works = [Late() for _ in range(9)]
    for number, work in enumerate(works):
        backward(engine, number)
        engine.sharded.comm.agreement.wait(work)
        engine.step()
    exposed = engine.stats().exposed_seconds
    assert exposed is not None and exposed >= DELAY
    assert exposed == pytest.approx(median(work.took for work in works), rel=0.1)


def _one_rank_is_late(layout: str) -> tuple[float, float]:
    engine = make(layout)
    for number in range(6):
        if engine.rank == 1:
            time.sleep(DELAY)  # a slow reader of data, as the others see it
        backward(engine, number)
        engine.step()
    stats = engine.stats()
    engine.close()
    assert stats.exposed_seconds is not None and stats.step_seconds is not None
    return stats.exposed_seconds, stats.step_seconds


@pytest.mark.sampled(9)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_wait_for_a_late_one_report_it(ranks: Ranks, layout: str) -> None:
    answers = ranks.run(_one_rank_is_late, layout, world_size=2)
    exposed, step = answers[0]
    assert 0.9 * DELAY < exposed < step  # the wait is part of the step, and little else was waited for


def _clip_waits() -> float:
    """The norm's reduction is waited for in the same place as all others."""
    engine = make("zero1", clip_norm=1.0)
    backward(engine)
    before, sequence = engine.sharded.comm.agreement.waited, engine.sharded.comm.agreement.sequence
    engine._runner.handlers.norms.take()
    waited = engine.sharded.comm.agreement.waited - before
    assert engine.sharded.comm.agreement.sequence >= sequence
    engine.close()
    return waited


def test_every_wait_is_counted_in_one_place(ranks: Ranks) -> None:
    assert min(ranks.run(_clip_waits, world_size=2)) > 0


def test_laps_add_up_and_medians_forget_the_first_and_the_old() -> None:
    clock = Clock(waited=5.0)
    clock.told(10, None)
    clock.told(5, 2)
    clock.end_step(5.25)
    assert clock.step_seconds is None and clock.exposed_seconds == 0.25
    assert clock.tokens_per_second is None  # a first step has no beginning
    for i in range(60):
        clock.told(None, 3)
        clock.end_step(5.25 + 0.5 * (i + 1), skipped=i == 7)
    assert clock.exposed_seconds == 0.5 and clock.skipped == 1
    assert clock.tokens_per_second is None  # nobody told since
    assert clock.samples_per_second is not None and clock.step_seconds is not None
    assert clock.samples_per_second == pytest.approx(3 / clock.step_seconds, rel=0.5)


def test_a_token_costs_what_counting_every_multiplication_gives() -> None:
    """6 FLOPs per trainable parameter and 4 per frozen one, against PyTorch's own counter in a model whose frozen layer
    stands between trainable ones, so that its input needs a gradient too."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    model[2].requires_grad_(False)
    x = torch.randn(7, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    frozen = 64
    trainable = sum(p.numel() for p in model.parameters()) - frozen
    clock = Clock()
    clock.end_step(0.0)
    clock.told(7, None)
    clock.end_step(0.0)
    rate = clock.tokens_per_second
    assert rate is not None
    utilization, _ = clock.mfu(trainable, frozen, PeakFlops(1e9))
    assert utilization == pytest.approx(counter.get_total_flops() / 7 * rate / 1e9, rel=1e-12)


def test_frozen_parameters_cost_less_and_wrong_numbers_are_refused() -> None:
    engine = sf.Engine(models.frozen(), optimizer=ADAMW)
    frozen = sum(p.numel() for p in engine.module.parameters() if not p.requires_grad)
    assert f"+ 4 x {frozen} frozen parameters)" in engine.stats().mfu_formula
    with pytest.raises(ConfigError, match="peak_flops=0"):
        engine.stats(peak_flops=0)
    backward(engine)
    with pytest.raises(ConfigError, match="tokens=-1"):
        engine.step(tokens=-1)
    assert engine.step(tokens=1).updated
