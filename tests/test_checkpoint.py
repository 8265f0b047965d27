"""Any checkpoint loads on any layout and number of ranks, element for element; what does not fit is said, all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keeping import SETTINGS, Setting, covering, run_matrix
from shardfold.testing import Ranks


def test_what_one_layout_saves_every_other_loads(ranks: Ranks, tmp_path: Path) -> None:
    run_matrix(ranks, tmp_path, covering(SETTINGS))


@pytest.mark.soak
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_all_pairs(ranks: Ranks, tmp_path: Path, precision: str, count: int) -> None:
    every = [setting for setting in SETTINGS if setting.precision == precision]
    run_matrix(ranks, tmp_path, [(a, b) for a in every for b in every if b.ranks == count])
