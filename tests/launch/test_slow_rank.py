"""A host that gets slow, or its link, among real ones: what steps say of it, and how work moves away from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardfold.launch.namespaces import why_not
from shardfold.testing import Ranks
from tests.launch.slow_rank import GROUPS, HOSTS, KINDS, SOON, Slowed, apart, found_in, innocent, judged, pace_of, plain

REASON = why_not()
pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.timeout(900)]


@pytest.mark.parametrize("kind", [*KINDS, "quota", "quick quota"])
def test_who_gets_slow_is_named_soon_and_by_what(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Each host in turn makes steps 1.3 times as long: it is named, or its link, and nobody else."""
    case = Slowed(kind, HOSTS)
    if case.quota and not os.access(GROUPS, os.W_OK):
        pytest.skip("there are no control groups of the first kind for processors here")
    ((log, hosts),) = ranks.run(judged, case, str(tmp_path), world_size=1, distributed=False, timeout=600.0)
    found = [*found_in(case, log, hosts)]
    assert all(right and behind is not None and behind <= SOON for behind, _, right in found), found
    assert not innocent(case, log)


def test_work_moves_away_from_a_host_that_is_half_as_fast(ranks: Ranks, tmp_path: Path) -> None:
    """From the 20th step on ranks have 0.83 of the pace that they could have, with the losses of plain PyTorch."""
    ((log, _),) = ranks.run(judged, Slowed("moves"), str(tmp_path), world_size=1, distributed=False, timeout=600.0)
    part, passes = pace_of(log)
    assert part >= 0.83, passes
    assert apart(log, plain()) < 1e-12
