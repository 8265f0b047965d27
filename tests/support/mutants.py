"""Puts listed faults into a copy of the package, one at a time, and tells whether tests notice: `make mutants`.

A fault is one entry of `mutants.toml` beside this file: a file of the package, a text that stands in it once, what it
becomes, and the tests that have to fail. Nothing in the checkout is changed. A control without a fault runs all of
these tests first: a test that fails by itself notices nothing.

    python -m tests.support.mutants                 all faults; exit status 1 if one survives
    python -m tests.support.mutants clip optim/     those whose description, file or tests contain one of these words
    python -m tests.support.mutants --part 3/12     the third of twelve parts of them
    python -m tests.support.mutants --list          what there is
    python -m tests.support.mutants --no-control    leaves the control out
    JOBS=2                                  so many faults at a time
"""

from __future__ import annotations

import argparse
import ast
import importlib
import multiprocessing
import os
import queue
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from tests.support.selection import part_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGE = "src/shardfold"
LISTED = Path(__file__).with_name("mutants.toml")
COPIED = ("src", "tests", "docs", "examples", "README.md", "CHANGELOG.md", "pyproject.toml", "Makefile", ".ci")
LIMIT = 900.0  # seconds for the tests of one fault
NOTICED, ENDED = (1,), (-9, -6, -11)  # pytest's status where tests failed; signals that a fault may end it by
NONE_RAN = 5  # pytest's status where no test has the marks
NOT_BEGUN = 99  # of a process in which pytest itself failed

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["psutil", "pytest", "torch"])  # once, not for each fault


class WrongFault(Exception):
    """The list does not fit the sources."""


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    Attributes:
        what: in a few words.
        file: inside of the package.
        old, new: the text, which the file has exactly once, and what replaces it.
        tests: what has to fail, as pytest names it, below ``tests/``.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def put_into(self, text: str) -> str:
        """
        Raises:
            WrongFault: the old text is not there exactly once, or the new one is the same.
        """
        found = text.count(self.old)
        if found != 1 or self.new == self.old:
            said = f"is there {found} times" if found != 1 else "is the new text too"
            raise WrongFault(f"{self.file}: {self.what}: {self.old.strip()!r} {said}; it must be there exactly once.")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    fault: Fault
    caught: bool
    by: str
    seconds: float
    soak: bool = False  # whether only tests of the soak did


def read(path: Path = LISTED) -> list[Fault]:
    """The listed faults.

    Raises:
        WrongFault: an entry lacks something, has something else, or is there twice.
    """
    faults: list[Fault] = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
        tests: Any = entry.get("tests", [])
        given = {**entry, "tests": (tests,) if isinstance(tests, str) else tuple(tests)}
        try:
            faults.append(Fault(**given))
        except TypeError as error:
            raise WrongFault(f"{path.name}: {entry}: {error}") from None
    names = [fault.what for fault in faults]
    if twice := {name for name in names if names.count(name) > 1}:
        raise WrongFault(f"{path.name}: twice: {', '.join(sorted(twice))}")
    return faults


def check(faults: Iterable[Fault], root: Path = ROOT, package: str = PACKAGE) -> None:
    """
    Raises:
        WrongFault: some do not apply, or name tests that are not there; all are listed.
    """
    wrong: list[str] = []
    for fault in faults:
        try:
            fault.put_into((root / package / fault.file).read_text(encoding="utf-8"))
        except (OSError, WrongFault) as error:
            wrong.append(str(error))
        for test in fault.tests:
            name, _, function = test.partition("::")
            path = root / "tests" / name
            if not path.is_file() or (function and f"def {function.split('[')[0]}(" not in path.read_text()):
                wrong.append(f"{fault.file}: {fault.what}: there is no test {test}.")
        if not fault.tests:
            wrong.append(f"{fault.file}: {fault.what}: no test is named.")
    if wrong:
        raise WrongFault("\n".join(wrong))


class Tree:
    """A copy of the checkout, whose package is imported instead of the installed one."""

    def __init__(self, root: Path, package: str, parent: str) -> None:
        self.folder, self._root, self._package = Path(tempfile.mkdtemp(dir=parent)), root, package
        for name in COPIED:
            source = root / name
            if source.is_dir():
                shutil.copytree(source, self.folder / name, ignore=shutil.ignore_patterns("*.egg-info"))
            elif source.exists():
                shutil.copy2(source, self.folder / name)

    def run(self, tests: Sequence[str], marks: str = "") -> tuple[int, str]:
        """Pytest's exit status and output."""
        said = self.folder / "said.txt"
        command = ["-q", "-x", "-m", marks, "-p", "no:cacheprovider", *tests]
        process = FORKED.Process(target=_pytest, args=(str(self.folder), self._package, str(said), command))
        process.start()
        process.join(LIMIT)
        if process.exitcode is None:
            process.kill()
            process.join()
            return 1, "FAILED (no end)"
        return process.exitcode, said.read_text(encoding="utf-8", errors="replace")

    def try_out(self, fault: Fault) -> Result:
        """Whether the fault's tests fail with it: those of `make test`, or else those of the soak."""
        path = self.folder / self._package / fault.file
        text, begun = fault.put_into(path.read_text(encoding="utf-8")), time.monotonic()
        try:
            ast.parse(text if path.suffix == ".py" else "")
        except SyntaxError as error:  # which every test would notice
            return Result(fault, False, f"is no Python: {error}", 0.0)
        path.write_text(text, encoding="utf-8")
        try:
            tests = [f"tests/{test}" for test in fault.tests]
            status, text = self.run(tests, "not soak")
            if soak := status in (0, NONE_RAN):
                status, text = self.run(tests, "soak")
        finally:
            shutil.copy2(self._root / self._package / fault.file, path)
        if status not in (0, NONE_RAN, *NOTICED, *ENDED):  # it has not run the tests, so they have not noticed anything
            return Result(fault, False, f"pytest ended with {status}: {text.strip()[-300:]}", time.monotonic() - begun)
        caught = status not in (0, NONE_RAN)
        return Result(fault, caught, noticed_by(text) if caught else "", time.monotonic() - begun, soak=soak)


def _pytest(folder: str, package: str, said: str, command: list[str]) -> None:
    """Pytest in a copy, as a process of its own would run it: what it has imported has nothing of this project."""
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    source = str(Path(folder, package).parent)
    # Compiled files stay with the copy. One of a faulty file is of its second, and no two faults share one.
    os.environ.update(PYTHONPATH=source, PYTHONDONTWRITEBYTECODE="")
    sys.dont_write_bytecode = False
    own = {str(ROOT), str(ROOT / "src"), ""}
    sys.path[:] = [folder, source, *(path for path in sys.path if path not in own)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "shardfold")]:
        del sys.modules[name]
    # Ranks and helpers of the tests are this process's, not those of the one that it was forked from.
    for module, kind in ((forkserver, "ForkServer"), (resource_tracker, "ResourceTracker")):
        fresh = getattr(module, kind)()
        for each in ("ensure_running", "register", "unregister", "get_inherited_fds", "connect_to_new_process",
                     "set_forkserver_preload", "getfd"):  # fmt: skip
            if hasattr(module, each):
                setattr(module, each, getattr(fresh, each))
        setattr(module, f"_{module.__name__.rpartition('.')[2]}", fresh)
    status = NOT_BEGUN
    try:
        status = int(importlib.import_module("pytest").main(command))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def noticed_by(text: str) -> str:
    """The test that failed first, without its folder."""
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", text, re.MULTILINE)
    return found.group(1) if found else "the end of the process"


def control(tree: Tree, faults: Sequence[Fault]) -> None:
    """
    Raises:
        WrongFault: a named test fails without a fault.
    """
    tests = sorted({f"tests/{test}" for fault in faults for test in fault.tests})
    status, text = tree.run(tests)
    if status:
        raise WrongFault(f"the control, which has no fault, failed (status {status}):\n{text[-3000:]}")
    print(f"control: {text.strip().splitlines()[-1].strip('= ')}", flush=True)


def run(
    faults: Sequence[Fault], *, root: Path = ROOT, package: str = PACKAGE, jobs: int = 1, first: bool = True
) -> int:
    """Tries all; the number of those that survived.

    Raises:
        WrongFault: the list does not fit the sources, or the control fails.
    """
    check(faults, root, package)
    with tempfile.TemporaryDirectory(prefix="mutants-") as parent:
        trees: queue.Queue[Tree] = queue.Queue()
        for _ in range(jobs):
            trees.put(Tree(root, package, parent))
        if first:
            tree = trees.get()
            control(tree, faults)
            trees.put(tree)

        def one(fault: Fault) -> Result:
            tree = trees.get()
            try:
                result = tree.try_out(fault)
            finally:
                trees.put(tree)
            said = f"caught by {result.by}" if result.caught else f"SURVIVED {result.by}"
            said += " (of the soak)" if result.caught and result.soak else ""
            print(f"{fault.file:<32} {fault.what:<58} {result.seconds:6.1f} s  {said}", flush=True)
            return result

        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(one, faults))
    survivors = [result for result in results if not result.caught]
    soak = sum(result.soak for result in results if result.caught)
    by = f" ({soak} by the soak only)" if soak else ""
    print(f"{len(results)} faults, {len(results) - len(survivors)} caught{by}, {len(survivors)} survived")
    for result in survivors:
        print(f"  survived: {result.fault.file}: {result.fault.what} ({', '.join(result.fault.tests)})")
    return len(survivors)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.mutants", description="Tries listed faults.", allow_abbrev=False
    )
    parser.add_argument("words", nargs="*", help="of the description, file or tests of a fault; none: all faults")
    parser.add_argument("--part", type=part_of, default=slice(None), metavar="K/N", help="the K-th of N parts of them")
    parser.add_argument("--list", action="store_true", help="print them only")
    parser.add_argument("--no-control", action="store_true", help="without the control")
    given = parser.parse_args(arguments)
    try:
        faults = [
            fault
            for fault in read()
            if not given.words
            or any(word in f"{fault.what} {fault.file} {' '.join(fault.tests)}" for word in given.words)
        ][given.part]
        if given.list:
            for fault in faults:
                print(f"{fault.file:<32} {fault.what:<58} {', '.join(fault.tests)}")
            return 0
        return int(run(faults, jobs=int(os.environ.get("JOBS", "1")), first=not given.no_control) > 0)
    except WrongFault as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
