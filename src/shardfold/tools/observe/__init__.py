"""What a run shows and leaves behind: metrics as data, progress on the terminal, pictures.

charts        line charts as SVG, for pages: text, without a script and without a library
console       a console whose failures end nothing
contents      what a checkpoint holds, as text
event_files   event files of TensorBoard's: their scalars, read from any byte on, also while they are written
metrics       one JSON object per optimizer step, one per line, readable while the run goes on
page_parts    what pages are made of: the frame and its style, tiles, tables
pictures      pictures of a run
printable     what comes from files, hosts and models, on its way to a terminal
progress      live progress: two lines redrawn in place on a terminal, a plain line every few seconds anywhere else
readable      numbers as people read them: bytes, counts, durations, a curve as one line of bars
run_files     files of a run, which may be anybody's
run_folder    a run folder and what a loop writes into it: figures of its steps, and what the run is at
run_page      the page of a run: what its folder says, as one HTML file that needs nothing else
run_status    what a run is at, as its folder says and as is true
tables        the tables that a run ends with: what it learned, what it held, what it sent
trackers      trackers that the figures of a run go to besides its folder, where they are installed
working_line  one line that says how far long work is besides steps: its amount, rate and time left
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardfold.tools.observe.run_folder import Run
    from shardfold.tools.observe.run_status import RunStatus

__all__ = ["Run", "RunStatus"]


def __getattr__(name: str) -> Any:
    """What ``sf.observe`` has for scripts; imported when it is first asked for."""
    import importlib

    modules = {"Run": "run_folder", "RunStatus": "run_status"}
    if name in modules:
        return getattr(importlib.import_module(f"{__name__}.{modules[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
