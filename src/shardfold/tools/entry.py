"""Where the command `shardfold` begins: without the packages that it needs it says in one sentence how to get them."""

from __future__ import annotations

import importlib.util
import sys
from typing import NoReturn

from shardfold.tools import extras
from shardfold.tools.interruption import INTERRUPTION
from shardfold.tools.quick_start import QuickStart

__all__ = ["main"]

SAID = 2  # as in shardfold.launch: one sentence has said what is wrong


def main() -> NoReturn:
    """Run the command line and end the process with its status."""
    try:
        INTERRUPTION.install()
        for package in (name for name, extra in extras.EXTRAS.items() if extra == "cli"):
            # Asked for here, as some are imported only once ranks run.
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
        QuickStart.alone = True
        with QuickStart.uncollected():
            from shardfold.tools import cli
        QuickStart.only_answers = sys.argv[1:2] in (["chat"], ["generate"], ["serve"])
    except KeyboardInterrupt:
        INTERRUPTION.end()
    except ModuleNotFoundError as error:
        said = extras.sentence("the command shardfold", error)
        if said is None:
            raise
        print(f"Error: {said}", file=sys.stderr)
        sys.exit(SAID)
    try:
        cli.main()
    except SystemExit as end:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        if command == "run" and isinstance(end.code, int | None):
            from shardfold.launch.process import end_process

            end_process(end.code or 0)
        raise
