"""The page of a plan computes what the planner does, in Python, in JavaScript, and behind its sliders."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch

from shardfold.plan.lifetimes import GPU
from shardfold.planner.division import UNDIVIDED, Division
from shardfold.planner.hardware import cluster
from shardfold.planner.memory import plan_memory
from shardfold.planner.setting import Subject
from shardfold.planner.surface import Surface, activity_of, surface_of
from shardfold.tools.planning._plan_page import SCRIPT, plan_page
from shardfold.tools.planning.known_models import Planned
from shardfold.tools.recipes.gpt import GPT, GPTConfig

LENGTH = 32
TENSOR = Division(tensor=2)
STAGED = Division(pipeline=2, order="zb-h1", micro_batches=4, stage=1)


def _subject(length: int, division: Division = UNDIVIDED) -> Subject:
    shape = GPTConfig(d_model=64, layers=2, heads=4, context=length)
    tokens = torch.randint(256, (2, length)), torch.randint(256, (2, length))
    return Subject(GPT(shape), tokens, division=division)


def _both(division: Division = UNDIVIDED) -> tuple[Planned, Subject]:
    return Planned("gpt", _subject(LENGTH, division), 100_000, LENGTH), _subject(LENGTH // 2, division)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return _subject(LENGTH)


@pytest.fixture(scope="module")
def page(subject: Subject) -> str:
    models = {"data alone": _both(), "tensor=2": _both(TENSOR), "stage 1": _both(STAGED)}
    return plan_page(
        models, cluster("8xL4"), layouts=("zero1", "zero3"), modes=("keep", "recompute"), precision="bf16", samples=4
    )


def _peak(subject: Subject, layout: str, mode: str, ranks: int, samples: int) -> float:
    trace = subject.trace("bf16", mode, samples)
    mesh = subject.division.over({"inter": 1, "intra": ranks * subject.division.ranks}).axes
    setting = subject.setting(trace, layout=layout, precision="bf16", mesh=mesh, clip=True, behaviour=GPU)
    return plan_memory(setting, trace).peak


def _over_time(surface: Surface, ranks: int, samples: float, length: float) -> np.ndarray:
    """Bytes of the device at each point."""

    def at(which: Sequence[Any]) -> np.ndarray:
        a, b, c, d = (np.asarray(each) for each in which)
        return a + b * samples + c * length + d * samples * length

    points = surface.one if ranks == 1 else surface.many
    event, begins = np.asarray(points.event), np.asarray(points.level, dtype=bool)
    held = np.where(begins, at(surface.activity.level)[event], at(surface.activity.peak)[event])
    engine = np.asarray(points.whole) + np.asarray(points.divided) / ranks
    always = points.rest[0] + points.rest[1] / ranks + points.workspace + at(surface.activity.batch)
    return always + engine + held


def test_a_surface_has_the_peaks_of_plans(subject: Subject) -> None:
    """At the ranks and lengths that it goes through all is exact; between them lies padding."""
    shorter = _subject(LENGTH // 2)
    for mode in ("keep", "recompute"):
        activity = activity_of(subject, shorter, "bf16", mode, LENGTH)
        for layout in ("zero1", "zero3"):
            surface = surface_of(subject, layout, activity, "bf16", mode)
            for ranks, samples in ((1, 3), (2, 5), (64, 4)):
                peak = _peak(subject, layout, mode, ranks, samples)
                assert _over_time(surface, ranks, samples, LENGTH).max() == pytest.approx(peak, rel=1e-9)
            padding = 256 * 64 * 8 * 4  # of 64 ranks, at most, for each state of each segment
            peak = _peak(subject, layout, mode, 8, 4)
            assert _over_time(surface, 8, 4, LENGTH).max() == pytest.approx(peak, abs=padding)
        half = _over_time(surface, 2, 4, LENGTH / 2).max()
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
    shared = f"plan = plans['tensor=2'], compute('zero3', 'keep', 2, 4, {LENGTH}).top.total"
    staged = ", ".join(f"compute('zero1', '{mode}', 2, 4, {LENGTH}).top.total" for mode in ("keep", "recompute"))
    # Points of another mode are of events that this one may not have.
    absent = f"compute('zero1', 'recompute', 2, 4, {LENGTH}).rows.filter(row => !(row.total > 0)).length"
    script = tmp_path / "page.js"
    script.write_text(
        f"const document = {{ getElementById: () => ({{ textContent: {text} }}) }};\n"
        + SCRIPT.partition("function draw")[0]
        + f"console.log(JSON.stringify([{calls}, ({shared}), (plan = plans['stage 1'], 0), {staged}, {absent}]));\n"
    )
    out = subprocess.run([node, str(script)], capture_output=True, text=True, timeout=120, check=True).stdout
    assert json.loads(out) == pytest.approx(
        [*(_peak(subject, *each) for each in asked), _peak(_subject(LENGTH, TENSOR), "zero3", "keep", 2, 4), 0]
        + [_peak(_subject(LENGTH, STAGED), "zero1", mode, 2, 4) for mode in ("keep", "recompute")] + [0], rel=1e-6,
    )  # fmt: skip


@pytest.mark.soak
def test_sliders_move_in_a_browser(subject: Subject, page: str, tmp_path: Path) -> None:
    """From the file system, at positions that the address has; what the page shows is the planner's."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no browser to show the page in")
    path = tmp_path / "plan.html"
    path.write_text(page, encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    shared = _subject(LENGTH, TENSOR)
    for axes, layout, mode, ranks, samples in (
        ("data alone", "zero3", "recompute", 64, 7), ("data alone", "zero1", "keep", 2, 3),
        ("tensor=2", "zero1", "keep", 2, 3),
    ):  # fmt: skip
        at = f"axes={quote(axes)}&layout={layout}&mode={mode}&ranks={ranks}&samples={samples}"
        address = f"{path.as_uri()}#{at}"
        shown = subprocess.run(
            [*command, "--dump-dom", address], capture_output=True, text=True, timeout=240, check=True
        ).stdout
        found = re.search(r'id="peak" data-bytes="([\d.]+)"', shown)
        assert found is not None, shown[-2000:]
        of = shared if axes == "tensor=2" else subject
        assert float(found[1]) == pytest.approx(_peak(of, layout, mode, ranks, samples), rel=1e-6)
        assert '<path class="area model"' in shown
