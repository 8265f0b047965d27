"""Seconds of steps whose states rest in host memory, planned and measured on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardfold.testing import Ranks
from shardfold.tools.doctor._rates import measure
from shardfold.tools.recipes.gpt import GPTConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WITHIN = 0.2
"""Of the ratio of two layouts' steps, which is the same however busy the machine is."""


@pytest.mark.soak
def test_states_in_host_memory_take_as_much_longer_as_planned(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the same states on the device, by the profile of this machine; turns of all layouts alternate."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import planned_seconds  # type: ignore[import-not-found]

    script: Any = planned_seconds
    cases = {name: script.Case(name) for name in ("zero1", "zero2", "offload", "infinity")}
    args = cases, GPTConfig.named("demo"), 8, "fp32", {"intra": 2}
    seen = script.middle(ranks.run(script.turns, *args, 5, 3, world_size=2, timeout=1800))
    plan = script.planned(*args, measure(tmp_path).device)
    for hosted, near in (("offload", "zero2"), ("infinity", "zero1")):
        assert plan[hosted] / plan[near] == pytest.approx(seen[hosted] / seen[near], rel=WITHIN)
