"""The page of a plan computes what the planner does, in Python, in JavaScript, and behind its sliders."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from shardfold.planner.hardware import cluster
from shardfold.planner.memory import GPU, plan_memory
from shardfold.planner.setting import Subject
from shardfold.planner.surface import activity_of, surface_of
from shardfold.tools.planning.models import Planned
from shardfold.tools.planning.page import SCRIPT, plan_page
from shardfold.tools.recipes.gpt import GPT, GPTConfig

LENGTH = 32


def _subject(length: int) -> Subject:
    shape = GPTConfig(d_model=64, layers=2, heads=4, context=length)
    return Subject(GPT(shape), (torch.randint(256, (2, length)), torch.randint(256, (2, length))))


@pytest.fixture(scope="module")
def subject() -> Subject:
    return _subject(LENGTH)


@pytest.fixture(scope="module")
def page(subject: Subject) -> str:
    planned = Planned("gpt", subject, 100_000, LENGTH)
    return plan_page(
        planned, cluster("8xL4"), _subject(LENGTH // 2), layouts=("zero1", "zero3"), modes=("keep", "recompute"),
        precision="bf16", samples=4,
    )  # fmt: skip


def _peak(subject: Subject, layout: str, mode: str, ranks: int, samples: int) -> float:
    trace = subject.trace("bf16", mode, samples)
    setting = subject.setting(
        trace, layout=layout, precision="bf16", mesh={"intra": ranks}, clip=True, behaviour=GPU
    )  # fmt: skip
    return plan_memory(setting, trace).peak


def test_a_surface_has_the_peaks_of_plans(subject: Subject) -> None:
    """At the ranks and lengths that it goes through all is exact; between them lies padding."""
    shorter = _subject(LENGTH // 2)
    for mode in ("keep", "recompute"):
        activity = activity_of(subject, shorter, "bf16", mode, LENGTH)
        for layout in ("zero1", "zero3"):
            surface = surface_of(subject, layout, activity, "bf16", mode)
            for ranks, samples in ((1, 3), (2, 5), (64, 4)):
                peak = _peak(subject, layout, mode, ranks, samples)
                assert surface.over_time(ranks, samples, LENGTH).max() == pytest.approx(peak, rel=1e-9)
            padding = 256 * 64 * 8 * 4  # of 64 ranks, at most, for each state of each segment
            peak = _peak(subject, layout, mode, 8, 4)
            assert surface.over_time(8, 4, LENGTH).max() == pytest.approx(peak, abs=padding)
        half = surface.over_time(2, 4, LENGTH / 2).max()
        buffers = subject.trace("bf16", mode, 4).buffers - shorter.trace("bf16", mode, 4).buffers
        assert half == pytest.approx(_peak(shorter, layout, mode, 2, 4) + buffers, rel=1e-9)


def test_javascript_computes_the_same(subject: Subject, page: str, tmp_path: Path) -> None:
    """The function behind the sliders gives the planner's peaks."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node to run the page's script")
    data = re.search(r'id="plan">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    text = json.dumps(data[1].replace("<\\/", "</"))
    asked = [("zero3", "keep", 64, 5), ("zero1", "recompute", 2, 4), ("zero3", "recompute", 1, 3)]
    calls = ", ".join(f"compute('{l}', '{m}', {r}, {s}, {LENGTH}).top.total" for l, m, r, s in asked)  # noqa: E741
    script = tmp_path / "page.js"
    script.write_text(
        f"const document = {{ getElementById: () => ({{ textContent: {text} }}) }};\n"
        + SCRIPT.partition("function draw")[0]
        + f"console.log(JSON.stringify([{calls}]));\n"
    )
    out = subprocess.run([node, str(script)], capture_output=True, text=True, timeout=120, check=True).stdout
    assert json.loads(out) == pytest.approx([_peak(subject, *each) for each in asked], rel=1e-6)


@pytest.mark.soak
def test_sliders_move_in_a_browser(subject: Subject, page: str, tmp_path: Path) -> None:
    """From the file system, at positions that the address has; what the page shows is the planner's."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no browser to show the page in")
    path = tmp_path / "plan.html"
    path.write_text(page, encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    for layout, mode, ranks, samples in (("zero3", "recompute", 64, 7), ("zero1", "keep", 2, 3)):
        address = f"{path.as_uri()}#layout={layout}&mode={mode}&ranks={ranks}&samples={samples}"
        shown = subprocess.run(
            [*command, "--dump-dom", address], capture_output=True, text=True, timeout=240, check=True
        ).stdout
        found = re.search(r'id="peak" data-bytes="([\d.]+)"', shown)
        assert found is not None, shown[-2000:]
        assert float(found[1]) == pytest.approx(_peak(subject, layout, mode, ranks, samples), rel=1e-6)
        assert '<path class="area model"' in shown
