"""Seconds that slower tiers take of a step, by a clock that only a drive moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.plan.report import TierSeconds
from shardfold.testing.simulated import is_supported, simulated
from shardfold.tiers import waits
from shardfold.tiers._drive import Drive
from tests.support.simulated import on_device
from tests.tiers.test_offload import make, train

NOTHING = TierSeconds()


class SlowDrive:
    """Reads, each a second, begin when somebody waits: whoever reads the clock does, or is about to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.asked, self._read = 0.0, Event(), Drive.read
        monkeypatch.setattr(waits, "perf_counter", self.clock)
        slow = self

        def read(drive: Drive, *args: Any) -> None:
            assert slow.asked.wait(60)
            slow._read(drive, *args)
            slow.now += 1.0

        monkeypatch.setattr(Drive, "read", read)

    def clock(self) -> float:
        self.asked.set()
        return self.now


def _report(engine: sf.Engine) -> sf.StepReport:
    engine.backward(engine(*(t.to(engine.device) for t in _batch())))
    return engine.step()


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)


@pytest.fixture
def engines() -> Iterator[list[sf.Engine]]:
    made: list[sf.Engine] = []
    yield made
    for engine in made:
        engine.close()


def test_a_slow_disk_is_waited_for_and_nothing_else(monkeypatch: pytest.MonkeyPatch, engines: list[sf.Engine]) -> None:
    """Seconds in which moments are read are `disk`'s, whatever the rest of the step does; the update is on the device,
    so the host updates for none."""
    engines.append(engine := make("ddp", offload={"moments": "disk"}))
    train(engine, 1)
    assert engine._updater is not None
    for region in engine._updater.regions():
        region.flush()  # type: ignore[attr-defined]  # what is still in memory is not read
    slow = SlowDrive(monkeypatch)
    found = _report(engine).tiers
    assert found.disk >= 1.0 and found == TierSeconds(disk=found.disk)
    assert slow.now >= found.disk


def test_the_host_updates_what_rests_there(monkeypatch: pytest.MonkeyPatch, engines: list[sf.Engine]) -> None:
    """Each of the updates takes a tick of a clock that ticks when it is asked, and on the CPU nothing is on its way."""
    engines.append(engine := make("zero2", offload="host"))
    ticks = iter(range(10**6))
    monkeypatch.setattr(waits, "perf_counter", lambda: float(next(ticks)))
    units = len([unit for unit in engine.units if unit.trainable])
    assert [_report(engine).tiers for _ in range(2)] == [TierSeconds(update=units)] * 2
    assert engine.stats().tiers == TierSeconds(update=units)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_without_slower_tiers_nothing_is_waited_for(engines: list[sf.Engine], options: Mapping[str, Any]) -> None:
    """The report has all of them, each 0; so it is of a micro-batch that is not the last."""
    engines.append(engine := make("zero2", **options))
    assert _report(engine).tiers == NOTHING
    assert engine.stats().tiers == NOTHING


@pytest.mark.skipif(not is_supported(), reason="PyTorch lacks what the simulated device is made of")
@on_device()
def test_the_host_waits_for_what_comes_from_a_device() -> None:
    """Sums that are on their way to their update are waited for as `host`'s, and not as the update's."""
    ticks = iter(range(10**6))
    with pytest.MonkeyPatch.context() as patch, simulated():
        patch.setattr(waits, "perf_counter", lambda: float(next(ticks)))
        engine = make("zero2", offload="host", optimizer=partial(torch.optim.SGD, lr=0.1), device="sim")
        found, units = _report(engine).tiers, len([unit for unit in engine.units if unit.trainable])
        # Inside of each update the clock is read twice, for what it waits for: one tick of three is not the update's.
        assert found.host >= units and found.update == 2 * units and found.disk == 0.0
        engine.close()


@pytest.mark.skipif(not is_supported(), reason="PyTorch lacks what the simulated device is made of")
@on_device()
def test_the_clip_coefficient_is_read_once_per_step() -> None:
    """However many units the host updates: where gradients rest on the device, the norm is there, and the host waits
    once for what it multiplies them by."""
    with simulated() as sim:
        engine = make("zero2", offload={"optimizer": "host"}, clip_norm=0.05, device="sim")
        _report(engine)
        sim.take()
        _report(engine)
        places = ("engine/_norms.py", "optim/")
        reads = sum(n for (_, at), n in sim.take().host_syncs.items() if any(place in at for place in places))
        assert reads == 1 < len(engine.units)
        engine.close()
