# ruff: noqa: E501, a table of expressions
"""Documented behaviours of DeepSpeed's *engines*, one line each, whose values are recorded from the real package.

A scene is a list of lines that run one after the other on every rank, in one process group over Gloo, with an engine of
a stage and a precision. A line that begins with ``>`` is a statement, and its error is its value; any other is an
expression. ``record`` runs all scenes where DeepSpeed is installed and writes ``tests/golden/deepspeed_engines.json``; the
tests run the same scenes on the compatibility layer. ``compare`` prints what differs::

    /tmp/real/bin/python benchmarks/deepspeed_engines.py record
    .venv/bin/python benchmarks/deepspeed_engines.py compare
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from deepspeed_scenes import KNOWN, SCENES, SETUP

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "deepspeed_engines.json"


class Case(NamedTuple):
    """A scene with its numbers: ``stage`` and ``precision`` are names that its lines may use."""

    scene: str
    ranks: int
    stage: int
    precision: str

    def __str__(self) -> str:
        return f"{self.scene}, {self.ranks} rank{'s' * (self.ranks > 1)}, stage {self.stage}, {self.precision}"


def cases(ranks: int | None = None) -> list[Case]:
    """Every scene with the ranks, stages and precisions that it names."""
    found = [
        Case(name, n, stage, precision)
        for name, (worlds, stages, precisions, _) in SCENES.items()
        for n in worlds for stage in stages for precision in precisions.split()
    ]  # fmt: skip
    return [case for case in found if ranks in (None, case.ranks)]


def lines(case: Case) -> list[str]:
    """The lines of a case, those of a loop once."""
    return [line for line in SCENES[case.scene][3].strip().splitlines() if line]


def run(case: Case, rank: int, folder: str, package: str = "deepspeed") -> dict[str, Any]:
    """``{line: value}`` on this rank, whose process group is there; ``folder`` is all ranks' own."""
    space: dict[str, Any] = {
        "stage": case.stage, "precision": case.precision, "ranks": case.ranks, "rank": rank, "folder": folder,
    }  # fmt: skip
    found: dict[str, Any] = {}
    quiet = io.StringIO()
    with unlogged(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        exec(
            SETUP.replace("import deepspeed", f"import {package} as deepspeed").replace('"deepspeed.', f'"{package}.'),
            space,
        )
        for line in lines(case):
            where = line.removeprefix("> ").replace('"deepspeed.', f'"{package}.')
            try:
                found[line] = plain(exec(where, space) if line.startswith("> ") else eval(where, space))
            except Exception as error:
                found[line] = {
                    "raises": [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
                }
                if os.environ.get("SHOW_ERRORS"):
                    found[line]["said"] = str(error)[:300]
        space["end"]()
    return found


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Nothing is logged inside."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def plain(value: Any) -> Any:
    """A value as JSON: tensors with their dtype, other objects by the name of their class."""
    import torch

    if isinstance(value, torch.Tensor):
        return {
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "values": plain(value.detach().double().flatten()[:6].tolist()),
        }
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value.replace("shardfold.compat.deepspeed", "deepspeed") if isinstance(value, str) else value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, torch.dtype):
        return str(value)
    return f"a {type(value).__name__}"


def agree(wanted: Any, found: Any, precision: str) -> bool:
    """Whether a value is the one recorded: numbers up to rounding, an exception of further kinds too."""
    if isinstance(wanted, dict) and "raises" in wanted:
        return isinstance(found, dict) and wanted["raises"][0] in found.get("raises", ())
    if isinstance(wanted, dict):
        return (
            isinstance(found, dict)
            and wanted.keys() == found.keys()
            and all(agree(wanted[k], found[k], precision) for k in wanted)
        )
    if isinstance(wanted, list):
        return isinstance(found, list) and len(wanted) == len(found) and all(
            agree(one, other, precision) for one, other in zip(wanted, found, strict=True)
        )  # fmt: skip
    if (isinstance(wanted, float) and isinstance(found, (int, float))) or (
        isinstance(found, float) and isinstance(wanted, int)
    ):
        return math.isclose(wanted, found, rel_tol=TOLERANCE[precision], abs_tol=TOLERANCE[precision] / 100)
    return type(wanted) is type(found) and wanted == found


#: How far numbers of a few steps may be apart: some roundings of the dtype (2**-8 in bf16, 2**-11 in fp16).
TOLERANCE = {"fp32": 1e-4, "bf16": 2**-5, "fp16": 2**-8}


def known(case: Case, line: str) -> str | None:
    """Why a line's value is another here, if that is on purpose."""
    for (scene, beginning), why in KNOWN.items():
        if scene in (case.scene, "") and line.startswith(beginning):
            return why
    return None


def main_of_rank(package: str, ranks: int, folder: str, only: str) -> None:
    """A process: every case of so many ranks, one after the other; writes after each, in case of a hang."""
    if package != "deepspeed":
        import shardfold as sf

        sf.compat.install()
    import deepspeed

    rank = int(os.environ["RANK"])
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed("gloo")
    out: dict[str, Any] = {}
    Path(folder, f"rank{rank}.json").write_text("{}")
    for number, case in enumerate(cases(ranks)):
        if only in str(case):
            own = Path(folder) / f"case{number}"
            own.mkdir(exist_ok=True)
            out[str(case)] = run(case, rank, str(own))
            Path(folder, f"rank{rank}.json").write_text(json.dumps(out))


def values(package: str, ranks: int, only: str = "") -> dict[str, dict[str, Any]]:
    """``{case: {line: value}}``; a value that ranks differ in is ``{"rank 0": ..., "rank 1": ...}``."""
    with tempfile.TemporaryDirectory() as folder:
        me = [
            sys.executable,
            __file__,
            "rank",
            "--package",
            package,
            "--ranks",
            str(ranks),
            "--folder",
            folder,
            "--only",
            only,
        ]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29600 + os.getpid() % 300), "WORLD_SIZE": str(ranks)}
        env = os.environ | address | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        running = [subprocess.Popen(me, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(ranks)]
        for process in running:
            try:
                process.wait(400)
            except subprocess.TimeoutExpired:
                process.kill()
                print("a rank hung", file=sys.stderr)
            if process.returncode:
                print(f"a rank ended with {process.returncode}", file=sys.stderr)
        each = [json.loads(Path(folder, f"rank{r}.json").read_text()) for r in range(ranks)]
    return {case: merged([one[case] for one in each]) for case in each[0] if all(case in one for one in each)}


def merged(each: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' values of a case as one."""
    return {
        line: value if all(one[line] == value for one in each) else {f"rank {r}": one[line] for r, one in enumerate(each)}
        for line, value in each[0].items()
    }  # fmt: skip


def record(golden: dict[str, dict[str, Any]]) -> None:
    """Writes ``{case: {line: value}}``, each line and each case's values once."""
    lines_of = {case.scene: list(golden[str(case)]) for case in cases() if str(case) in golden}
    rows = [f"{json.dumps(case)}: {json.dumps(list(found.values()))}" for case, found in golden.items()]
    text = ",\n".join(rows)
    GOLDEN.write_text(f'{{"lines": {json.dumps(lines_of, indent=0)},\n"values": {{\n{text}\n}}}}\n', encoding="utf-8")


def recorded() -> dict[str, dict[str, Any]]:
    """``{case: {line: value}}`` as DeepSpeed gave them."""
    both = json.loads(GOLDEN.read_text(encoding="utf-8"))
    scenes = {str(case): case.scene for case in cases()}
    return {case: dict(zip(both["lines"][scenes[case]], found, strict=True)) for case, found in both["values"].items()}


def compare(only: str) -> None:
    golden = recorded()
    good = bad = listed = 0
    for ranks in (1, 2):
        here = values("shardfold", ranks, only)
        for case in cases(ranks):
            for line, wanted in golden.get(str(case), {}).items():
                if only not in str(case):
                    continue
                found = here.get(str(case), {}).get(line, "nothing")
                if agree(wanted, found, case.precision):
                    good += 1
                elif known(case, line):
                    listed += 1
                else:
                    bad += 1
                    print(f"{case}: {line}\n   there {json.dumps(wanted)[:300]}\n   here  {json.dumps(found)[:400]}")
    print(f"{good} of {good + bad + listed} agree, {listed} differ on purpose")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "compare", "rank"))
    parser.add_argument("--package", default="deepspeed")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--folder", default="")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    if given.what == "rank":
        main_of_rank(given.package, given.ranks, given.folder, given.only)
    elif given.what == "record":
        golden = recorded() if given.only else {}
        for ranks in (1, 2):
            golden |= values("deepspeed", ranks, given.only)
        record(golden)
    else:
        compare(given.only)
