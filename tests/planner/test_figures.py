"""Figures of papers, as this library's own sums give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paper_figures import FIGURES, Figure, as_markdown, offload_cuts

PAGE = Path(__file__).parents[2] / "docs/figures.md"


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.what)
def test_a_printed_figure_is_what_the_sums_give(figure: Figure) -> None:
    """Within the tolerance that rounding in print leaves."""
    assert figure.compute() == pytest.approx(figure.printed, rel=figure.tolerance or 1e-12)


def test_the_page_shows_them() -> None:
    """docs/figures.md has the tables as they are computed."""
    assert as_markdown() in PAGE.read_text(encoding="utf-8")


def test_offload_has_one_best_cut() -> None:
    """No cut moves less than 4 bytes a parameter, and of those that move 4 only one leaves 2 on the device."""
    cuts = list(offload_cuts())
    assert len(cuts) == 2**7 - 1
    assert min(cut.traffic for cut in cuts) == 4
    best = [cut for cut in cuts if cut.traffic == 4 and cut.device == 2]
    assert [cut.host for cut in best] == [{"grads16", "update", "params32", "momentum", "variance", "cast"}]
