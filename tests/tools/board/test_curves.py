"""Curves are those of the file, at any level and from any cursor, while the file grows, is cut or begins anew."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import shardfold as sf
from shardfold.tools.board import _step_curves
from shardfold.tools.board._step_curves import StepCurves
from tests.tools.board.support import AskedBoard, made_run
from tests.tools.test_event_files import record, scalar

FOREVER = math.inf


def written(path: Path, rows: Sequence[Any]) -> None:
    with path.open("a") as file:
        for row in rows:
            file.write((row if isinstance(row, str) else json.dumps(row)) + "\n")


def expected(path: Path, key: str, by: str = "step") -> list[tuple[float, float | None]]:
    """By the plainest means: rows that no later row takes the place of; None: not finite."""
    found: list[tuple[float, float, float | None]] = []
    seconds = before = tokens = 0.0
    for line in path.read_text().split("\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "seconds" in row:
            passed = row["seconds"] - before if row["seconds"] >= before else row["seconds"]
            seconds, before = seconds + passed, row["seconds"]
            tokens += passed * row.get("tokens_per_s", 0.0)
        x = {"step": row["step"], "seconds": seconds, "tokens": tokens}[by]
        while found and found[-1][0] >= row["step"]:
            found.pop()
        found.append((row["step"], x, row.get(key)))
    return [(x, y) for _, x, y in found]


def points(curves: StepCurves, key: str, by: str = "step", pixels: int = 10**6, part: Any = None) -> list[list[Any]]:
    curves.read_on([key], by, FOREVER)
    return json.loads(curves.whole(key, by, pixels, part).points)


def rows(count: int, first: int = 1, rng: random.Random | None = None) -> list[dict[str, Any]]:
    rng = rng or random.Random(first)
    return [
        {
            "step": step,
            "seconds": (step - first + 1) * 0.5,
            "loss": rng.uniform(0, 9),
            "tokens_per_s": 64.0,
            "mfu": None,
        }
        | ({"held_out_loss": step / 8} if step % 10 == 0 else {})
        for step in range(first, first + count)
    ]


@pytest.mark.parametrize("by", ["step", "seconds", "tokens"])
def test_a_short_curve_is_told_as_it_is(by: str, tmp_path: Path) -> None:
    """Also of a run that went back to a checkpoint, and counts its seconds anew."""
    path = tmp_path / "metrics.jsonl"
    written(path, rows(100))
    written(path, rows(20, 91))
    told = points(StepCurves(path.parent), "loss", by)
    assert told == [[pytest.approx(x, rel=1e-9), pytest.approx(y, rel=1e-5)] for x, y in expected(path, "loss", by)]
    few = points(StepCurves(path.parent), "held_out_loss", by)
    assert few == [[pytest.approx(x), y] for x, y in expected(path, "held_out_loss", by) if y is not None]


@pytest.mark.parametrize("pixels", [1, 7, 100, 2000])
@pytest.mark.parametrize("count", [1, 100, 4096, 4097, 9000])
def test_a_level_has_least_largest_and_mean_of_its_rows(count: int, pixels: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, rows(count // 3))
    curves = StepCurves(path.parent)
    curves.read_on(["loss"], "step", FOREVER)
    written(path, rows(count - count // 3, count // 3 + 1))  # blocks that are there become larger
    told = points(curves, "loss", pixels=pixels)
    level = curves.whole("loss", "step", pixels).level
    assert len(told) <= pixels and level * (len(told) - 1) < count <= level * len(told)
    values = [y for _, y in expected(path, "loss")]
    for at, point in enumerate(told):
        some = [each for each in values[at * level : (at + 1) * level] if each is not None]
        low, high, mean = min(some), max(some), sum(some) / len(some)
        assert point[0] == at * level + 1
        assert point[1:] in (
            [pytest.approx(low, rel=1e-5)],
            [pytest.approx(low, rel=1e-5), pytest.approx(high, rel=1e-5), pytest.approx(mean, rel=1e-5)],
        )


def test_a_zoom_reads_the_rows_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, rows(20_000))
    curves = StepCurves(path.parent)
    for by, scale in (("step", 1.0), ("seconds", 0.5), ("tokens", 32.0)):
        part = 7000 * scale, 7099 * scale
        assert points(curves, "loss", by, 600, part) == [
            [pytest.approx(x, rel=1e-9), pytest.approx(y, rel=1e-5)]
            for x, y in expected(path, "loss", by)
            if part[0] <= x <= part[1]
        ]
    assert len(points(curves, "loss", pixels=600, part=(1000, 15_000))) in range(300, 601)
    assert points(curves, "loss", part=(30_000, 40_000)) == []


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.soak) for n in range(3, 60))])
def test_what_comes_behind_a_cursor_is_what_is_new(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two who look, at other times, a file that grows by whole and half lines, goes back, is cut and begins anew: each
    has the curve that one has who looks for the first time."""
    monkeypatch.setattr(_step_curves, "MOST_BLOCKS", 256)
    rng, path = random.Random(seed), tmp_path / "metrics.jsonl"
    path.touch()
    curves, step, half = StepCurves(path.parent), 0, ""
    held: list[dict[str, Any]] = [{"cursor": "", "points": []} for _ in range(2)]
    for _ in range(60):
        act = rng.choice(["grow", "grow", "grow", "half", "back", "cut", "anew"])
        with path.open("a") as file:
            file.write(half)
            half = ""
        if act in ("grow", "half"):
            count = rng.choice([1, 3, 60])
            written(path, rows(count, step + 1, rng))
            step += count
        if act == "half":
            line = json.dumps(rows(1, step + 1, rng)[0]) + "\n"
            step, cut = step + 1, rng.randrange(1, len(line))
            with path.open("a") as file:
                file.write(line[:cut])
            half = line[cut:]
        elif act == "back":
            step = rng.randrange(step + 1)
            written(path, rows(2, step + 1, rng))
            step += 2
        elif act == "cut" and rng.random() < 0.5:
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(lines[: len(lines) // 2]))
            step = len(lines) and step
        elif act == "anew" and rng.random() < 0.3:
            path.unlink()
            path.touch()
            step = 0
        for one in rng.sample(held, rng.randrange(3)):
            curves.read_on(["loss"], "step", FOREVER)
            told = curves.since(one["cursor"], "loss", "step", 10**6)
            one["cursor"] = curves.cursor
            if told is not None:
                new = json.loads(told.points)
                one["points"] = new if told.is_whole else one["points"] + new
                wanted = expected(path, "loss")
                if curves.whole("loss", "step", 10**6).level == 1:
                    assert one["points"] == [[x, pytest.approx(y, rel=1e-5)] for x, y in wanted]
                    assert one["points"] == points(StepCurves(tmp_path), "loss")
                else:  # what is exact at the end, and blocks before
                    assert one["points"][0][0] == wanted[0][0] and wanted[-1][0] - one["points"][-1][0] < curves._size
                    assert [x for x, *_ in one["points"]] == sorted({x for x, *_ in one["points"]})


def test_a_tick_is_small(tmp_path: Path) -> None:
    board = AskedBoard(made_run(tmp_path / "a", 3000))
    first = board.get("/api/curves", {"id": board.id("a"), "key": ["loss", "lr"]})
    assert [len(each["points"]) for each in first["series"]] == [600, 0]
    again = {"id": board.id("a"), "key": ["loss", "lr"], "after": first["cursor"]}
    assert board.get("/api/curves", again)["series"] == []
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3001, "loss": 0.25}\n{"step": 3002, "lo')
    told = board.get("/api/curves", again)["series"]
    assert told[0] == {"id": board.id("a"), "key": "loss", "level": 1, "whole": False, "points": [[3001, 0.25]]}
    assert [each["points"] for each in told[1:]] in ([], [[]])


def test_what_is_not_finite_is_a_gap_in_a_curve_and_nothing_in_a_few_points(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with sf.observe.Run(tmp_path, steps=6) as run:
        for step, loss in enumerate([3.0, math.nan, math.inf, 2.0, -math.inf, 1.0], 1):
            run.log(step, loss=loss, held_out_loss=0.5 if step == 4 else None)
    written(path, ['{"step": 7, "loss": NaN}', '{"step": 8, "loss": -Infinity}', '{"step": 9, "loss": 1.0}'])
    written(path, ["no row", "[1, 2]", '{"loss": 5}', '{"step": 10, "loss": {"loss": 7}}', '{"step": 11, "loss": 4}'])
    written(path, [{"step": step, "loss": 4.0} for step in range(12, 20)])
    curves = StepCurves(path.parent)
    told = dict(points(curves, "loss"))
    later = dict.fromkeys(range(11, 20), 4)
    assert {x: y for x, y in told.items() if y is not None} == {1: 3, 4: 2, 6: 1, 9: 1, **later}
    assert told[2] is None and told[7] is None
    assert points(curves, "held_out_loss") == [[4, 0.5]]
    low, high, mean, strange = points(StepCurves(path.parent), "loss", pixels=1)[0][1:]
    assert (low, high, mean, strange) == (1, 4, pytest.approx(43 / 13, rel=1e-5), 6)


@pytest.mark.parametrize("pixels", [50, 700])
def test_what_is_not_finite_is_counted_where_rows_share_a_point(pixels: int, tmp_path: Path) -> None:
    """In blocks, in rows that a zoom reads again, and where no row of a point is finite; not of a figure that few rows
    have."""
    path, rng = tmp_path / "metrics.jsonl", random.Random(pixels)
    bad = {step for step in range(1, 20_001) if rng.random() < 0.02 or 8000 <= step < 9000}
    row = lambda step: {"step": step, "loss": None if step in bad else 1.0, "held_out_loss": 1.0}  # noqa: E731
    written(path, [row(step) if step % 100 == 0 else {**row(step), "held_out_loss": None} for step in range(1, 20_001)])
    curves = StepCurves(path.parent)
    for part in (None, (7000, 9499)):
        told = points(curves, "loss", pixels=pixels, part=part)
        ends = [*(x for x, *_ in told[1:]), 9500 if part else math.inf]
        for (x, low, *rest), end in zip(told, ends, strict=True):
            strange = rest[2] if len(rest) == 3 else int(low is None)
            inside = {step for step in range(int(x), int(min(end, 20_001)))}
            assert strange == len(bad & inside) and (low is None) == (inside <= bad), (x, low, rest)
        assert sum(point[1] is None for point in told) > 1
    assert all(len(point) < 5 for point in points(curves, "held_out_loss", pixels=pixels))


def test_names_in_texts_are_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, [{"step": 1, "words": '"loss": 9, ', "loss": 1.0}, {"step": 2, "a": {"loss": 9.0}, "loss": 2.0}])
    written(path, ['{"loss":3.0,"step":3}', '{"step":4}'])
    assert points(StepCurves(path.parent), "loss") == [[1, 1], [2, 2], [3, 3], [4, None]]
    assert points(StepCurves(path.parent), 'x": 1, "loss') == []


def test_a_name_that_is_escaped_is_found(tmp_path: Path) -> None:
    """JSON writes letters that are not ASCII as numbers."""
    written(tmp_path / "metrics.jsonl", [{"step": step, "größe": step / 2} for step in range(1, 4)])
    assert points(StepCurves(tmp_path), "größe") == [[1, 0.5], [2, 1], [3, 1.5]]


def test_a_line_without_end_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_step_curves, "PIECE", 1000)
    path = tmp_path / "metrics.jsonl"
    written(path, rows(20))
    written(path, ['{"step": 21, "loss": ' + "1" * 5000 + "}"])
    written(path, rows(20, 22))
    assert [x for x, *_ in points(StepCurves(path.parent), "loss")] == [*range(1, 21), *range(22, 42)]


def test_a_long_file_is_read_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks is told what was read so far, and how much that is; then all of it."""
    monkeypatch.setattr(_step_curves, "PIECE", 2000)
    path = tmp_path / "metrics.jsonl"
    written(path, rows(300))
    curves, shares = StepCurves(path.parent), [0.0]
    cursor, held = "", list[Any]()
    while shares[-1] < 1:
        curves.read_on(["loss"], "step", time.monotonic())
        told = curves.since(cursor, "loss", "step", 10**6)
        assert told is not None
        new = json.loads(told.points)
        held, cursor = new if told.is_whole else held + new, curves.cursor
        assert curves.share_read > shares[-1]
        shares.append(curves.share_read)
    assert len(shares) > 10 and [x for x, _ in held] == list(range(1, 301))


def test_memory_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for first in range(1, 60_000, 10_000):
        written(path, rows(10_000, first))
    curves = StepCurves(path.parent)
    assert len(points(curves, "loss", pixels=10_000)) <= _step_curves.MOST_BLOCKS
    assert curves.num_numbers < 40 * _step_curves.MOST_BLOCKS


def test_curves_that_nobody_looks_at_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcd":
        made_run(tmp_path / name, 50)
    from shardfold.tools.board import _board_app

    monkeypatch.setattr(_board_app, "MOST_NUMBERS", 1000)
    board = AskedBoard(tmp_path)
    for name in "abcd":
        board.get("/api/curves", {"id": board.id(name), "key": "loss"})
    assert 0 < len(board.app._curves) < 4 and board.id("d") in board.app._curves


def test_event_files_of_tensorboards_have_curves(tmp_path: Path) -> None:
    """Also while they grow."""
    events, folder = (
        [(step, f"train/{key}", step / 4) for step in range(1, 9) for key in ("loss", "lr")],
        tmp_path / "a",
    )
    folder.mkdir()
    path = folder / "events.out.tfevents.1.host"
    path.write_bytes(b"".join(record(scalar(*each)) for each in events[:9]))  # of step 5 a half
    board = AskedBoard(tmp_path)
    (run,) = board.get("/api/runs")["runs"]
    assert run["loss"] == 1.25 and run["step"] == 5
    asked = {"id": run["id"], "key": ["train/loss", "train/lr"]}
    told = board.get("/api/curves", asked)
    assert [len(each["points"]) for each in told["series"]] == [4, 4]
    with path.open("ab") as file:
        file.write(b"".join(record(scalar(*each)) for each in events[9:]))
    os.utime(path, (0, 0))  # nothing came for long
    more = board.get("/api/curves", {**asked, "after": told["cursor"]})
    assert [each["points"] for each in more["series"]] == [[[step, step / 4] for step in range(5, 9)]] * 2
    assert board.get(f"/api/runs/{run['id']}")["keys"] == ["train/loss", "train/lr"]


def test_a_file_of_figures_is_told_as_csv(tmp_path: Path) -> None:
    board = AskedBoard(made_run(tmp_path / "a", 3, grad_norm=None))
    reply = board.ask("GET", "/api/csv", params={"id": board.id("a"), "key": ["loss", "grad_norm"]})
    assert reply.text == "step,loss,grad_norm\n1,10,\n2,5,\n3,3.33333333,\n"
    assert reply.headers["content-disposition"] == 'attachment; filename="a.csv"'
