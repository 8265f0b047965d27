"""What the engine offers, combined, on the simulated device: losses as on the CPU, no race, no wait in a step."""

from __future__ import annotations

import itertools

import pytest

from shardfold.testing import Ranks
from shardfold.testing.simulated import is_supported
from tests.support import device_cases
from tests.support.device_cases import CORE, OPTIONS, SINGLE, Case

pytestmark = pytest.mark.skipif(not is_supported(), reason="PyTorch lacks what the simulated device is made of")

MATRIX = device_cases.matrix()
LATE = {case.name: case for case in [*CORE, *SINGLE]}


@pytest.mark.sampled(22)
@pytest.mark.parametrize("case", CORE, ids=lambda case: case.name)
def test_the_same_training(case: Case, ranks: Ranks, sim_ranks: Ranks) -> None:
    """Losses are the CPU's, nothing is used out of order, no operation gets tensors of two devices, and the host waits
    for the device only where it is known to."""
    found, expected = device_cases.on_the_device(case, sim_ranks), device_cases.on_the_cpu(case, ranks)
    assert device_cases.differences(case, found, expected) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in MATRIX if name not in {case.name for case in CORE}])
def test_the_same_training_of_each_pair(name: str, ranks: Ranks, sim_ranks: Ranks) -> None:
    """So it is where each two options meet."""
    test_the_same_training(MATRIX[name], ranks, sim_ranks)


@pytest.mark.soak
@pytest.mark.parametrize("name", LATE)
def test_the_same_training_on_a_late_device(name: str, ranks: Ranks, sim_ranks: Ranks) -> None:
    """Losses do not depend on how far the device stays behind, nor on the order in which it takes its streams."""
    case = LATE[name]
    expected = device_cases.on_the_cpu(case, ranks)
    assert device_cases.lazy(case, expected, sim_ranks, seeds=[100]) == ""


@pytest.mark.soak
def test_what_other_ranks_used_is_asked_for_at_once(sim_ranks: Ranks) -> None:
    """Where gradients are whole, ``.grad`` of what this rank left out depends on the others: the host waits once for a
    unit that was left out, not once for each of its parameters."""
    found = device_cases.on_the_device(Case("ddp", optimizer="sgd", also="leaves_out"), sim_ranks)
    for outcome in found:
        assert outcome.waits
        assert all("sharding/shown.py" in what for what in outcome.waits)
        assert sum(outcome.waits.values()) <= device_cases.STEPS - device_cases.SETTLED


def test_each_two_options_meet() -> None:
    """For each two values that the engine takes together there is a case with both."""
    for (a, xs), (b, ys) in itertools.combinations(OPTIONS.items(), 2):
        for x, y in itertools.product(xs, ys):
            if device_cases.is_allowed({a: x, b: y}):
                assert any((getattr(case, a), getattr(case, b)) == (x, y) for case in MATRIX.values()), (a, x, b, y)


def test_names_tell_cases_apart() -> None:
    """No two cases have one name."""
    cases = {*CORE, *SINGLE, *MATRIX.values()}
    assert len({case.name for case in cases}) == len(cases)
