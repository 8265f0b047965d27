"""The board's page in a browser: what people do with it, by pointer or by keys, at two widths."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest

import shardfold as sf
from shardfold.tools.board._board_app import PAGE
from tests.support.browser import Visitor, browser, visitor
from tests.tools.board.support import TOKEN, AskedBoard, board_process
from tests.tools.tune.support import chats, model_folder, write_rows

STEPS = 300
PLANS = BEGINS = 180_000  # milliseconds: processes that plan or train import PyTorch first
UGLY = "<img src=x onerror=window.hit=1> of " + "a-very-long-name-" * 6


@contextmanager
def board(folder: Path, *options: str) -> Iterator[str]:
    """A board of this folder in a process of its own: its address, with the token."""
    with board_process(folder, *options) as (_, url):
        yield f"{url}/#token={TOKEN}"


@pytest.fixture
def chromium() -> Iterator[Any]:
    """Of each test its own, as a browser starts processes when it likes."""
    with browser() as opened:
        yield opened


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """A folder for runs. Those that go on, and servers of theirs, outlive their board, and end with the test."""
    folder = tmp_path / "runs"
    folder.mkdir()
    yield folder
    mine = [each for each in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(each.info["cmdline"] or ())]
    for process in mine:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(mine)


def loss(run: int, step: int) -> float:
    return 1.5 + 0.5 * run + 3 * math.exp(-step / 60)


def write_run(folder: Path, number: int = 0, **config: Any) -> Path:
    """A run that is over, with figures that tests can say beforehand."""
    settings = {
        "size": "tiny",
        "layout": "zero3",
        "lr": 0.001 * (number + 1),
        "steps": STEPS,
        "eval_windows": 4,
        "context": 32,
    }
    with sf.observe.Run(folder, config={**settings, **config}, steps=STEPS) as run:
        for step in range(1, STEPS + 1):
            value = math.nan if number == 1 and 200 < step <= 210 else loss(number, step)
            run.write({"step": step, "loss": value, "lr": 0.1, "tokens_per_s": 1000.0, "seconds": 0.5 * step})
    memory = [{"state": "params", "tier": "device", "held": 2**20 * (number + 1)}]
    whole = {"steps": STEPS, "resumed_at": 100, "seconds": 100.0, "tokens": 75_000 * (number + 1)}
    (folder / "summary.json").write_text(json.dumps({**whole, "memory": memory, "held_out_loss": 1.0 + number}))
    rows = [{"step": step, "prompt": "Once", "answer": f"run {number} at {step}", "reward": 0.5} for step in (100, 200)]
    write_rows(folder / "samples.jsonl", rows)
    return folder


def test_the_page_is_whole_and_makes_no_markup_of_what_it_is_told(tmp_path: Path) -> None:
    """Every file that it names is served with its kind; its policy lets run these and nothing that stands in the page.
    Nothing in the scripts reads text as markup or as a script."""
    board = AskedBoard(tmp_path)
    reply = board.ask("GET", "/")
    policy = dict(each.strip().split(" ", 1) for each in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert not re.search(r"<style|<script(?! type=\"module\" src=)|\son\w+=|style=|https?:", reply.text)
    found, named = dict[str, str](), set(re.findall(r"(?:src|href)=\"page/([\w.]+)\"", reply.text))
    while named - found.keys():
        name = min(named - found.keys())
        part = board.ask("GET", f"/page/{name}", {})
        assert part.status_code == 200, name
        assert part.headers["content-type"].startswith("text/css" if name.endswith(".css") else "text/javascript")
        assert part.headers["x-content-type-options"] == "nosniff"
        found[name] = part.text
        named |= set(re.findall(r"from \"\./([\w.]+)\"", part.text))
    assert found.keys() == {path.name for path in PAGE.iterdir()} - {"board.html"}
    for name, text in found.items():
        wrong = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|setAttribute\(\"style|url\("
        assert not re.search(wrong, text), name
    for name in ("nothing.js", "..", "%2e%2e/board.py", "__init__.py"):
        assert board.ask("GET", f"/page/{name}").status_code == 404, name


def test_a_list_says_whether_it_is_whole(tmp_path: Path) -> None:
    """To who asks for the first time, and to who asks with what an earlier board said; a run that was removed meanwhile
    is not in it."""
    for name in ("a", "b"):
        write_run(tmp_path / name)
    first, later = AskedBoard(tmp_path), AskedBoard(tmp_path)
    before = first.get("/api/runs")
    assert before["whole"] and len(before["runs"]) == 2
    news = first.get("/api/runs", {"after": before["cursor"]})
    assert not news["whole"] and news["runs"] == []
    shutil.rmtree(tmp_path / "a")
    after = later.get("/api/runs", {"after": before["cursor"]})
    assert after["whole"] and [row["name"] for row in after["runs"]] == ["b"]


def told(page: Any) -> str:
    """What the page says, as people see it."""
    return page.locator("main").inner_text()


def test_the_page_lists_a_run_and_nothing_is_refused_by_its_policy(chromium: Any, tmp_path: Path) -> None:
    """A run with a hostile name is in the list and has a curve; no script raises, and the address keeps no token."""
    write_run(tmp_path / UGLY.replace("/", "|"))
    with board(tmp_path) as url, visitor(chromium) as guest:
        page = guest.page
        page.goto(url)
        page.get_by_role("rowheader", name=UGLY).wait_for()
        assert "done" in told(page) and "token" not in page.url
        page.locator(".spark polyline[points*=',']").wait_for()
        guest.press("link", UGLY)
        page.get_by_role("group", name=re.compile("^loss by step")).wait_for()
        page.wait_for_function("() => document.querySelector('.told').textContent.includes('1.5')")
        assert page.evaluate("window.hit") is None
        guest.expect_no_faults()


@pytest.mark.soak
def test_an_address_with_the_token_works_where_the_page_is_open(chromium: Any, tmp_path: Path) -> None:
    """A change of the fragment alone loads nothing anew."""
    write_run(tmp_path / "a")
    with board(tmp_path) as url, visitor(chromium) as guest:
        page = guest.page
        page.goto(url.partition("#")[0])
        page.get_by_text("the token is missing or wrong").wait_for()
        page.goto(url)
        page.get_by_role("rowheader", name="a").wait_for()
        assert page.url.endswith("#/runs") and page.locator("#trouble").is_hidden()


CROSSES = """
window.crosses = new Set();
const move = CanvasRenderingContext2D.prototype.moveTo;
CanvasRenderingContext2D.prototype.moveTo = function (x, y) {
  if (y === 5) window.crosses.add(x);
  move.call(this, x, y);
};
"""


@pytest.mark.soak
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("steps", [400, 10_000])
def test_what_a_chart_says_does_not_depend_on_the_window(chromium: Any, tmp_path: Path, width: int, steps: int) -> None:
    """The value at its title is the last row's own, and where a value is no number there is a cross, also where a pixel
    has several rows."""
    with sf.observe.Run(tmp_path / "a", config={}, steps=steps) as run:
        for step in range(1, steps + 1):
            run.write({"step": step, "loss": math.nan if step % 10 == 0 else 1.0 / step, "accuracy": step / steps})
    with board(tmp_path) as url, visitor(chromium, width=width) as guest:
        page = guest.page
        page.add_init_script(CROSSES)
        page.goto(url)
        guest.press("link", "a")
        drawn(guest, "accuracy", "step")
        assert page.locator(".chart .told").all_inner_texts() == ["NaN", "1"]
        page.wait_for_timeout(300)
        if steps < 1000:
            assert page.evaluate("crosses.size") >= 2 * 30
        guest.expect_no_faults()


TEXTS = """
window.texts = new Map();
const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const side = this.textAlign === "right" ? "up" : "across";
  const key = this.canvas.closest(".chart").querySelector("h2").textContent + " " + side;
  if (!texts.has(key)) texts.set(key, []);
  texts.get(key).push([text, side === "up" ? x - this.measureText(text).width : y]);
  fill.call(this, text, x, y);
};
"""


@pytest.mark.soak
def test_marks_of_a_chart_differ_and_fit(chromium: Any, tmp_path: Path) -> None:
    """Also where values differ by little, and where a zoom shows few steps of many: steps are whole."""
    with sf.observe.Run(tmp_path / "a", config={}, steps=20_000) as run:
        for step in range(12_340, 12_344):
            rows = {
                "loss": 5.586 - step % 7 / 1e3,
                "lr": 2e-5 - step % 5 * 1e-9,
                "memory_bytes": 2**29 + 2**19 * (step % 3),
            }
            run.write({"step": step, **rows})
    with board(tmp_path) as url, visitor(chromium, width=390) as guest:
        page = guest.page
        page.add_init_script(TEXTS)
        page.goto(url)
        guest.press("link", "a")
        drawn(guest, "learning rate", "step")
        page.wait_for_timeout(300)
        page.evaluate("texts.clear()")
        page.set_viewport_size({"width": 380, "height": 844})
        page.wait_for_function("() => texts.size >= 6")
        page.wait_for_timeout(300)
        found = page.evaluate("() => Object.fromEntries(texts)")
        assert {name.rpartition(" ")[0] for name in found} == {"loss", "learning rate", "memory"}
        for name, marks in found.items():
            words = [text for text, _ in marks]
            words = words[: len(words) // max(1, words.count(words[0]))]  # what is painted again
            assert len(words) > 1 and len(set(words)) == len(words), (name, words)
            assert all(place >= 0 for _, place in marks), (name, marks)
            if name.endswith("across"):
                assert not [word for word in words if float(word.rstrip("k")) * 1000 % 1 > 1e-6], words


@pytest.mark.soak
def test_what_is_refused_leaves_what_was_typed(chromium: Any, tmp_path: Path, runs: Path) -> None:
    """A name that is none: its sentence stands beside the form until it is mended. No page is shown of a run that is
    none, and no settings that nobody found."""
    (tmp_path / "text").write_text("a text\n" * 1000)
    given = json.dumps({"data": str(tmp_path / "text"), "steps": 2})
    with board(runs) as url, visitor(chromium) as guest:
        page = guest.page
        page.goto(url)
        page.goto(url.partition("#")[0] + f"#/new?recipe=lm&set={quote(given)}")
        page.locator("pre", has_text="--steps").wait_for()
        guest.write("Find a setting", "zzz")
        page.get_by_text("No setting is like that.").wait_for()
        guest.write("Find a setting", "")
        assert page.locator("details[open]").count() < page.locator("details").count()
        guest.write("Name of its folder", "no name")
        page.keyboard.press("Enter")
        sentence = page.get_by_text("a run's name has letters")
        sentence.wait_for()
        assert (
            page.url.partition("#")[2].startswith("/new")
            and page.get_by_label("Name of its folder").input_value() == "no name"
        )
        guest.write("Name of its folder", "name")
        guest.write("Host file", "my hosts")
        sentence.wait_for(state="hidden")
        page.wait_for_function("() => location.hash.includes('name=name&hosts=my+hosts')")
        page.reload()
        page.locator("pre", has_text="--steps").wait_for()
        assert page.get_by_label("Name of its folder").input_value() == "name"
        assert page.get_by_label("Host file").input_value() == "my hosts"
        page.goto(url.partition("#")[0] + "#/run/nothing")
        page.get_by_text("there is no such run").wait_for()
        page.get_by_role("navigation", name="Parts of the run").wait_for(state="hidden")


@pytest.mark.soak
def test_a_form_says_what_a_recipe_is_and_keeps_changes_in_sight(chromium: Any, runs: Path) -> None:
    with board(runs) as url, visitor(chromium) as guest:
        page = guest.page
        page.goto(url)
        guest.press("link", "New run")
        page.get_by_text("A language model of bytes").wait_for()
        guest.choose("Recipe", "dpo")
        page.get_by_text("Direct preference optimization").wait_for()
        guest.choose("Recipe", "lm")
        for name, value in (("save every", "5"), ("lr", "0.5")):
            guest.write("Find a setting", name)
            guest.write(name, value)
        guest.write("Find a setting", "eps")
        guest.write("Find a setting", "")
        assert page.get_by_label("lr", exact=True).is_visible() and page.get_by_label("save every").is_visible()
        assert not page.get_by_label("precision", exact=True).is_visible()


@pytest.mark.soak
def test_a_plan_says_that_it_measures_and_is_cancelled(
    chromium: Any, tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with board(runs) as url, visitor(chromium) as guest:
        page = guest.page
        page.goto(url)
        guest.press("link", "New run")
        page.locator("pre", has_text="shardfold train").wait_for()
        guest.press("button", "Plan")
        page.get_by_text("This machine is measured first").wait_for()
        guest.press("button", "Cancel")
        page.get_by_text("The plan was cancelled.").wait_for()
        assert page.get_by_role("button", name="Plan").is_enabled()
        guest.expect_no_faults()


@pytest.mark.soak
def test_runs_that_go_on_are_compared_by_what_was_held_out(chromium: Any, tmp_path: Path, runs: Path) -> None:
    """Not by the loss of the last step, which is a matter of its rows; and the list has it."""
    held = {"first": 1.5, "second": 1.25}
    with (
        sf.observe.Run(runs / "first", config={}, steps=90) as first,
        sf.observe.Run(runs / "second", config={}, steps=90) as second,
        board(runs) as url,
        visitor(chromium) as guest,
    ):
        for run, name in ((first, "first"), (second, "second")):
            for step in range(1, 41):
                late = 0.1 if name == "first" and step == 40 else held[name]
                run.log(step, loss=late, held_out_bits_per_byte=held[name] if step == 20 else None)
        page = guest.page
        page.goto(url)
        row = page.locator("tr", has=page.get_by_role("rowheader", name="second"))
        row.get_by_text("1.25 bits/byte").wait_for()
        for name in held:
            guest.press("checkbox", f"Compare {name}")
        guest.press("link", "Compare 2 runs")
        table = page.get_by_role("table", name="Results")
        cells = {
            line.split("\t")[0]: ["".join(cell.split()) for cell in line.split("\t")[1:]]
            for line in (table.wait_for(), table.locator("tr").all_inner_texts())[1]
        }
        assert cells["loss of the last step"] == ["0.1", "1.25"]
        assert cells["loss, mean of the last 32 steps"][1] == "1.25(best)"
        assert cells["bits per byte, held out"] == ["1.5", "1.25(best)"]
        assert cells["held out at step"] == ["20", "20"]


# -- one way through all of it


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("width", "scheme", "keys"),
    [(1280, "light", False), (390, "light", False), (1280, "dark", True), (390, "dark", True)],
)
def test_a_run_is_made_watched_stopped_resumed_compared_and_talked_to(
    chromium: Any, tmp_path: Path, runs: Path, width: int, scheme: str, keys: bool
) -> None:
    """From an empty list to a conversation with what was trained."""
    model, data = model_folder(tmp_path / "base"), write_rows(tmp_path / "chats.jsonl", chats(64))
    with board(runs, "--gpus=4090") as url, visitor(chromium, width=width, scheme=scheme, keys=keys) as guest:
        page = guest.page
        page.goto(url)
        page.get_by_text("There are no runs here yet.").wait_for()
        guest.expect_accessible()
        guest.press("link", "Start one")

        guest.choose("Recipe", "sft")
        needed = page.locator("[aria-required=true]").evaluate_all("(all) => all.map((each) => each.id)")
        assert needed == ["field-model", "field-data"]
        settings = {"model": model, "data": data, "steps": 3000, "save every": 500, "procs": 2, "text.length": 64}
        for name, value in settings.items():
            guest.write("Find a setting", name)
            guest.write(name, str(value))
        guest.write("Find a setting", "steps")
        guest.write("steps", "many")
        page.locator(".error", has_text="many").wait_for()
        guest.expect_accessible()
        guest.write("steps", "3000")
        page.locator("pre", has_text="--steps").wait_for()
        guest.press("button", "Plan")
        page.locator(".plan b, .plan .refused").wait_for(timeout=PLANS)
        planned = page.locator(".plan").inner_text()
        assert re.match("It (fits|does not fit)", planned), planned
        page.reload()
        page.locator("pre", has_text="--steps").wait_for()
        guest.press("button", "Start")

        page.locator("main .badge", has_text="training").first.wait_for(timeout=BEGINS)
        page.wait_for_function("() => /[0-9]/.test(document.querySelector('.chart .told')?.textContent)")
        guest.expect_accessible()
        first = page.get_by_role("heading", level=1).inner_text()
        guest.press("button", "Stop")
        page.locator(".badge[data-state=stopped]").first.wait_for()

        guest.press("button", "Resume")
        guest.write("Ranks", "1")
        guest.act(page.locator("dialog button.main"))
        page.wait_for_function(
            "(first) => document.querySelector('h1').textContent !== first", arg=first, timeout=BEGINS
        )
        page.locator(".badge[data-state=training]").first.wait_for(timeout=BEGINS)
        second = page.get_by_role("heading", level=1).inner_text()
        assert page.locator("dd[data-name=ranks]").inner_text() == "1" and second == f"{first}-rest"
        guest.press("link", "Ranks and logs")
        page.get_by_role("table", name="Ranks").wait_for()
        guest.expect_accessible()
        guest.press("button", "Stop")
        page.locator(".badge[data-state=stopped]").first.wait_for()

        guest.press("link", "Runs")
        for name in (first, second):
            guest.press("checkbox", f"Compare {name}")
        guest.press("link", "Compare 2 runs")
        page.get_by_role("rowheader", name="procs").wait_for()
        page.wait_for_function("() => document.querySelector('.told').textContent.length > 0")
        guest.expect_accessible()

        guest.press("link", first)
        guest.press("button", "Chat")
        page.get_by_role("link", name="Open the chat").wait_for()
        guest.expect_accessible()
        key, address = (
            page.locator("dialog pre").inner_text(),
            page.get_by_role("link", name="Open the chat").get_attribute("href"),
        )
        guest.expect_no_faults()
        talk(guest, str(address), key)


def talk(guest: Visitor, address: str, key: str) -> None:
    """Say something to the server that the board started."""
    page = guest.page
    page.goto(address)
    page.get_by_text("Settings").click()
    page.get_by_label("Key").fill(key)
    page.get_by_label("Key").press("Tab")
    page.wait_for_function("() => document.getElementById('model').options.length > 0")
    page.get_by_label("Message").fill("red cat")
    page.get_by_label("Message").press("Enter")
    page.locator("article.assistant").wait_for()
    page.wait_for_function("() => document.getElementById('send').hidden === false")


# -- views with data of all kinds


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Two runs beside each other: the address of the board, and the folder."""
    folder = tmp_path_factory.mktemp("runs")
    for number, name in enumerate(("first", "second")):
        write_run(folder / name, number, prompts="same")
    with board(folder) as url:
        yield url, folder


def open_both(guest: Visitor, url: str) -> None:
    guest.page.goto(url)
    for name in ("first", "second"):
        guest.press("checkbox", f"Compare {name}")
    guest.press("link", "Compare 2 runs")
    guest.page.get_by_role("rowheader", name="lr", exact=True).wait_for()
    drawn(guest, "loss", "step")


def drawn(guest: Visitor, figure: str, axis: str) -> Any:
    """The chart of a figure, when it has lines."""
    found = guest.page.get_by_role("group", name=re.compile(f"^{re.escape(figure)} by {axis}, [^–]".replace("/", ".")))
    found.wait_for()
    return found


def values(guest: Visitor, figure: str = "loss") -> list[list[str]]:
    """The chart as a table: heads, and rows."""
    details = guest.page.locator("figure", has=guest.page.get_by_role("heading", name=figure, exact=True)).locator(
        "details"
    )
    if details.get_attribute("open") is None:
        details.locator("summary").click()
    details.locator("tbody tr").first.wait_for()
    rows = details.locator("tr")
    return [rows.nth(at).locator("th, td").all_inner_texts() for at in range(rows.count())]


def overlay_by_step(guest: Visitor, folder: Path) -> None:
    head, first, *_, last = values(guest)
    assert head == ["step", "first", "second"] and first[0] == "1" and last[0] == str(STEPS)
    for run in (0, 1):
        assert float(first[1 + run]) == pytest.approx(loss(run, 1), rel=1e-3)
        assert float(last[1 + run]) == pytest.approx(loss(run, STEPS), rel=1e-3)


def overlay_by_tokens(guest: Visitor, folder: Path) -> None:
    guest.choose("By", "tokens")
    drawn(guest, "loss", "tokens")
    assert values(guest)[-1][0] == "150k"  # 1000 tokens/s for 150 s


def overlay_by_time(guest: Visitor, folder: Path) -> None:
    guest.choose("By", "time")
    drawn(guest, "loss", "time")
    assert values(guest)[-1][0] == "2:30"


def smoothing(guest: Visitor, folder: Path) -> None:
    before = float(values(guest)[1 + 4][1])
    guest.page.get_by_label("Smoothing").fill("0.9")
    guest.page.wait_for_function("() => location.hash.includes('smooth=0.9')")
    guest.page.wait_for_timeout(100)
    assert float(values(guest)[1 + 4][1]) > before  # falling losses are smoothed from above


def logarithmic(guest: Visitor, folder: Path) -> None:
    guest.press("checkbox", "Logarithmic")
    guest.page.wait_for_function("() => location.hash.includes('log=1')")


def zoom_by_pointer(guest: Visitor, folder: Path) -> None:
    box = drawn(guest, "loss", "step").bounding_box()
    guest.page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    guest.page.mouse.down()
    guest.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
    guest.page.mouse.up()
    guest.page.get_by_role("button", name="Show all").wait_for()
    guest.page.wait_for_timeout(500)
    rows = values(guest)
    assert 80 < float(rows[1][0]) < 140 and 150 < float(rows[-1][0]) < 220
    guest.press("button", "Show all")
    guest.page.get_by_role("button", name="Show all").wait_for(state="hidden")
    guest.page.wait_for_timeout(500)
    assert values(guest)[1][0] == "1"


def zoom_by_keys(guest: Visitor, folder: Path) -> None:
    chart = drawn(guest, "loss", "step")
    chart.focus()
    guest.page.keyboard.press("Home")
    guest.page.keyboard.press("+")
    guest.page.get_by_role("button", name="Show all").wait_for()
    guest.page.wait_for_timeout(500)
    assert float(values(guest)[-1][0]) < STEPS / 2
    chart.focus()
    guest.page.keyboard.press("0")
    guest.page.get_by_role("button", name="Show all").wait_for(state="hidden")


def values_by_pointer(guest: Visitor, folder: Path) -> None:
    box = drawn(guest, "loss", "step").bounding_box()
    guest.page.mouse.move(box["x"] + 55, box["y"] + 60)
    tip = guest.page.locator(".tip:visible")
    tip.wait_for()
    assert re.search(r"step [12]\b", tip.inner_text()) and "first" in tip.inner_text() and "second" in tip.inner_text()


def values_by_keys(guest: Visitor, folder: Path) -> None:
    chart = drawn(guest, "loss", "step")
    chart.focus()
    guest.page.keyboard.press("End")
    guest.page.keyboard.press("ArrowLeft")
    said = guest.page.locator("figure [role=status]").first
    shown = f"{loss(0, STEPS - 1):.4g}"
    assert said.text_content() == f"step {STEPS - 1}: first {shown}, second {loss(1, STEPS - 1):.4g}"


def one_is_hidden(guest: Visitor, folder: Path) -> None:
    guest.press("checkbox", "Show second")
    guest.page.wait_for_function("() => document.querySelector('.told').textContent.length < 12")
    assert values(guest)[0] == ["step", "first"]


def one_is_dropped(guest: Visitor, folder: Path) -> None:
    guest.press("link", "Without second")
    guest.page.get_by_text("One run alone differs in nothing").wait_for()


def another_figure(guest: Visitor, folder: Path) -> None:
    guest.press("checkbox", "learning rate")
    guest.press("checkbox", "loss")
    drawn(guest, "learning rate", "step")
    assert values(guest, "learning rate")[1][1:] == ["0.1", "0.1"]


def two_figures(guest: Visitor, folder: Path) -> None:
    guest.press("checkbox", "tokens/s")
    drawn(guest, "tokens/s", "step")
    drawn(guest, "loss", "step")


def settings_that_differ(guest: Visitor, folder: Path) -> None:
    table = guest.page.get_by_role("table", name="Settings that differ")
    assert table.locator("tbody tr").all_inner_texts() == ["lr\t0.001\t0.002"]


def results(guest: Visitor, folder: Path) -> None:
    table = guest.page.get_by_role("table", name="Results")
    for name, cells in (("loss, held out", ["1(best)", "2"]), ("tokens/s", ["500", "1k(best)"])):
        row = table.locator("tr", has_text=name).inner_text().split("\t")
        assert ["".join(cell.split()) for cell in row[1:]] == cells, row


def bytes_by_state(guest: Visitor, folder: Path) -> None:
    table = guest.page.get_by_role("table", name="Bytes on rank 0")
    assert table.locator("tbody tr").all_inner_texts() == ["params, device\t1.00 MiB\t2.00 MiB"]


def samples_side_by_side(guest: Visitor, folder: Path) -> None:
    guest.choose("Step", "100")
    assert guest.page.locator(".answer .text").all_inner_texts() == ["run 0 at 100", "run 1 at 100"]


def figures_as_csv(guest: Visitor, folder: Path) -> None:
    with guest.page.expect_download() as download:
        guest.press("link", "CSV of first")
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    assert len(rows) == STEPS and float(rows[-1]["loss"]) == pytest.approx(loss(0, STEPS), rel=1e-5)


def reload(guest: Visitor, folder: Path) -> None:
    guest.choose("By", "time")
    guest.press("checkbox", "Show second")
    guest.page.reload()
    drawn(guest, "loss", "time")
    assert values(guest)[0] == ["time", "first"]


def second_browser(guest: Visitor, folder: Path) -> None:
    guest.choose("By", "tokens")
    address = guest.page.url
    guest.page.goto("about:blank")
    guest.page.goto(address)
    drawn(guest, "loss", "tokens")
    assert values(guest)[0] == ["tokens", "first", "second"]


def no_numbers(guest: Visitor, folder: Path) -> None:
    """Where a loss was none the table says so, and the line has a gap."""
    address = guest.page.url + "&from=195&to=215"
    guest.page.goto("about:blank")
    guest.page.goto(address)
    drawn(guest, "loss", "step")
    assert "NaN" in [row[2] for row in values(guest)] and "NaN" not in [row[1] for row in values(guest)]


def new_points_come(guest: Visitor, folder: Path) -> None:
    third = write_run(folder / "third", 2)
    try:
        guest.press("link", "Runs")
        guest.press("checkbox", "Compare third")
        guest.press("link", re.compile("^Compare [13]"), exact=False)
        drawn(guest, "loss", "step")
        with sf.observe.Run(third, steps=2 * STEPS) as run:
            for step in range(STEPS + 1, STEPS + 11):
                run.write({"step": step, "loss": 7.0, "lr": 0.1, "tokens_per_s": 1000.0, "seconds": 0.5 * step})
            guest.page.wait_for_function("() => /\\b7\\b|3 lines/.test(document.querySelector('.told').textContent)")
            guest.page.wait_for_timeout(2500)
        rows = values(guest)
        assert rows[-1][0] == str(STEPS + 10) and rows[-1][-1] == "7"
    finally:
        shutil.rmtree(third)


def one_is_gone(guest: Visitor, folder: Path) -> None:
    third = write_run(folder / "third", 2)
    guest.press("link", "Runs")
    guest.press("checkbox", "Compare third")
    guest.press("link", re.compile("^Compare [13]"), exact=False)
    guest.page.get_by_role("link", name="third", exact=True).wait_for()
    shutil.rmtree(third)
    guest.page.locator(".legend .badge[data-state=unknown]").wait_for()


JOURNEYS: list[Callable[[Visitor, Path], None]] = [
    overlay_by_step,
    overlay_by_tokens,
    overlay_by_time,
    smoothing,
    logarithmic,
    zoom_by_pointer,
    zoom_by_keys,
    values_by_pointer,
    values_by_keys,
    one_is_hidden,
    one_is_dropped,
    another_figure,
    two_figures,
    settings_that_differ,
    results,
    bytes_by_state,
    samples_side_by_side,
    figures_as_csv,
    reload,
    second_browser,
    no_numbers,
    new_points_come,
    one_is_gone,
]


@pytest.mark.soak
@pytest.mark.parametrize("journey", JOURNEYS, ids=lambda each: each.__name__)
def test_runs_are_compared(chromium: Any, compared: tuple[str, Path], journey: Callable[[Visitor, Path], None]) -> None:
    """Each from the list on, with the figures that the runs' files have."""
    url, folder = compared
    with visitor(chromium) as guest:
        open_both(guest, url)
        journey(guest, folder)
        if journey is not one_is_gone:  # which the console tells of
            guest.expect_no_faults()


@pytest.mark.soak
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_views_bear_all_data(chromium: Any, tmp_path: Path, width: int, scheme: str) -> None:
    """60 runs, long and hostile names, a run without figures and one that is lost: each view fits and is accessible."""
    for number in range(2):
        write_run(tmp_path / (UGLY.replace("/", "|") + str(number)), number)
    write_run(tmp_path / "plain")
    for number in range(60):
        shutil.copytree(tmp_path / "plain", tmp_path / f"sweep-{number}")
    lost = "import os, sys, shardfold as sf; run = sf.observe.Run(sys.argv[1], config={}, steps=9); os._exit(0)"
    subprocess.run([sys.executable, "-c", lost, str(tmp_path / "lost")], check=True, env={**os.environ})
    with board(tmp_path) as url, visitor(chromium, width=width, scheme=scheme) as guest:
        page = guest.page
        page.goto(url)
        page.get_by_role("rowheader", name=UGLY).first.wait_for()
        guest.expect_accessible()
        guest.press("link", UGLY + "1")
        for tab in ("Memory", "Samples", "Ranks and logs", "Checkpoints", "Settings", "Curves"):
            guest.press("link", tab)
            page.wait_for_function("() => document.querySelector('.body').children.length > 0")
            guest.expect_accessible()
        guest.press("link", "Runs")
        guest.write("Find", "lost")
        page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")
        guest.press("link", "lost")
        page.get_by_text("No steps yet.").wait_for()
        guest.expect_accessible()
        guest.press("link", "New run")
        page.get_by_label("Recipe").wait_for()
        guest.expect_accessible()
        guest.expect_no_faults()
