"""Takes every synchronization of streams out of a copy of the package, one at a time, and tells what notices.

`synchronizations.toml` beside this file lists them all: each is one text of the sources, what it becomes, the case of
`device_cases.py` that runs through it, and what finds that it is gone, or why nothing can.

    check       the simulated device's checker reports a race, or a wait of the host
    lazy        the losses are others where the device stays behind and takes its streams in a random order

    python tests/support/synchronizations.py            all of them, in a table; exit status 1 if one is not as listed
    python tests/support/synchronizations.py host.py    those whose description, file or case has one of these words
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.mutants import PACKAGE, ROOT, Fault, Tree, WrongFault

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LISTED = Path(__file__).with_name("synchronizations.toml")
WAYS = ("check", "lazy")
LIMIT = 300.0  # seconds for one case, both ways

CALLS = (
    "wait_stream",
    "wait_event",
    "record_event",
    "record_stream",
    "used_here",
    "after_compute",
    "side",
    "synchronize",
)
"""Methods and functions that order streams, or let the host wait for one."""
FUNCTIONS = ("drain", "waiter")
"""What waits for collectives."""
NO_STREAMS = ("buffers",)  # whose `synchronize` is something else
WORDS = re.compile("|".join((*CALLS, *FUNCTIONS, r"accelerator\s*\.\s*on\b", r"\.\s*wait\b")))
# The simulated device's own, and DeepSpeed's interface for devices, where streams are the caller's.
LEFT_OUT = ("testing/simulated/", "compat/")


@dataclass(frozen=True)
class Entry:
    """One synchronization.

    Attributes:
        what: goes wrong without it, in a few words.
        file: inside of the package.
        old, new: the text, which the file has exactly once, and what is there without it.
        case: one of `device_cases.py`, by name.
        found: the ways that find it.
        sometimes: those that do in some orders only, or where the device falls as far behind as it takes.
        because: why neither can, or why only one does.
    """

    what: str
    file: str
    old: str
    new: str
    case: str
    found: tuple[str, ...]
    sometimes: tuple[str, ...]
    because: str

    @property
    def fault(self) -> Fault:
        return Fault(self.what, self.file, self.old, self.new, ())


def read(path: Path = LISTED) -> list[Entry]:
    """
    Raises:
        WrongFault: an entry lacks something, or has something else.
    """
    entries: list[Entry] = []
    for given in tomllib.loads(path.read_text(encoding="utf-8"))["synchronization"]:
        try:
            ways = {name: tuple(given.get(name, ())) for name in ("found", "sometimes")}
            entry = Entry(**{"because": "", **given, **ways})
        except TypeError as error:
            raise WrongFault(f"{path.name}: {given}: {error}") from None
        if {*entry.found, *entry.sometimes} - set(WAYS) or (len(entry.found) < len(WAYS) and not entry.because):
            raise WrongFault(
                f"{path.name}: {entry.what}: found and sometimes are of {WAYS}; what is not found needs `because`."
            )
        entries.append(entry)
    return entries


# -- what there is ----------------------------------------------------------------------------------------------------


def synchronizations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the name of each place in a source that orders streams, or hands on what does."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    # A message between hosts, of which the device knows nothing.
    control = {id(call.func) for call in calls if any(word.arg == "control" for word in call.keywords)}
    for call in calls:
        name, over = _name(call.func), _over(call.func)
        if (
            (name in CALLS and over not in NO_STREAMS)
            or (name, over) in (("on", "accelerator"), ("wait", "work"))
            or (name in FUNCTIONS and not over)
        ):
            yield call.func.end_lineno or call.lineno, name
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "wait"
            and id(node) not in control
            and _over(node) in ("agreement", "pending")
        ):
            yield node.end_lineno or node.lineno, f"{_over(node)}.wait"


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _over(node: ast.AST) -> str:
    return _name(node.value) if isinstance(node, ast.Attribute) else ""


@cache
def _in(text: str) -> list[tuple[int, str]]:
    """Those of a file. Most have none, and to parse all takes seconds."""
    return list(synchronizations(ast.parse(text))) if WORDS.search(text) else []


def not_listed(entries: Sequence[Entry], root: Path = ROOT) -> list[str]:
    """The synchronizations of the sources that no entry's text covers; and entries that do not fit the sources."""
    said: list[str] = []
    package = root / PACKAGE
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        if file.startswith(LEFT_OUT):
            continue
        text = path.read_text(encoding="utf-8")
        covered: set[int] = set()
        for entry in entries:
            if entry.file == file:
                entry.fault.put_into(text)
                first = text[: text.index(entry.old)].count("\n") + 1
                covered |= set(range(first, first + entry.old.rstrip("\n").count("\n") + 1))
        said += [f"{file}:{line}: {name}" for line, name in _in(text) if line not in covered]
    return list(dict.fromkeys(said))


# -- trying -----------------------------------------------------------------------------------------------------------


def try_out(tree: Tree, entry: Entry) -> tuple[dict[str, str], float]:
    """What each way says with the synchronization gone; empty: nothing; and seconds."""
    path = tree.folder / PACKAGE / entry.file
    before = path.read_text(encoding="utf-8")
    path.write_text(entry.fault.put_into(before), encoding="utf-8")
    begun = time.monotonic()
    try:
        return found_in(tree.folder, entry.case), time.monotonic() - begun
    finally:
        path.write_text(before, encoding="utf-8")


def found_in(folder: Path, case: str) -> dict[str, str]:
    """What each way says of a case with the package of that checkout; the CPU's losses are those of the first time."""
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}:{folder}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        str(folder / "tests" / "support" / "device_cases.py"),
        "--both",
        case,
        str(folder / f"{case}.json"),
    ]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(WAYS, "no end")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return dict.fromkeys(WAYS, f"it ended with {done.returncode}: {done.stderr.strip()[-200:]}")
    return json.loads(lines[-1])


def run(entries: Sequence[Entry]) -> int:
    """Tries all that have a case; how many are not as listed.

    Raises:
        WrongFault: the list does not fit the sources, or a case fails with every synchronization in place.
    """
    if lost := not_listed(read()):
        raise WrongFault("not in synchronizations.toml:\n" + "\n".join(lost))
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="synchronizations-") as parent:
        tree = Tree(ROOT, PACKAGE, parent)
        for case in dict.fromkeys(entry.case for entry in entries if entry.case):
            if any(said := found_in(tree.folder, case).values()):
                raise WrongFault(f"{case} fails with every synchronization in place: {list(said)}")
        print("| file | without it | case | check | lazy | seconds |\n|---|---|---|---|---|---|", flush=True)
        for entry in entries:
            said, seconds = try_out(tree, entry) if entry.case else ({}, 0.0)
            there = {way for way in WAYS if said.get(way)}
            as_listed = not entry.case or {*entry.found} <= there <= {*entry.found, *entry.sometimes}
            wrong += not as_listed
            cells = [entry.file, entry.what, entry.case, *(said.get(way, "") or "-" for way in WAYS)]
            print(f"| {' | '.join(cells)} | {seconds:.0f} |" + " NOT AS LISTED" * (not as_listed), flush=True)
    return wrong


def main(arguments: Sequence[str]) -> int:
    try:
        chosen = [e for e in read() if not arguments or any(w in f"{e.what} {e.file} {e.case}" for w in arguments)]
        return int(run(chosen) > 0)
    except WrongFault as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
