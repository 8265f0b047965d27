"""`with simulated() as sim`: modes, what is told, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfold import torch_internals
from shardfold.errors import UsageError
from shardfold.testing import Ranks, run_ranks
from shardfold.testing.simulated import RacesFound, is_supported, simulated
from shardfold.torch_internals import INTERNALS, Internal
from tests.support.simulated import on_device


def _module() -> Any:
    return torch.get_device_module("sim")


def _race() -> None:
    x = torch.ones(4, device="sim")
    with _module().stream(_module().Stream()):
        x * 2


def test_unknown_modes_are_refused() -> None:
    """With the nearest name; nothing is installed for it."""
    with pytest.raises(UsageError, match="Did you mean 'check'"), simulated("chek"):
        pass
    with pytest.raises(UsageError, match="at least 1"), simulated("lazy", lag=0):
        pass
    for memory in ("64MiBs", 0, 1.5, True):
        with pytest.raises(UsageError, match="as in '64MiB'"), simulated(memory=memory):  # pyright: ignore[reportArgumentType]
            pass


def test_unknown_devices_of_ranks_are_refused() -> None:
    """Ranks have the CPU or the simulated device."""
    with pytest.raises(UsageError, match="device='cuda': ranks of a test"):
        Ranks(1, device="cuda")


def test_a_version_of_pytorch_without_its_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence names what is missing; nothing is changed in the process."""
    gone = Internal("torch._C._acc._gone", "a device", torch_internals.SIMULATED)
    monkeypatch.setattr(torch_internals, "INTERNALS", (*INTERNALS, gone))
    assert not is_supported()
    with pytest.raises(UsageError, match=r"has no torch\._C\._acc\._gone, of which the sim"), simulated():
        pass
    assert not hasattr(torch, "sim")


def _after_a_backward() -> list[str]:
    torch.ones(1, requires_grad=True).sum().backward()
    said = []
    for _ in range(2):
        try:
            with simulated():
                pass
        except UsageError as error:
            said.append(str(error))
    return said


@pytest.mark.skipif(not is_supported(), reason="PyTorch lacks what the simulated device is made of")
def test_a_process_that_has_run_a_backward_is_refused() -> None:
    """PyTorch has no thread for the device's backwards then: that is said at once, and each time."""
    (said,) = run_ranks(_after_a_backward, 1, distributed=False)
    assert len(said) == 2 and all("before the first backward of a process" in each for each in said)


@on_device()
def test_findings_are_taken_and_kept_quiet() -> None:
    """take() gives what was found and forgets it; inside of quiet() nothing is noted."""
    with simulated() as sim:
        _race()
        assert len(sim.races) == 1
        found = sim.take()
        assert len(found.races) == 1 and not sim.races
        sim.expect_clean()
        with sim.quiet():
            _race()
            torch.ones(1, device="sim").item()
        assert not sim.races and not sim.host_syncs


@on_device()
def test_blocks_are_apart() -> None:
    """Each block finds its own; tensors go from one to the next, and what was queued in one is over in the next."""
    with simulated("lazy", lag=100) as first:
        x = torch.ones(4, device="sim")
        with _module().stream(_module().Stream()):
            y = torch.full((4,), 3.0, device="sim").mul_(2)
        _race()
    with simulated() as second:
        assert (x + y).tolist() == [7.0] * 4
        second.expect_clean()
    assert len(first.races) == 1 and first.memory_peak > 0


@on_device()
def test_what_the_block_raises_is_raised() -> None:
    """And the device goes on behind it."""
    with pytest.raises(KeyError), simulated("lazy"):
        torch.ones(4, device="sim").add_(1)
        raise KeyError
    with simulated() as sim:
        assert torch.ones(2, device="sim").tolist() == [1.0, 1.0]
        sim.expect_clean()


@on_device()
def test_what_an_operation_raises_late_reaches_who_waits() -> None:
    """An index out of range is found when the device comes there: whoever waits for it next is told, with the line."""
    with simulated("lazy", lag=1000):
        x, index = torch.ones(4, 2, device="sim"), torch.tensor([9], pin_memory=True).to("sim", non_blocking=True)
        good = torch.zeros(1, dtype=torch.long, pin_memory=True).to("sim", non_blocking=True)
        x.index_select(0, good)  # from now on its shapes are known
        y = x.index_select(0, index)
        with pytest.raises((RuntimeError, IndexError), match=r"out of range|out of bounds"):
            y.sum().item()


@on_device()
def test_one_error_names_everything() -> None:
    """Races with both places and the advice, and how many there are."""
    with simulated() as sim:
        _race()
        with pytest.raises(RacesFound) as told:
            sim.expect_clean()
    text = str(told.value)
    assert isinstance(told.value, AssertionError)
    assert "1 race(s)" in text and "[unordered] read by mul on stream" in text and "after write by" in text
    assert "stream.wait_stream(other)" in text and text.count("test_simulation.py:") >= 2


def _collective_and_not() -> tuple[str, str]:
    with simulated() as sim:
        x = torch.ones(4, device="sim")
        work = dist.all_reduce(x, async_op=True)
        x * 2
        work.wait()
        _race()
        first, second = (race.advice for race in sim.races)
        return first, second


def test_the_advice_speaks_of_what_is_there(sim_ranks: Ranks) -> None:
    """Of the wait() of a collective only where one of both is a collective."""
    first, second = sim_ranks.run(_collective_and_not, world_size=2)[0]
    assert "the wait() of the collective" in first and "collective" not in second


@on_device()
def test_a_race_is_readable() -> None:
    """Its parts print what was used, where, and which bytes."""
    with simulated() as sim:
        _race()
        (race,) = sim.races
        assert repr(race.now).startswith("<read by mul on stream ") and repr(race.now).endswith(", bytes 0 to 16>")


@on_device()
def test_wrong_arguments_get_a_sentence() -> None:
    """Each names what was given and what is taken."""
    stream, sim = _module().Stream(), _module()
    wrong: dict[str, Any] = {
        "set_stream(3)": lambda: sim.set_stream(3),
        "wait_stream(None)": lambda: stream.wait_stream(None),
        "wait_event(None)": lambda: stream.wait_event(None),
        "device='sim:1'": lambda: torch.ones(2, device="sim:1"),
        "simulated(seed='a')": lambda: simulated(seed="a").__enter__(),  # type: ignore[arg-type]
    }
    for said, call in wrong.items():
        with pytest.raises(UsageError, match=re.escape(said)):
            call()
