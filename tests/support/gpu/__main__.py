"""The command behind `make gpu`.

    python -m tests.support.gpu                            # what GPUs there are; 10 minutes at most
    python -m tests.support.gpu --device sim --ranks 2     # a rehearsal without any

It needs a checkout and an interpreter that has PyTorch and the package's dependencies, and no network.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.support.gpu.day import ENVIRONMENT, ROOT, day
from tests.support.gpu.report import FAILED, PASSED, as_json, markdown
from tests.support.gpu.section import SECTIONS
from tests.support.gpu.setting import SIM

ASK = (
    "from tests.support.gpu.ranks import device_type, how_many; import sys; kind = device_type(sys.argv[1]); "
    "print(kind or '-', how_many(kind) if kind else 0)"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto", help="cuda, xpu, ..., sim, cpu; auto: what accelerator there is")
    parser.add_argument("--ranks", type=int, default=0, help="0: one per device")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of report.md and report.json")
    parser.add_argument("--only", default="", help=f"of {', '.join(SECTIONS)}; with commas")
    given = parser.parse_args()
    only = [word for word in given.only.replace(",", " ").split() if word]
    if unknown := [word for word in only if word not in SECTIONS]:
        parser.error(f"there is no section {unknown[0]!r}: they are {', '.join(SECTIONS)}.")
    kind, count = _devices(given.device)
    if kind == "-":
        parser.error("PyTorch sees no accelerator here. To rehearse: make gpu DEVICE=sim, or DEVICE=cpu.")
    small = kind in (SIM, "cpu")
    if not small and not count:
        parser.error(f"PyTorch sees no device of the type {kind!r} here. To rehearse: make gpu DEVICE=sim.")
    ranks = given.ranks or max(count, 1)
    plural = "s" if ranks > 1 else ""
    title = f"{count} x {kind}, {ranks} rank{plural}" if not small else f"Rehearsal on {kind}, {ranks} rank{plural}"
    command = f"make gpu DEVICE={kind} RANKS={ranks}"
    made = day(
        title=title, command=command, device=kind, ranks=ranks, limit=given.minutes * 60, small=small, only=only,
        told=lambda line: print(line, flush=True),
    )  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "report.md").write_text(markdown(made), encoding="utf-8")
    (given.out / "report.json").write_text(as_json(made), encoding="utf-8")
    print(f"{made.verdict} in {made.seconds:.0f} s: {given.out / 'report.md'}, and report.json beside it")
    return {PASSED: 0, FAILED: 1}.get(made.verdict, 0)


def _devices(asked: str) -> tuple[str, int]:
    """The type of the devices and how many there are; asked for in a process of its own, as this one has none."""
    import os

    if asked in (SIM, "cpu"):
        return asked, 0
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", ASK, asked], cwd=ROOT, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"make gpu: PyTorch could not tell what devices there are:\n{done.stderr.strip()}")
    kind, count = done.stdout.split()[-2:]
    return kind, int(count)


if __name__ == "__main__":
    sys.exit(main())
