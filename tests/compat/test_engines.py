"""Engines of the face answer, line by line, what engines of DeepSpeed 0.19.8 answered to the same lines.

``benchmarks/deepspeed_scenes.py`` has the lines, ``benchmarks/deepspeed_engines.py`` recorded the values.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardfold.testing import run_ranks


def script() -> Any:
    """``benchmarks/deepspeed_engines.py`` as a module."""
    path = Path(__file__).parents[2] / "benchmarks" / "deepspeed_engines.py"
    spec = importlib.util.spec_from_file_location("deepspeed_engines", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["deepspeed_engines"] = module
    spec.loader.exec_module(module)
    return module


engines = script()
GOLDEN: dict[str, dict[str, Any]] = engines.recorded()


def answers(cases: list[Any], folder: str) -> list[dict[str, Any]]:
    """The values of every line of each case on this rank."""
    rank, found = dist.get_rank(), []
    for number, case in enumerate(cases):
        own = Path(folder) / str(number)
        own.mkdir(exist_ok=True)
        found.append(engines.run(case, rank, str(own), "shardfold.compat.deepspeed"))
    return found


def differing(ranks: int, cases: list[Any], folder: Path) -> list[str]:
    """What is not as recorded and not listed with a reason."""
    each = run_ranks(answers, ranks, cases, str(folder), timeout=280, warnings_as_errors=False)
    differ = []
    for number, case in enumerate(cases):
        here = engines.merged([one[number] for one in each])
        for line, wanted in GOLDEN[str(case)].items():
            if not engines.agree(wanted, here[line], case.precision) and engines.known(case, line) is None:
                differ.append(f"{case}: {line}\n  {wanted}\n  {here[line]}")
    return differ


def chosen(ranks: int, everything: bool) -> list[Any]:
    """The cases of so many ranks; of a scene at several stages and precisions the first and the last, or the others."""
    found: list[Any] = []
    for scene in engines.SCENES:
        cases = [case for case in engines.cases(ranks) if case.scene == scene]
        few = [case for case in cases if case in (cases[0], cases[-1])]
        found += [case for case in cases if case not in few] if everything else few
    return found


def test_every_line_has_a_recorded_value():
    """And every recorded value a line; 300 different lines at least; a reason says what it is about."""
    wanted = {str(case): engines.lines(case) for case in engines.cases()}
    assert {case: list(dict.fromkeys(lines)) for case, lines in wanted.items()} == {
        c: list(v) for c, v in GOLDEN.items()
    }
    assert len({line for lines in wanted.values() for line in lines}) >= 300
    for scene, beginning in engines.KNOWN:
        assert any(
            line.startswith(beginning)
            for case in engines.cases()
            if scene in ("", case.scene)
            for line in engines.lines(case)
        ), (scene, beginning)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_answer_as_deepspeed_s(ranks: int, tmp_path: Path):
    """Accessors, counters, states, checkpoints, schedules, collectives and mistakes: DeepSpeed's values and errors."""
    differ = differing(ranks, chosen(ranks, everything=False), tmp_path)
    assert not differ, "\n".join(differ)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_answer_so_at_every_stage_and_precision(ranks: int, tmp_path: Path):
    """The other stages and precisions of each scene."""
    differ = differing(ranks, chosen(ranks, everything=True), tmp_path)
    assert not differ, "\n".join(differ)
