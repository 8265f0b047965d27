"""States that leave the device between steps and come back."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from shardfold.engine._away import STATES
from shardfold.testing.simulated import is_supported, simulated
from tests.support.simulated import on_device
from tests.tiers.test_offload import make, train

pytestmark = pytest.mark.skipif(not is_supported(), reason="PyTorch lacks what the simulated device is made of")


def _held() -> int:
    gc.collect()
    return torch.get_device_module("sim").memory_allocated()


@pytest.mark.soak
@on_device(ranks=2)
def test_states_leave_the_device_and_come_back() -> None:
    """Of what a training under `zero3` holds on the device less than a tenth stays when all states leave; a step brings
    them back, losses are those of a training that nothing has left, and nothing is out of order."""
    options: dict[str, Any] = {"precision": "bf16", "device": "sim"}
    with simulated() as sim:
        other = make("zero3", **options)
        expected = train(other, 4)
        other.close()
        del other
        start = _held()
        engine = make("zero3", **options)
        losses = train(engine, 2)
        before = _held() - start
        engine._away.leave(STATES)
        away, tiers = _held() - start, engine.memory().tiers
        losses += train(engine, 2, first=2)
        after = _held() - start
        assert losses == expected
        assert away < before / 10 and tiers.get("device", 0) == 0
        assert after == pytest.approx(before, rel=0.05)
        assert set(engine.memory().tiers) == {"device"}
        sim.expect_clean()
        engine.close()
