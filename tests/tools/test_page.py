"""The page of a run: what the folder says is on it, whatever the folder says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfold.errors import ConfigError
from shardfold.tools.observe.charts import HEIGHT, WIDTH, ChartLine, line_chart
from shardfold.tools.observe.run_page import page_of_run, write_page
from tests.support.page_tags import PageTags

CONFIG = {"size": "tiny", "layout": "zero3", "procs": 2, "steps": 3, "data": "<script>alert(1)</script>"}
STEPS = [
    {"step": n, "loss": 2.0, "bits_per_byte": 4.0 - n, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 10.0, "seconds": n,
     "memory_bytes": 2048, "skipped": 0} for n in (1, 2, 3)
]  # fmt: skip
SUMMARY = {
    "seconds": 3.0,
    "tokens": 3000,
    "num_parameters": 1_350_000,
    "bits_per_byte": {"model": 1.234, "bigram": 3.5},
    "memory": [{"state": "params", "tier": "device", "table": 100.0, "padding": 28.0, "held": 128}],
    "traffic": [{"kind": "gather", "operation": "ALL_GATHER", "calls": 2, "predicted": 5000.0, "sent": 5000}],
    "moved": [],
}


def run_folder(folder: Path, *, summary: bool = True, tail: str = "") -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in STEPS) + tail)
    if summary:
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
        (folder / "sample.txt").write_bytes(b"def f():\x1b[31m </pre><script>alert(2)</script>\xff")
        (folder / "program.txt").write_text("ALL_GATHER blocks.0\n")
    return folder


def test_the_page_has_what_the_folder_has_and_runs_nothing(tmp_path: Path) -> None:
    """Numbers, program, sample and settings are on it; what is in them is text; nothing is fetched from elsewhere."""
    path = write_page(run_folder(tmp_path))
    text = path.read_text(encoding="utf-8")
    for word in ("1.234", "3 of 3", "1.35M", "bigram 3.5", "5,000", "128 B", "ALL_GATHER blocks.0", "def f():"):
        assert word in text, word
    tags = PageTags()
    tags.feed(text)
    assert "script" not in tags.seen and not tags.open
    assert "\x1b" not in text and not re.search(r"(src|href)=|url\(|@import", text)


def test_a_run_under_way_has_a_page_of_what_there_is(tmp_path: Path) -> None:
    """Also where the last line of its metrics is half written."""
    text = page_of_run(run_folder(tmp_path, summary=False, tail='{"step": 4, "bits'))
    assert "under way" in text and "3 of 3" in text and "1.234" not in text


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run folder"):
        page_of_run(tmp_path)
    run_folder(tmp_path)
    (tmp_path / "summary.json").write_text("[1")
    with pytest.raises(ConfigError, match=r"summary\.json"):
        page_of_run(tmp_path)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(width=32)), max_size=40))
def test_a_chart_keeps_within_its_picture(points: list[tuple[int, float]]) -> None:
    """Whatever the values, NaN and inf among them."""
    picture = line_chart([ChartLine("a", sorted(points, key=lambda each: each[0]))], label="a")
    for pair in re.findall(r'points="([^"]*)"', picture):
        for x, y in (map(float, point.split(",")) for point in pair.split()):
            assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT
