"""The command behind `make gpu` and `make gpu-bench`.

    python -m tests.support.gpu                            # what GPUs there are; 10 minutes at most
    python -m tests.support.gpu --speed                    # how fast they are, in place of whether all is right
    python -m tests.support.gpu --device sim --ranks 2     # a rehearsal without any

It needs a checkout and an interpreter that has PyTorch and the package's dependencies, and no network.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.support.gpu.day import ENVIRONMENT, ROOT, day
from tests.support.gpu.report import FAILED, PASSED, Day, as_json, markdown
from tests.support.gpu.section import CHECKS, SPEED
from tests.support.gpu.setting import SIM

ASK = (
    "from tests.support.gpu.ranks import device_type, how_many, product; import sys; kind = device_type(sys.argv[1]); "
    "print(kind or '-', how_many(kind) if kind else 0, product(kind) if kind else '')"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--speed", action="store_true", help="measure instead of checking")
    parser.add_argument("--device", default="auto", help="cuda, xpu, ..., sim, cpu; auto: what accelerator there is")
    parser.add_argument("--ranks", type=int, default=0, help="0: one per device")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of report.md and report.json")
    parser.add_argument("--only", default="", help="names of sections, with commas")
    given = parser.parse_args()
    parts = SPEED if given.speed else CHECKS
    target = "make gpu-bench" if given.speed else "make gpu"
    only = [word for word in given.only.replace(",", " ").split() if word]
    if unknown := [word for word in only if word not in parts]:
        parser.error(f"there is no section {unknown[0]!r}: they are {', '.join(parts)}.")
    kind, count, product = _devices(given.device)
    if kind == "-" and given.speed:
        kind = "cpu"
    if kind == "-":
        parser.error("PyTorch sees no accelerator here. To rehearse: make gpu DEVICE=sim, or DEVICE=cpu.")
    small = kind in (SIM, "cpu")
    if not small and not count:
        parser.error(f"PyTorch sees no device of the type {kind!r} here. To rehearse: make gpu DEVICE=sim.")
    ranks = given.ranks or max(count, 1)
    plural = "s" if ranks > 1 else ""
    title = f"Rehearsal on {kind}" if small else f"{count} x {product or kind}"
    title += f", {ranks} rank{plural}"
    given.out.mkdir(parents=True, exist_ok=True)

    def keep(made: Day) -> None:
        for name, text in (("report.md", markdown(made)), ("report.json", as_json(made))):
            whole = given.out / f".{name}"  # whoever reads meanwhile finds one that is complete
            whole.write_text(text, encoding="utf-8")
            whole.replace(given.out / name)

    made = day(
        parts, title=title, command=f"{target} DEVICE={kind} RANKS={ranks}", device=kind, ranks=ranks, small=small,
        limit=given.minutes * 60, only=only, out=given.out.resolve(), told=lambda line: print(line, flush=True),
        kept=keep, environment={} if given.speed else None,
    )  # fmt: skip
    keep(made)
    print(f"{made.verdict} in {made.seconds:.0f} s: {given.out / 'report.md'}, and report.json beside it")
    return {PASSED: 0, FAILED: 1}.get(made.verdict, 0)


def _devices(asked: str) -> tuple[str, int, str]:
    """The type of the devices, how many there are, and what their driver calls them; asked for in a process of its own,
    as this one has none."""
    import os

    if asked in (SIM, "cpu"):
        return asked, 0, ""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", ASK, asked], cwd=ROOT, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"make gpu: PyTorch could not tell what devices there are:\n{done.stderr.strip()}")
    kind, count, *product = done.stdout.splitlines()[-1].split()
    return kind, int(count), " ".join(product)


if __name__ == "__main__":
    sys.exit(main())
