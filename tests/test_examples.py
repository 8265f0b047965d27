"""The examples run as their first lines say, and learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
ALONE = [sys.executable]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*command: str) -> str:
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+ +loss (\S+)", output, re.MULTILINE)]


def test_the_plain_loop_learns_the_same_alone_and_on_two_ranks() -> None:
    alone = run(*ALONE, str(EXAMPLES / "plain_loop.py"))
    two = run(*TWO, str(EXAMPLES / "plain_loop.py"))
    assert len(losses(alone)) == 9 and losses(alone)[-1] < 0.6 * losses(alone)[0]
    assert losses(two) == pytest.approx(losses(alone), rel=2e-3)
    assert "zero3 on 2 rank(s)" in two and "REDUCE_SCATTER" in two and "moments" in two


def test_the_transformers_example_learns_its_sentence() -> None:
    pytest.importorskip("transformers")
    output = run(*TWO, str(EXAMPLES / "transformers_meta.py"))
    assert "model.layers.3" in output and "written: 'A table says" in output
    assert losses(output)[-1] < 0.2 * losses(output)[0]
