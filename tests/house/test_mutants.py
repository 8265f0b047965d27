"""The runner of faults tells who notices; the list of faults fits the sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import COLLECTED
from tests.support import mutants
from tests.support.mutants import Fault, WrongFault

TOTAL = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n"
TEST = """from tiny import total

def test_of_two():
    assert total([2, 3]) == 5

def test_of_none():
    assert total([]) == 0
"""
CAUGHT = Fault(
    "the last counts only", "__init__.py", "result += value", "result = value", ("test_tiny.py::test_of_two",)
)
MISSED = Fault("the same again", "__init__.py", "result += value", "result = value", ("test_tiny.py::test_of_none",))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A checkout with a package of one function."""
    for name, text in {"src/tiny/__init__.py": TOTAL, "tests/test_tiny.py": TEST}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_listed_fault_fits_the_sources() -> None:
    """A text that has moved, or a test of another name, is told here and not after an hour."""
    faults = mutants.read()
    assert len(faults) >= 60
    mutants.check(faults)


def test_what_is_no_python_is_noticed_by_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = Fault("broken", "__init__.py", "result = 0", "result =", CAUGHT.tests)
    assert mutants.run([fault], root=tiny, package="src/tiny", first=False) == 1
    assert "SURVIVED is no Python" in capsys.readouterr().out


def test_every_case_that_a_fault_names_is_there(request: pytest.FixtureRequest) -> None:
    """Of the files that this run looks at as a whole: a case that is not there fails, and so would notice nothing."""
    if any("::" in each for each in request.config.args):
        pytest.skip("single tests were asked for")
    cases = request.config.stash[COLLECTED]
    tests, files = {case.partition("[")[0] for case in cases}, {case.partition("::")[0] for case in cases}
    named = {f"tests/{test}" for fault in mutants.read() for test in fault.tests}
    assert not [test for test in named if test.partition("::")[0] in files and test not in cases | tests | files]


def test_what_no_test_notices_survives_and_the_sources_stay(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Faults are put in one at a time, in a copy; the control runs first."""
    assert mutants.run([CAUGHT, MISSED], root=tiny, package="src/tiny", jobs=2) == 1
    out = capsys.readouterr().out
    assert "control: 2 passed" in out and "caught by test_tiny.py::test_of_two" in out
    assert "2 faults, 1 caught, 1 survived" in out and "survived: __init__.py: the same again" in out
    assert (tiny / "src/tiny/__init__.py").read_text() == TOTAL


@pytest.mark.soak
def test_a_control_that_fails_ends_the_run(tiny: Path) -> None:
    """A test that fails by itself would notice every fault."""
    (tiny / "src/tiny/__init__.py").write_text(TOTAL.replace("+=", "="))
    fault = Fault("none", "__init__.py", "result = 0", "result = 1", CAUGHT.tests)
    with pytest.raises(WrongFault, match="the control, which has no fault, failed"):
        mutants.run([fault], root=tiny, package="src/tiny")


@pytest.mark.parametrize(
    ("old", "new", "tests", "words"),
    [
        ("absent", "", CAUGHT.tests, "is there 0 times"),
        ("result", "", CAUGHT.tests, "is there 3 times"),
        ("result = 0", "result = 0", CAUGHT.tests, "is the new text too"),
        ("result = 0", "result = 1", ("test_tiny.py::test_of_three",), "there is no test"),
        ("result = 0", "result = 1", (), "no test is named"),
    ],
)
def test_a_fault_that_does_not_fit_is_refused(
    tiny: Path, old: str, new: str, tests: tuple[str, ...], words: str
) -> None:
    """One sentence for each, before anything runs."""
    with pytest.raises(WrongFault, match=words):
        mutants.run([Fault("wrong", "__init__.py", old, new, tests)], root=tiny, package="src/tiny")


def test_the_list_is_shown_and_searched() -> None:
    """``--list`` runs nothing; words choose, and parts are all of it."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", mutants.__name__, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=mutants.ROOT)

    shown = run("--list", "numerics/clipping.py").stdout.splitlines()
    assert len(shown) > 1 and all(line.startswith("numerics/clipping.py") for line in shown)
    parts = [run("--list", "--part", f"{k}/2", "numerics/clipping.py").stdout.splitlines() for k in (1, 2)]
    assert parts == [shown[::2], shown[1::2]]
    assert run("--lis").returncode == 2
