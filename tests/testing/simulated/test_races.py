"""Known races are reported with both lines, and show in numbers; the same programs in order are clean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardfold.testing.simulated import RacesFound, simulated
from tests.support.simulated import line_of, on_device


def _module() -> Any:
    return torch.get_device_module("sim")


def _work(x: torch.Tensor) -> torch.Tensor:
    """So much that a device that lags is not done when the next line runs."""
    for _ in range(12):
        x = x + 1
    return x


# -- one program per kind of race; `ordered` puts it right. Each gives (what it computed, what is right). ------------


def read_too_early(ordered: bool) -> tuple[torch.Tensor, float]:
    side = _module().Stream()
    x = _work(torch.zeros(8, device="sim"))
    y = x * 2  # read_too_early: before
    if ordered:
        side.wait_stream(_module().current_stream())
    with _module().stream(side):
        z = y + 1  # read_too_early: now
    _module().current_stream().wait_stream(side)
    return z, 25.0


def overwritten_too_early(ordered: bool) -> tuple[torch.Tensor, float]:
    side = _module().Stream()
    x = torch.ones(8, device="sim")
    side.wait_stream(_module().current_stream())
    with _module().stream(side):
        busy = _work(torch.zeros(8, device="sim"))
        z = x + busy  # overwritten_too_early: before
        read = side.record_event()
    if ordered:
        read.wait()
    x.zero_()  # overwritten_too_early: now
    _module().current_stream().wait_stream(side)
    return z, 13.0


def written_twice(ordered: bool) -> tuple[torch.Tensor, float]:
    side = _module().Stream()
    x = torch.zeros(8, device="sim")
    side.wait_stream(_module().current_stream())
    with _module().stream(side):
        busy = _work(torch.zeros(8, device="sim"))
        x.copy_(busy)  # written_twice: before
    if ordered:
        _module().current_stream().wait_stream(side)
    x.fill_(3.0)  # written_twice: now
    _module().current_stream().wait_stream(side)
    return x, 3.0


def freed_and_used(ordered: bool) -> tuple[torch.Tensor, float]:
    x = torch.ones(8, device="sim")
    storage = x.untyped_storage()
    if ordered:
        z = x * 2
        storage.resize_(0)
    else:
        storage.resize_(0)
        z = x * 2  # freed_and_used: now
        storage.resize_(32)
    return z, 2.0


def dropped_too_early(ordered: bool) -> tuple[torch.Tensor, float]:
    side = _module().Stream()
    x = torch.ones(8, device="sim")
    side.wait_stream(_module().current_stream())
    with _module().stream(side):
        busy = _work(torch.zeros(8, device="sim"))
        z = x + busy  # dropped_too_early: before
    if ordered:
        x.record_stream(side)
    del x  # its memory may be given to anyone who allocates on the current stream
    torch.zeros(8, device="sim")  # dropped_too_early: now
    _module().current_stream().wait_stream(side)
    return z, 13.0


def refilled_too_early(ordered: bool) -> tuple[torch.Tensor, float]:
    side = _module().Stream()
    x = torch.ones(8, device="sim")
    side.wait_stream(_module().current_stream())
    with _module().stream(side):
        busy = _work(torch.zeros(8, device="sim"))
        z = x + busy  # refilled_too_early: before
    if ordered:
        _module().current_stream().wait_stream(side)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(32)
    x.fill_(5.0)  # refilled_too_early: now
    _module().current_stream().wait_stream(side)
    return z, 13.0


def pinned_copy_read_too_early(ordered: bool) -> tuple[torch.Tensor, float]:
    out, back = _module().Stream(), _module().Stream()
    host = torch.zeros(8, pin_memory=True)
    x = _work(torch.zeros(8, device="sim"))
    out.wait_stream(_module().current_stream())
    with _module().stream(out):
        host.copy_(x, non_blocking=True)  # pinned_copy_read_too_early: before
        gone = out.record_event()
    x.record_stream(out)
    if ordered:
        back.wait_event(gone)
    with _module().stream(back):
        z = host.to("sim", non_blocking=True)  # pinned_copy_read_too_early: now
    _module().current_stream().wait_stream(back)
    _module().current_stream().wait_stream(out)
    return z, 12.0


KINDS: dict[Callable[[bool], tuple[torch.Tensor, float]], str] = {
    read_too_early: "unordered",
    overwritten_too_early: "unordered",
    written_twice: "unordered",
    freed_and_used: "freed",
    dropped_too_early: "reused",
    refilled_too_early: "reused",
    pinned_copy_read_too_early: "unordered",
}
NAMES = [program.__name__ for program in KINDS]
PROGRAMS = {program.__name__: program for program in KINDS}


@pytest.mark.parametrize("name", NAMES)
@on_device()
def test_a_race_is_reported_with_both_lines(name: str) -> None:
    """The report names the line of the later use, that of the earlier one, the kind, and what to do."""
    with simulated() as sim:
        PROGRAMS[name](False)
        races = [race for race in sim.races if race.kind == KINDS[PROGRAMS[name]]]
        assert races, sim.races
        with pytest.raises(RacesFound) as told:
            sim.expect_clean()
    now, before = races[0].sites
    assert now.startswith(f"tests/testing/simulated/test_races.py:{line_of(__file__, name + ': now')}")
    if races[0].before is not None:
        assert before.startswith(f"tests/testing/simulated/test_races.py:{line_of(__file__, name + ': before')}")
    assert now in str(told.value) and before in str(told.value) and races[0].advice in str(told.value)


@pytest.mark.parametrize("name", NAMES)
@on_device()
def test_the_same_in_order_is_clean(name: str) -> None:
    """With the missing wait in its place nothing is reported, and the numbers are right in both modes."""
    for mode, seed in (("check", 0), ("lazy", 1), ("lazy", 2)):
        with simulated(mode, seed=seed, lag=1000) as sim:
            value, right = PROGRAMS[name](True)
            with sim.quiet():
                assert value.tolist() == [right] * 8, mode
            sim.expect_clean()


@pytest.mark.parametrize("name", NAMES)
@on_device()
def test_a_race_shows_in_the_numbers_of_a_device_that_lags(name: str) -> None:
    """Some legal order gives another result than the one that was meant."""
    wrong = 0
    for seed in range(16):
        with simulated("lazy", seed=seed, lag=1000):
            value, right = PROGRAMS[name](False)
            wrong += value.tolist() != [right] * 8
    assert wrong


@on_device()
def test_numbers_are_right_when_a_race_is_only_looked_for() -> None:
    """In the mode `check` operations run as they are queued, whatever is missing between streams."""
    with simulated():
        for program in KINDS:
            value, right = program(False)
            if program is not freed_and_used:
                assert value.tolist() == [right] * 8


@on_device()
def test_each_pair_of_places_is_reported_once() -> None:
    """A race in a loop is one race."""
    with simulated() as sim:
        for _ in range(5):
            read_too_early(False)
        assert len(sim.races) == 1


@on_device()
def test_other_bytes_of_the_same_memory_are_no_race() -> None:
    """Two streams may write to two halves of one tensor."""
    side = _module().Stream()
    with simulated() as sim:
        x = torch.zeros(8, device="sim")
        side.wait_stream(_module().current_stream())
        with _module().stream(side):
            x[:4].fill_(1.0)
        x[4:].fill_(2.0)
        sim.expect_clean()


@on_device()
def test_interleaved_bytes_are_no_race() -> None:
    """Nor is it one to write to every other element, or to one column each."""
    side = _module().Stream()
    with simulated() as sim:
        x = torch.zeros(4, 2, device="sim")
        side.wait_stream(_module().current_stream())
        with _module().stream(side):
            x[:, 0].fill_(1.0)
        x[:, 1].fill_(2.0)
        assert not sim.races
        x[::2].fill_(3.0)
        assert len(sim.races) == 1, sim.races


@on_device()
def test_two_readers_are_no_race() -> None:
    """Streams may read the same memory in any order."""
    side = _module().Stream()
    with simulated() as sim:
        x = torch.zeros(8, device="sim")
        side.wait_stream(_module().current_stream())
        with _module().stream(side):
            y = x + 1
        z = x + 2
        sim.expect_clean()
        del y, z


@on_device()
def test_the_host_that_waits_orders_everything() -> None:
    """What the host has waited for is over for all streams."""
    side = _module().Stream()
    with simulated() as sim:
        x = torch.zeros(8, device="sim")
        _module().synchronize()
        with _module().stream(side):
            x.add_(1)
            done = side.record_event()
        done.synchronize()
        assert x.sum().item() == 8.0
        sim.expect_clean()


@on_device()
def test_waits_are_transitive() -> None:
    """A stream that waits for one that has waited is behind both."""
    one, two = _module().Stream(), _module().Stream()
    with simulated() as sim:
        x = torch.zeros(8, device="sim")
        one.wait_stream(_module().current_stream())
        two.wait_stream(one)
        with _module().stream(two):
            x.add_(1)
        sim.expect_clean()


@on_device()
def test_an_event_orders_what_was_queued_before_it_only() -> None:
    """What comes after record() is not waited for."""
    side = _module().Stream()
    with simulated() as sim:
        x = torch.zeros(8, device="sim")
        made = _module().current_stream().record_event()
        x.add_(1)
        side.wait_event(made)
        with _module().stream(side):
            x.mul_(2)
        assert [race.kind for race in sim.races] == ["unordered"]


@on_device()
def test_waits_of_the_host_are_counted_with_their_lines() -> None:
    """Reading a value, copies of pageable memory, shapes that depend on values, and synchronize()."""
    with simulated() as sim:
        x = torch.ones(4, device="sim")
        sim.expect_clean(may_wait=False)
        x.sum().item()  # item
        x.cpu()
        torch.ones(4).to("sim")
        x.nonzero()
        _module().synchronize()
        whats = [what for what, _ in sim.host_syncs]
        assert whats == ["item", "copy to the host", "copy from the host", "nonzero", "device.synchronize"]
        assert any(f"test_races.py:{line_of(__file__, 'item')}" in where for _, where in sim.host_syncs)
        pinned = torch.ones(4, pin_memory=True)
        before = sum(sim.host_syncs.values())
        pinned.to("sim", non_blocking=True)
        assert sum(sim.host_syncs.values()) == before
        sim.expect_clean()
        with pytest.raises(RacesFound, match="waits of the host for the device"):
            sim.expect_clean(may_wait=False)


@on_device()
def test_tensors_of_two_devices_are_refused_as_on_a_gpu() -> None:
    """An operation on tensors of the CPU and of the device raises; what the device refused is noted with its line."""
    with simulated() as sim:
        x, weight = torch.ones(4, device="sim"), torch.ones(8, 4, device="sim")
        with pytest.raises(RuntimeError, match=r"same device|one device"):
            x + torch.ones(4)
        with pytest.raises(RuntimeError, match="found sim:0 and cpu"):
            torch.nn.functional.embedding(torch.zeros(2, dtype=torch.long), weight)  # mixed
        assert [what for what, _ in sim.mixed] == ["index_select"]
        with pytest.raises(RacesFound, match=f"test_races.py:{line_of(__file__, 'mixed')}"):
            sim.expect_clean()
        assert (x * 2 + torch.tensor(1.0)).tolist() == [3.0] * 4  # a single number may be the CPU's
