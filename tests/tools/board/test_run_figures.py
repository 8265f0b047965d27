"""What the list says of a run's figures: late ones, held-out ones while it goes on, and the time that is left."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import shardfold as sf
from shardfold.launch.run_records import OwnRecord
from shardfold.tools.board import _run_figures
from shardfold.tools.board._run_figures import MEAN, RunFigures
from shardfold.tools.observe.run_status import RunStatus
from tests.tools.board.support import AskedBoard


def row_of(folder: Path) -> dict[str, Any]:
    (row,) = AskedBoard(folder).get("/api/runs")["runs"]
    return row


def test_a_row_has_late_and_held_out_figures_while_the_run_goes_on(tmp_path: Path) -> None:
    """A mean of late losses without those that are no numbers; the last held-out figure, of lm in bits per byte."""
    with sf.observe.Run(tmp_path / "a", config={}, steps=400) as run:
        assert row_of(tmp_path)["held_out"] is None and row_of(tmp_path)["loss_mean"] is None
        for step in range(1, 101):
            loss = math.nan if step == 90 else float(step)
            run.log(step, loss=loss, held_out_bits_per_byte=8.0 / step if step % 40 == 0 else None)
        row = row_of(tmp_path)
        late = [step for step in range(101 - MEAN, 101) if step != 90]
        assert row["loss"] == 100.0 and row["loss_mean"] == pytest.approx(sum(late) / len(late))
        assert row["held_out"] == {"figure": "bits_per_byte", "value": 0.1, "step": 80}
        run.log(101, loss=1.0, held_out_loss=3.0)
        assert row_of(tmp_path)["held_out"] == {"figure": "loss", "value": 3.0, "step": 101}
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"bits_per_byte": {"model": 2.5}}))
    assert row_of(tmp_path)["held_out"] == {"figure": "bits_per_byte", "value": 2.5, "step": 101}


def test_a_held_out_figure_that_is_far_back_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By who has seen it; who looks for the first time looks at some of the file only."""
    monkeypatch.setattr(_run_figures, "FAR", 20_000)
    monkeypatch.setattr(_run_figures, "LINE", 200)
    with sf.observe.Run(tmp_path / "a", config={}) as run:
        run.log(1, loss=1.0, held_out_loss=0.5)
        seen, first = None, {"figure": "loss", "value": 0.5, "step": 1}
        for step in range(2, 2000):
            run.log(step, loss=1.0, held_out_loss=None)
            if step % 100 == 0:
                seen = RunFigures.of(RunStatus.of(tmp_path / "a"), seen)
                assert seen.held_out == first
        assert RunFigures.of(RunStatus.of(tmp_path / "a")).held_out is None
        run.log(2000, loss=1.0, held_out_loss=0.25)
        seen = RunFigures.of(RunStatus.of(tmp_path / "a"), seen)
        assert seen.held_out is not None and seen.held_out["value"] == 0.25
        # Words in a text are no figure.
        run.write({"step": 2001, "loss": 1.0, "said": '"held_out_loss": 7'})
        assert RunFigures.of(RunStatus.of(tmp_path / "a"), seen).held_out == seen.held_out


def test_what_is_left_counts_by_how_fast_a_run_goes_now(tmp_path: Path) -> None:
    """Not by its slow begin; and a run that waits in vain has no time left that anybody knows."""
    with sf.observe.Run(tmp_path / "a", config={}, steps=1000) as run:
        for step in range(1, 501):
            run.write({"step": step, "seconds": 10.0 * min(step, 100) + step, "loss": 1.0})
        assert row_of(tmp_path)["seconds_left"] == pytest.approx(500.0, rel=0.01)
    record = OwnRecord(tmp_path / "a", 0, 1)
    record.write(phase="training", step=500, steps=1000, promise=1e-9)
    row = row_of(tmp_path)
    assert (row["state"], row["seconds_left"]) == ("stalled", None)
    record.close()
