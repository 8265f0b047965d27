"""By how many of the quick draws each listed fault is found: ``python -m tests.draws.counted [WORD ...]``.

Faults are those of ``tests/support/mutants.toml`` that name the draws as a test, and hold one of the words, if some are
given. Each is put into a copy of the package. The first line is without a fault.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.draws.test_draws import QUICK
from tests.support.mutants import PACKAGE, ROOT, Fault, Tree, read


def count(tree: Tree, fault: Fault | None) -> str:
    """What ``python -m tests.draws`` says of the quick draws in a tree."""
    path = Path("unused")
    if fault is not None:
        path = tree.folder / PACKAGE / fault.file
        whole = path.read_text(encoding="utf-8")
        path.write_text(fault.put_into(whole), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tree.folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.draws", "--count", str(QUICK), "--caught"]
    done = subprocess.run(command, cwd=tree.folder, env=environment, capture_output=True, text=True, check=False)
    if fault is not None:
        path.write_text(whole, encoding="utf-8")  # pyright: ignore[reportPossiblyUnboundVariable]
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def main(words: list[str]) -> int:
    listed = [fault for fault in read() if any(test.startswith("draws/") for test in fault.tests)]
    chosen = [fault for fault in listed if not words or any(word in f"{fault.what} {fault.file}" for word in words)]
    with tempfile.TemporaryDirectory(prefix="counted-") as parent:
        tree = Tree(ROOT, PACKAGE, parent)
        print(f"{'without a fault':<72} {count(tree, None)}", flush=True)
        for fault in chosen:
            print(f"{fault.file + ': ' + fault.what:<72} {count(tree, fault)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
