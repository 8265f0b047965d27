"""The layout that an engine chooses sends least of those that fit; what does not fit is said before the first step."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.engine import fitting
from shardfold.errors import ConfigError, LayoutError
from shardfold.plan import presets
from shardfold.plan.axes import Mesh
from shardfold.plan.rules import Rules
from shardfold.planner.auto import FREE, choose_layout, states_peak
from shardfold.sharding.partition import cut
from shardfold.testing import Ranks
from tests.support.options import grouped

WIDTH, BLOCKS, RANKS = 64, 8, 8


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)))


def test_less_memory_chooses_what_sends_more() -> None:
    """From all states on every rank to all of them divided; below that nothing fits, and the message says how much
    each would take."""
    mesh, numel = Mesh.of({"inter": 1, "intra": RANKS}), sum(p.numel() for p in _model().parameters())
    chosen = [choose_layout(_model(), "fp32", mesh, per * numel / (1 - FREE)).layout for per in (24, 13.5, 9, 4.8)]
    order = ["ddp", "zero1", "zero2", "zero3"]
    assert chosen[0] == "ddp" and chosen == sorted(chosen, key=order.index) and len(set(chosen)) >= 3
    with pytest.raises(ConfigError, match="ddp would take"):
        choose_layout(_model(), "fp32", mesh, 0.1 * numel)


def test_an_engine_takes_auto(caplog: pytest.LogCaptureFixture) -> None:
    """It trains, and the log has what was chosen and assumed; a mesh that cuts the model is refused."""
    with caplog.at_level(logging.WARNING, logger="shardfold"):
        engine = sf.Engine(_model(), optimizer=partial(torch.optim.AdamW, lr=1e-3), layout="auto")
    assert "layout='auto' is 'ddp'" in caplog.text and "Assumed: " in caplog.text
    engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
    engine.step()
    engine.close()
    with pytest.raises(ConfigError, match="parallel= has tensor"):
        sf.Engine(_model(), layout="auto", parallel={"tensor": 2})


def test_what_will_not_fit_is_said_before_the_first_step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where states alone take more than there is; not where they fit."""
    numel = sum(p.numel() for p in _model().parameters())
    for memory, said in ((8.0 * numel, True), (64.0 * numel, False)):
        monkeypatch.setattr(fitting, "memory_of", lambda device, memory=memory: memory)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="shardfold"):
            sf.Engine(_model(), optimizer=partial(torch.optim.AdamW, lr=1e-3)).close()
        assert ("a step will not fit" in caplog.text) is said


def _told(memory: float, **given: Any) -> str:
    """What an engine under so much memory says on rank 0."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardfold").addHandler(handler)
    known, fitting.memory_of = fitting.memory_of, lambda device: memory
    try:
        engine = sf.Engine(_model(), optimizer=partial(torch.optim.AdamW, lr=1e-3), **grouped(**given))
        engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
        engine.step()
        engine.close()
    finally:
        fitting.memory_of = known
        logging.getLogger("shardfold").removeHandler(handler)
    return "\n".join(said)


def test_what_is_said_to_fit_fits(ranks: Ranks) -> None:
    """Under a memory that `ddp` is too large for, two ranks name a layout, under which nothing is said any more; where
    nothing fits it is said how much the least takes."""
    numel = sum(p.numel() for p in _model().parameters())
    told, silent = ranks.run(_told, 13.0 * numel, layout="ddp", world_size=2)
    layout = re.search(r"a step will not fit: .* layout='(\w+)' takes ", told)
    assert layout is not None and not silent, told
    assert ranks.run(_told, 13.0 * numel, layout=layout[1], world_size=2) == ["", ""]
    told, _ = ranks.run(_told, 3.0 * numel, layout="ddp", world_size=2)
    assert re.search(r"Of all layouts .* takes the least, .*: take more ranks", told), told


def test_the_largest_batch_is_that_of_a_search() -> None:
    """sf.plan.largest_batch gives the number; a smaller budget gives fewer samples."""
    batch = torch.randn(2, WIDTH)
    sizes = [
        sf.plan.largest_batch(_model(), batch, gpus="2xL4", layout="zero2", memory=memory)
        for memory in ("17MiB", "18MiB", "16.1MiB")  # of which libraries take 16
    ]
    assert sizes[1] > sizes[0] > 0 and sizes[2] == 0


def test_a_layout_that_is_almost_automatic_is_named() -> None:
    """Beside presets."""
    with pytest.raises(LayoutError, match="'auto'"):
        sf.Engine(nn.Linear(2, 2), layout="aut")


def test_copies_count_in_what_is_chosen() -> None:
    """12 bytes more of each element of a rank's part, and its log, so that a layout that just fits does not with them;
    none under ddp, whose ranks all have the same."""
    mesh, memory = Mesh.of({"inter": 1, "intra": RANKS}), 1e9
    numel = sum(p.numel() for p in _model().parameters())
    for name in ("zero1", "zero2", "zero3"):
        plain, kept = (states_of(name, mesh, copies) for copies in (None, "rank"))
        assert 1.0 <= (kept - plain) / (16 * numel / RANKS) < 1.15, "padding alone"
        budget = (plain + kept) / 2 / (1 - FREE)
        first = choose_layout(_model(), "fp32", mesh, budget).layout
        assert states_of(choose_layout(_model(), "fp32", mesh, budget, copies="rank").layout, mesh, "rank") < kept
        assert states_of(first, mesh, None) <= plain
    found = choose_layout(_model(), "fp32", mesh, memory, copies="rank")
    assert found.layout == "ddp" and "its states, with copies of others', and buffers take" in found.told
    assert states_of("ddp", mesh, None) == states_of("ddp", mesh, "rank")


def states_of(name: str, mesh: Mesh, copies: str | None) -> float:
    model, rules = _model(), Rules("fp32", presets.named(name).replace(copies=copies), mesh)
    groups = {id(p): 0 for p in model.parameters()}
    units = [c.spec for c in cut(model, None, groups, rules, mesh) if c.spec is not None]
    return states_peak(rules.layouts[-1], units, mesh, 2)


def test_a_plan_of_a_micro_batch_counts_copies() -> None:
    given: dict[str, Any] = dict.fromkeys(("offload", "wire", "units"))
    given |= {"precision": "fp32", "accumulate": 1, "clips": False, "parallel": sf.Parallel(), "overlap": sf.Overlap()}
    for survive, copies in ((None, None), ("host", sf.Copies(to="host"))):
        planned = fitting.sampled(sf.Auto(sample=torch.ones(2)), None, optimizer=object(), survive=survive, **given)
        assert planned is not None and {table.copies for table in planned.tables.values()} == {copies}
