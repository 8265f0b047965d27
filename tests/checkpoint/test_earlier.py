"""Checkpoints that were written before the code changed load, and the run goes on as it did then."""

from __future__ import annotations

import pytest
import torch

import shardfold as sf
from shardfold.checkpoint.verify import verify
from shardfold.testing import Ranks
from tests.support.earlier import CASES, FOLDER, RANKS, expected, go_on

#: What reads a sum of several elements, or a root: another processor adds and rounds in another way.
SUMS = 1e-6


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", list(CASES))
def test_what_was_written_then_loads_and_goes_on(ranks: Ranks, name: str) -> None:
    """Weights, moments and averages are those that the run had, to the last bit, and two steps later those that it
    came to within fp32's rounding: processors with the same vector unit differ in the last bit."""
    then = expected(name)
    for found in ranks.run(go_on, name, str(FOLDER), world_size=RANKS):
        assert found.keys() == then.keys()
        for key, value in found.items():
            if key.startswith("before/"):
                assert torch.equal(value, then[key]), key
            else:
                torch.testing.assert_close(value, then[key], rtol=SUMS, atol=SUMS)


@pytest.mark.parametrize("name", list(CASES))
def test_what_was_written_then_is_whole(name: str) -> None:
    """Every byte has its checksum and every element is there once; read without an engine it is what was saved."""
    found = verify(FOLDER / name)
    assert found.ok, found.damage
    then = expected(name)
    with sf.Checkpoint(FOLDER / name) as checkpoint:
        for parameter in checkpoint.parameters:
            for state in checkpoint.states(parameter):
                key = f"before/{state}/{'module.' * (state == 'average')}{parameter}"  # as in an AveragedModel
                assert torch.equal(checkpoint.read(parameter, state), then[key].view(-1)), key
