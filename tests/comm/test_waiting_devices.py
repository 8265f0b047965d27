"""Where collectives are queued on a device, the host runs on: what happens when another rank does not come to them."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfold as sf
from shardfold import accelerator
from shardfold.comm import mesh
from shardfold.comm.backend import start_group
from shardfold.errors import ConfigError, ShardfoldError
from shardfold.testing import run_ranks
from shardfold.testing.simulated import is_supported, simulated
from shardfold.torch_internals import default_store
from tests.support.simulated import AdamW, Block, Gpt

pytestmark = pytest.mark.skipif(not is_supported(), reason="PyTorch lacks what the simulated device is made of")

MODES = pytest.mark.parametrize("mode", ["check", "lazy"])
LIMIT = 100.0  # seconds: far less than the collectives may take, far more than a rank needs to hear of it


class OutOfMemory(Exception):
    """As one rank raises it, somewhere."""


def _raise(*_: Any) -> None:
    raise OutOfMemory("no memory for this batch")


def _train(mode: str, then: str) -> str:
    """Rank 0 raises in the middle of the second forward, and does something else ``then``. Rank 1 goes on, and reads
    its loss."""
    rank, store = dist.get_rank(), default_store()
    with simulated(mode, rank, 5000):
        torch.manual_seed(7)
        model = Gpt()
        engine = sf.Engine(
            model, optimizer=AdamW, layout="zero3", runtime=sf.Runtime(device="sim"), init=sf.Init(units=[Block])
        )
        ids = torch.ones(2, 8, dtype=torch.long, device="sim")
        engine.backward(engine(ids).square().mean())
        engine.step()
        try:
            if rank == 0:
                hook = model.blocks[0].register_forward_pre_hook(_raise)
                try:
                    engine(ids)
                except OutOfMemory:
                    hook.remove()
                if then == "leaves":
                    engine.close()
                    return "left"
                if then == "exits":
                    for each in list(mesh._PROCESS.open):
                        each.farewell()
                    store.wait(["told"], timedelta(seconds=LIMIT))  # its connections stay, as those of a GPU would
                    return "left"
                engine.reset()
                engine(ids).square().mean().item()  # the next batch
                return "trained on"
            loss = engine(ids).square().mean()
            value = loss.item()  # the device never comes here
            engine.backward(loss)
            engine.step()
            return f"trained on with {value}"
        except ShardfoldError as error:
            store.set("told", "")
            return f"{type(error).__name__}: {error}"
        finally:
            engine.close()


@pytest.mark.sampled(2)
@MODES
def test_a_rank_that_raised_and_goes_on_ends_the_others_wait(mode: str) -> None:
    """It is behind by a part of a pass: every rank raises what each was about to do, with nobody left in a kernel."""
    for said in run_ranks(_train, 2, mode, "goes on", device="sim", timeout=LIMIT):
        assert said.startswith("OrderError: "), said
        assert "operation" in said and "forward" in said


@pytest.mark.sampled(2)
@MODES
def test_a_rank_that_left_ends_the_others_wait(mode: str) -> None:
    """The others hear which one left, and after which operation, while their host waits for the device."""
    left, said = run_ranks(_train, 2, mode, "leaves", device="sim", timeout=LIMIT)
    assert left == "left"
    assert "rank 0 " in said and "has closed its engine" in said, said


@pytest.mark.soak
def test_a_device_that_waits_for_a_rank_that_ended_is_woken() -> None:
    """The host of the other rank is in ``loss.item()``, where no exception can reach it: the watchdog ends what the
    device waits in, and the sentence is raised there."""
    left, said = run_ranks(_train, 2, "lazy", "exits", device="sim", timeout=LIMIT)
    assert left == "left"
    assert said.startswith("OrderError: ") and "rank 0 left after operation" in said, said


def _starts(path: str, shared: bool) -> str:
    """Ranks that see one device each, number 0 for both."""
    rank = int(os.environ["RANK"])
    if shared:
        accelerator.identity = lambda device: "the same"
    try:
        start_group(torch.device("sim", 0), timedelta(seconds=60), init_method=path, rank=rank, world_size=2)
    except ConfigError as error:
        return str(error)
    with simulated():
        engine = sf.Engine(
            Gpt(depth=1), optimizer=AdamW, layout="zero3", runtime=sf.Runtime(device="sim"), init=sf.Init(units=[Block])
        )
        try:
            engine.backward(engine(torch.ones(2, 8, dtype=torch.long, device="sim")).square().mean())
            engine.step()
            return str(dist.get_backend_config())
        finally:
            engine.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shared", [False, True])
def test_ranks_with_a_device_each_are_told_from_ranks_that_share_one(shared: bool, tmp_path: Path) -> None:
    """By what identifies a device: its number is the same where each process sees only its own."""
    said = run_ranks(_starts, 2, f"file://{tmp_path}/store", shared, device="sim", distributed=False, timeout=LIMIT)
    if shared:
        assert all(text.startswith("ranks 0 and 1 share one device, sim:0") and "simccl" in text for text in said)
    else:
        assert said == ["sim:simccl"] * 2
