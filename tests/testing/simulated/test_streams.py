"""Streams, events and the device's module, under the names that programs use."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from shardfold.errors import UsageError
from shardfold.testing.simulated import simulated
from shardfold.testing.simulated.clocks import Moment
from shardfold.testing.simulated.queues import Lagging
from tests.support.simulated import on_device


def _module() -> Any:
    return torch.get_device_module("sim")


@on_device()
def test_streams_nest() -> None:
    """Inside of `with stream` it is the current one; behind it, what was current before."""
    with simulated():
        default, one, two = _module().default_stream(), _module().Stream(), _module().Stream()
        assert _module().current_stream() == default and len({default, one, two}) == 3
        with _module().stream(one):
            assert _module().current_stream() == one
            with two, _module().stream(None):
                assert _module().current_stream() == two
            assert _module().current_stream() == one
        assert _module().current_stream() == default


@on_device()
def test_streams_and_events_are_those_of_pytorch() -> None:
    """torch.Stream and torch.Event make ones of the device, and torch.accelerator speaks of it."""
    with simulated() as sim:
        stream, event = torch.Stream("sim"), torch.Event("sim")
        assert isinstance(stream, torch.Stream) and isinstance(event, torch.Event)
        assert isinstance(_module().Stream(), torch.Stream)
        assert stream != torch.Stream() and stream.device == torch.device("sim", 0)
        assert torch.accelerator.current_accelerator() == torch.device("sim")
        assert torch.accelerator.current_stream() == _module().default_stream()
        x = torch.ones(4, device="sim")
        event.record()
        stream.wait_event(event)
        with stream:
            x.add_(1)
        torch.accelerator.current_stream().wait_stream(stream)
        x.add_(1)
        torch.accelerator.synchronize()
        sim.expect_clean()


@on_device()
def test_a_device_that_lags_is_asked() -> None:
    """query() is False until the device has come there; synchronize() waits; so does elapsed_time's order."""
    with simulated("lazy", lag=10_000):
        begin, end = _module().Event(enable_timing=True), _module().Event(enable_timing=True)
        begin.record()
        x = torch.ones(4, device="sim")
        x.add_(1)
        end.record()
        end.synchronize()
        assert begin.query() and end.query() and _module().current_stream().query()
        assert begin.elapsed_time(end) >= 0.0
        with pytest.raises(UsageError, match="enable_timing=True"):
            begin.elapsed_time(_module().Event())


def test_a_thread_that_waits_for_a_device_that_ended_is_told() -> None:
    """What it waits for will never be; it used to wait for ever."""
    queues, never, asked = Lagging(0, 64, failed=lambda error: None), Moment({}), Moment({})
    queues.wait(0, never)
    queues.record(0, asked)
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(RuntimeError) as error:
            queues.until(asked)
        said.append(str(error.value))

    thread = threading.Thread(target=wait)
    thread.start()
    queues.close()
    thread.join()
    assert "does nothing any more" in said[0]


@on_device()
def test_an_event_that_was_not_recorded_orders_nothing() -> None:
    """Waiting for it returns, as on CUDA."""
    with simulated() as sim:
        event = _module().Event()
        assert event.query()
        event.wait()
        event.synchronize()
        sim.expect_clean()


@on_device()
def test_there_is_one_device() -> None:
    """Another index is refused."""
    with simulated():
        assert _module().device_count() == 1 and _module().current_device() == 0 and _module().is_available()
        _module().set_device("sim:0")
        with _module().device(0):
            pass
        with pytest.raises(UsageError, match="one simulated device"):
            _module().set_device(1)


@pytest.mark.parametrize("mode", ["check", "lazy"])
@pytest.mark.parametrize("what", ["event", "stream"])
@on_device()
def test_what_the_host_has_seen_done_is_in_order(what: str, mode: str) -> None:
    """A query that says True orders what the host queues from then on behind it, as a wait would."""
    with simulated(mode, lag=100) as sim:
        side = torch.sim.Stream()  # type: ignore[attr-defined]
        with torch.sim.stream(side):  # type: ignore[attr-defined]
            x = torch.ones(4, device="sim")
            event = side.record_event()
        while not (event if what == "event" else side).query():
            time.sleep(0.001)  # the device goes on by itself meanwhile
        x * 2
        sim.expect_clean(may_wait=False)
