"""`make gpu`: the report, the time that sections have, sections that die, and whole rehearsals without a GPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfold.engine.peak_rate import PeakFlops
from shardfold.tools.bench.contenders import find
from shardfold.tools.bench.results import ContenderRow, MeasuredRounds
from shardfold.tools.bench.settings import Settings, gpt_shape
from tests.support.gpu import compared, day, marked, memory, races, section, steps, timeline
from tests.support.gpu.day import ROOT, run_section
from tests.support.gpu.report import FAILED, PASSED, SKIPPED, Case, Day, NotRun, Section, as_json, judged, markdown
from tests.support.gpu.section import CHECKS, SPEED, Asked, Clock, Notes, Outcome, Part, Skip
from tests.support.gpu.setting import rank_settings

CASE = Case(name="a case", verdict=PASSED, says="it went | well", figures={"peak": "3 MiB", "off": 0.01234567})


def _judged(*notes: dict[str, Any], ended: str | None = None, said: str = "") -> Section:
    return judged("races", "Races", notes, ended=ended, said=said, seconds=1.0, share=2.0)


def _note(**case: Any) -> dict[str, Any]:
    return {"case": {"name": "one", "verdict": PASSED, **case}}


def _day(*sections: Section) -> Day:
    return Day(title="1 x cuda", command="make gpu", date="today", seconds=3.0, limit=600.0, sections=sections)


# -- the report


def test_a_report_has_the_machine_each_section_and_what_was_not_run() -> None:
    """Every fact, verdict, figure and reason is in the text; a bar in a cell does not end it."""
    machine = _judged({"fact": "driver", "value": "580"}, {"fact": "variables", "value": {"NCCL_DEBUG": "INFO"}})
    bad = Case(name="bad", verdict=FAILED, says="losses differ", detail="Traceback\n  last line")
    found = Section(
        name="races", title="Races", verdict=FAILED, says="1 of 2 cases failed: bad.", seconds=1.0, share=2.0,
        cases=(CASE, bad), not_run=(NotRun(what="hpz", why="needs 4 ranks"),),
    )  # fmt: skip
    lines = markdown(_day(machine, found)).splitlines()
    assert lines[0] == "# 1 x cuda" and lines[2].startswith("**Failed** in 3 s of 600")
    for line in (
        "| driver | 580 |", "| variables | NCCL_DEBUG INFO |", "| Races | failed | 1 | 2 | 1 of 2 cases failed: bad. |",
        "| case | verdict | peak | off |  |", "| a case | passed | 3 MiB | 0.01235 | it went \\| well |",
        "| bad | failed |  |  | losses differ |", "      last line", "| Races | hpz | needs 4 ranks |",
    ):  # fmt: skip
        assert line in lines, line
    assert lines.index("| bad | failed |  |  | losses differ |") < lines.index(
        "| a case | passed | 3 MiB | 0.01235 | it went \\| well |"
    )


def test_the_json_has_what_the_text_has() -> None:
    """It can be read back, verdict, figures and reasons included."""
    found = json.loads(as_json(_day(_judged(_note(figures={"peak": 3}), {"not_run": {"what": "b", "why": "c"}}))))
    assert found["verdict"] == PASSED and found["sections"][0]["cases"][0]["figures"] == {"peak": 3}
    assert found["sections"][0]["not_run"] == [{"what": "b", "why": "c"}]


def test_a_section_is_judged_by_its_cases() -> None:
    """One failure fails it; what is skipped does not pass it; the sentence says which and why."""
    assert (_judged().verdict, _judged().says) == (SKIPPED, "Nothing ran.")
    assert _judged(_note()).says == "1 case passed."
    mixed = _judged(_note(), _note(name="two", verdict=SKIPPED), {"not_run": {"what": "three", "why": "no time"}})
    assert (mixed.verdict, mixed.says) == (PASSED, "1 case passed, 1 skipped. 1 thing not run, see below.")
    failed = _judged(_note(), *(_note(name=f"n{i}", verdict=FAILED) for i in range(5)))
    assert (failed.verdict, failed.says) == (FAILED, "5 of 6 cases failed: n0, n1, n2 and 2 more.")
    skipped = _judged({"not_run": {"what": "all", "why": "no streams"}})
    assert (skipped.verdict, skipped.says) == (SKIPPED, "Nothing ran: no streams.")


def test_a_process_that_died_is_a_failure_where_it_stood() -> None:
    """The case that had begun is named, with the end of what the process wrote; what was found before stays."""
    found = _judged(_note(), {"begins": "two"}, ended="was killed by SIGSEGV", said="Fatal Python error")
    assert found.verdict == FAILED and [case.name for case in found.cases] == ["one", "two"]
    assert found.cases[1].says == "was killed by SIGSEGV in 'two'" and found.cases[1].detail == "Fatal Python error"
    assert _judged(ended="ended with status 1").cases[0].says == "ended with status 1 before its first case"
    assert _day(_judged(_note()), found).verdict == FAILED


def test_what_is_told_again_is_newer() -> None:
    """A case that grows while a section runs is there once, with the figures that came last."""
    found = _judged(_note(figures={"step": 3}), _note(name="two"), _note(figures={"step": 2}))
    assert [(case.name, case.figures) for case in found.cases] == [("one", {"step": 2}), ("two", {})]


def test_further_lines_of_a_sentence_stand_below_the_table() -> None:
    """As the bars of a timeline do: they would break a cell."""
    out = StringIO()
    Notes(out, Clock(10.0)).attempt("a step", lambda: ("a sentence\nproducts ##", {}))
    (case,) = _judged(*map(json.loads, out.getvalue().splitlines())).cases
    assert (case.says, case.detail) == ("a sentence", "products ##")
    assert "    products ##" in markdown(_day(_judged({"case": vars(case)}))).splitlines()


# -- the time


def test_a_case_that_time_does_not_allow_is_named_and_not_begun() -> None:
    """Each case says how long it needs; what is too late is left out with the reason, and what can begin does."""
    now = [0.0]
    out = StringIO()
    notes = Notes(out, Clock(10.0, now=lambda: now[0]))

    def run() -> tuple[str, dict[str, Any]]:
        now[0] += 6.0
        return "", {}

    notes.attempt("first", run, needs=8.0)
    notes.attempt("long", run, needs=8.0)
    notes.attempt("short", run, needs=1.0)
    notes.attempt("late", run)
    found = _judged(*map(json.loads, out.getvalue().splitlines()))
    assert [case.name for case in found.cases] == ["first", "short"]
    assert found.not_run == tuple(NotRun(what=w, why="the 10 s of the section were over") for w in ("long", "late"))


def test_what_a_case_raises_is_its_verdict() -> None:
    """An outcome keeps its figures, a skip its reason, any other exception its traceback; the next case runs."""
    out = StringIO()
    notes = Notes(out, Clock(10.0))

    def raising(error: Exception) -> tuple[str, dict[str, Any]]:
        raise error

    notes.attempt("off", lambda: raising(Outcome("3 % off", "a table", off=0.03)))
    notes.attempt("absent", lambda: raising(Skip("no such kernel")))
    notes.attempt("broken", lambda: raising(KeyError("x")))
    notes.attempt("right", lambda: ("good", {"n": 1}))
    off, absent, broken, right = _judged(*map(json.loads, out.getvalue().splitlines())).cases
    assert (off.verdict, off.says, off.figures, off.detail) == (FAILED, "3 % off", {"off": 0.03}, "a table")
    assert (absent.verdict, absent.says) == (SKIPPED, "no such kernel")
    assert broken.verdict == FAILED and broken.says == "KeyError: 'x'" and "raising" in broken.detail
    assert (right.verdict, right.says, right.figures) == (PASSED, "good", {"n": 1})


DIES = """
import os, sys
sys.path.insert(0, {root!r})
from tests.support.gpu.report import Case
from tests.support.gpu.section import Clock, Notes
with open({file!r}, "a") as out:
    notes = Notes(out, Clock(1.0))
    notes.case(Case(name="one", verdict="passed"))
    notes.begins("two")
print("the last words", file=sys.stderr, flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV in 'two'"),
        ("os._exit(3)", "ended with status 3 in 'two'"),
        ("import threading; threading.Event().wait()", "did not end 1 s beyond its 1 s, and was killed in 'two'"),
    ],
)
def test_a_section_that_dies_or_hangs_leaves_what_it_found(tmp_path: Path, end: str, says: str) -> None:
    """A signal, an exit and a hang: each is one failed case, what was noted before is kept, and nothing outlives it."""
    program = DIES.format(root=str(ROOT), file=str(tmp_path / "races.jsonl"), end=end)
    asked = Asked(device="cpu", ranks=1, seconds=1.0 if "Event" in end else 60.0, folder=str(tmp_path), small=True)
    found = run_section("races", Part("Races", 1.0), asked, command=[sys.executable, "-c", program], grace=1.0)
    assert [(case.name, case.verdict) for case in found.cases] == [("one", PASSED), ("two", FAILED)]
    assert found.cases[1].says == says and "the last words" in found.cases[1].detail


WAITS = """
import os, sys
sys.path.insert(0, {root!r})
from tests.support.gpu.report import Case
from tests.support.gpu.section import Clock, Notes
with open({file!r}, "a") as out:
    Notes(out, Clock(1.0)).case(Case(name="one", verdict="passed"))
open({gate!r}).read()
"""


def test_what_a_section_has_found_is_told_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run that is cut short leaves a report: the first that is told ends the section."""
    monkeypatch.setattr(day, "OFTEN", 0.1)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    told: list[Section] = []

    def meanwhile(found: Section) -> None:
        if found.cases[0].name == "one" and not told:
            told.append(found)
            gate.write_text("go on")  # waits for the section to read it

    program = WAITS.format(root=str(ROOT), file=str(tmp_path / "races.jsonl"), gate=str(gate))
    asked = Asked(device="cpu", ranks=1, seconds=60.0, folder=str(tmp_path), small=True)
    command = [sys.executable, "-c", program]
    found = run_section("races", Part("Races", 1.0), asked, command=command, meanwhile=meanwhile)
    assert [case.name for case in told[0].cases] == ["one", "the rest"] and told[0].cases[1].verdict == SKIPPED
    assert [case.name for case in found.cases] == ["one"] and found.verdict == PASSED


# -- the sections


def test_every_section_has_a_module_that_runs_it() -> None:
    """And the shares of the time are those of a whole."""
    for parts in (CHECKS, SPEED):
        for name, part in parts.items():
            module = __import__(f"tests.support.gpu.{part.module or name}", fromlist=["run"])
            assert callable(getattr(module, "run", None)), name
        assert sum(part.share for part in parts.values()) == pytest.approx(1.0)
    assert {name for name, part in SPEED.items() if part.module == "steps"} == set(steps.WORKS)
    assert section.Asked(device="sim", ranks=2, seconds=1.0, folder="f", small=True).as_json()["ranks"] == 2


def test_one_gpu_is_tried_alone_and_shared() -> None:
    """One rank in a group of NCCL and two over Gloo; several GPUs in one group; more ranks than GPUs share them."""
    alone, shared = rank_settings("cuda", 1, 1)
    assert (alone.ranks, alone.backend, alone.shared) == (1, "nccl", False)
    assert (shared.ranks, shared.backend, shared.shared) == (2, None, True)
    (four,) = rank_settings("cuda", 4, 4)
    assert (four.ranks, four.backend, four.shared) == (4, None, False)
    (crowd,) = rank_settings("cuda", 4, 2)
    assert crowd.shared and not rank_settings("sim", 2, 0)[0].shared


def test_figures_of_a_contender_follow_from_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Throughput is tokens over seconds, utilization 6 operations for each token and parameter over the printed rate,
    and with attention 12 more for each position and dimension of a layer."""
    monkeypatch.setattr(steps, "peak_of", lambda *_: PeakFlops(1e12))
    settings = Settings(params=2e5, rows=2, context=16, ranks=2)
    measured = MeasuredRounds(settings=settings, contenders=[], first={"zero3": 1.26})
    row = ContenderRow("zero3", 0.02, 0, 0, 1.5, 0.005, 0, 1024.0, None, 2048.0, None, None, None, 0, None, None, None,
                       None, "float32")  # fmt: skip
    shape, rate = gpt_shape(2e5, 16), 2 * 16 / 0.02
    found = steps.figures(row, measured, Asked(device="cpu", ranks=2, seconds=1.0, folder="f", small=True))
    assert (found["tokens/s"], found["step, ms"], found["ratio"]) == (3200, 20.0, 1.5)
    assert found["MFU"] == f"{6 * shape.num_parameters * rate / 1e12:.1%}"
    whole = (6 * shape.num_parameters + 12 * shape.layers * shape.d_model * 16) * rate / 1e12
    assert found["with attention"] == f"{whole:.1%}" and found["peak"] == "2 KiB" and "moved" not in found
    assert (found["behind backward, ms"], found["first step, s"]) == (5.0, 1.3)


def test_what_cannot_take_part_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is absent, a precision that this version has not, and states that host memory has no room for."""
    asked = Asked(device="cpu", ranks=1, seconds=1.0, folder="f", small=True)
    settings = Settings(params=2e5, context=16, ranks=1)
    other = replace(find("fp8-zero3"), precision="fp2")
    assert steps.absent(other, settings, asked) == "this version has no precision 'fp2'"
    lacking = replace(find("deepspeed-2"), package="no_such_package")
    assert steps.absent(lacking, settings, asked) == "no_such_package is not installed"
    assert steps.absent(find("bare"), settings, replace(asked, device="sim"))
    assert steps.absent(find("bare"), settings, asked) is None
    monkeypatch.setattr(steps, "available_bytes", lambda: 128 * 2.0**30)
    work, large = steps.WORKS["steps-7B"], replace(settings, params=6.5e9, context=2048)
    assert steps.no_room(work, large, [find("zero2-host")]) is None
    why = steps.no_room(work, large, [find("torch-fsdp2-host")])
    assert why == "about 115.4 GiB of host memory are needed, and 128 GiB can be had"


def test_a_lane_of_text_shows_when_it_is_busy() -> None:
    """A column is busy for more than half of its time, at all, or not."""
    lines = timeline.bars({"products": [(0.0, 250.0)], "idle": [(250.0, 254.0), (999.0, 1000.0)]}, 1000.0)
    assert lines.splitlines() == ["products " + 25 * "#", "idle     " + 25 * " " + "." + 73 * " " + "."]


def test_losses_are_compared_as_wholes() -> None:
    """What is not finite or is missing is as far away as can be."""
    assert races.worst([2.0, 1.0], [2.0, 1.1]) == pytest.approx(0.1)
    assert races.worst([1.0], [math.nan]) == races.worst([1.0, 2.0], [1.0]) == math.inf
    assert memory.difference(3.0, 2.0) == 0.5


def test_the_marked_files_are_those_with_the_mark() -> None:
    assert {file.name for file in marked.marked_files()} == {"test_gpu.py", "test_data.py"}


def test_a_peer_that_fails_is_no_failure_of_ours() -> None:
    """Of the contenders of the benchmark ours have to run; a peer's failure is told and counts as skipped."""
    failure = {"reason": "rank 0 died", "said": "no backend"}
    row = {"name": "zero3", "step": 0.0123, "ratio": 1.5, "held": 1024.0, "peak": None}
    record = {"rows": [row], "reference": "bare", "failures": {"torch-ddp": failure, "ddp": failure}}
    zero3, peer, ours = compared.cases("gpt", record)
    assert zero3.figures == {"step, ms": 12.3, "ratio": 1.5, "held": "1 KiB"} and zero3.verdict == PASSED
    assert (peer.verdict, ours.verdict) == (SKIPPED, FAILED) and peer.says == "rank 0 died"


# -- rehearsals


def _rehearsed(folder: Path, device: str, ranks: int, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.support.gpu", "--device", device, "--ranks", str(ranks)]
    done = subprocess.run(
        [*command, "--out", str(folder), *more], cwd=ROOT, capture_output=True, text=True, check=False, timeout=800
    )
    assert (folder / "report.md").exists(), done.stderr
    found = json.loads((folder / "report.json").read_text())
    assert done.returncode == (found["verdict"] == FAILED), done.stdout
    return found


@pytest.mark.soak
def test_a_machine_without_a_gpu_is_told_how_to_rehearse(tmp_path: Path) -> None:
    """Before anything runs."""
    command = [sys.executable, "-m", "tests.support.gpu", "--device", "xpu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and "make gpu DEVICE=sim" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    """What needs no device runs: the machine, products in fp8, the benchmark; the others say why they do not."""
    found = _rehearsed(tmp_path, "cpu", 1)
    verdicts = {each["name"]: each["verdict"] for each in found["sections"]}
    needs_a_device = dict.fromkeys(("waits", "memory", "plans", "races", "requests", "codes", "marked"), SKIPPED)
    runs = dict.fromkeys(("machine", "products", "compared"), PASSED)
    assert verdicts == {**runs, **needs_a_device}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_rehearsal_of_the_speed_on_the_cpu(tmp_path: Path) -> None:
    """Where no device is found all sections run, in sizes of a rehearsal; what is not measured here says why."""
    found = _rehearsed(tmp_path, "auto" if not torch.accelerator.is_available() else "cpu", 1, "--speed")
    by = {each["name"]: each for each in found["sections"]}
    assert {name: each["verdict"] for name, each in by.items()} == dict.fromkeys(SPEED, PASSED)
    for name in ("steps-200M", "steps-1.3B", "steps-7B", "compile"):
        cases, left = by[name]["cases"], {each["what"] for each in by[name]["not_run"]}
        ran = {case["name"] for case in cases if case["figures"].get("tokens/s")}
        assert ran == set(steps.WORKS[name].contenders) - left, cases
        assert {"zero3", "zero2-host"} & ran, cases
    assert any("products" in case["name"] for case in by["rates"]["cases"])
    assert (tmp_path / "timeline-1.png").exists() == (find_spec("matplotlib") is not None)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rehearsal_on_the_simulated_device(tmp_path: Path, ranks: int) -> None:
    """Every section runs and passes, so that on a GPU they fail for its reasons alone."""
    found = _rehearsed(tmp_path, "sim", ranks, "--minutes", "12")
    failed = [(each["name"], case["name"], case["says"]) for each in found["sections"] for case in each["cases"]
              if case["verdict"] == FAILED]  # fmt: skip
    skipped = {each["name"] for each in found["sections"] if each["verdict"] != PASSED}
    assert not failed and skipped == {"codes"}  # which the processor would compute on both sides
