"""One step of two contenders as a picture: lanes of one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from shardfold.errors import UsageError
from shardfold.tools.bench.contenders import Contender
from shardfold.tools.bench.settings import Settings
from shardfold.tools.bench.teams import ContenderFailed, Team
from shardfold.tools.bench.traces import LAYOUTS, Lanes, lanes_of, merged, phases

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["DEFAULT", "draw", "picture"]

DEFAULT = {"offload": ("zero2-host", "zero2-moments-disk")}
USUAL = ("zero3", "torch-fsdp2")
INK, MUTED, GRID = "#22252b", "#6b7480", "#e7e9ec"
COLORS = {
    "compute": "#2166ac",
    "copies": "#8c6bb1",
    "update": "#1b7837",
    "waiting": "#c2410c",
    "gather": "#35978f",
    "reduce": "#bf812d",
    "collectives": "#35978f",
    "STORE": "#8c6bb1",
    "FETCH": "#b2589b",
    "UPDATE": "#1b7837",
    "FILL": "#7a8a1e",
    "copies up": "#b2589b",
    "copies down": "#8c6bb1",
    "sending": "#bf812d",
    "attention": "#35978f",
    "products": "#2166ac",
    "other kernels": "#7a8a1e",
    "idle": "#c2410c",
    "disk reads": "#4a4e57",
    "disk writes": "#8a8f99",
}
BAND = 0.72  # of a lane's height


def draw(settings: Settings, contenders: Sequence[Contender], file: Path) -> None:
    """Runs both, profiles a step of rank 0 of each in every round, and writes the picture of the shortest, which other
    programs on the machine disturbed least.

    Raises:
        UsageError: a contender died.
    """
    traces = {}
    for contender in contenders:
        try:
            with Team(contender, settings) as team:
                found = [team.profile(settings.steps)[0] for _ in range(settings.rounds)]
                traces[f"{contender.name}: {contender.says}"] = min(found, key=lambda trace: trace["length"])
        except ContenderFailed as error:
            raise UsageError(f"{contender.name} failed: {error.reason}. It wrote:\n{error.said}") from error
    picture(file, traces, title=settings.title(), of=lanes_of(next(iter(traces.values())), settings.job))


def picture(file: Path, traces: dict[str, dict[str, Any]], *, title: str, of: Lanes = LAYOUTS) -> None:
    """Write the picture of profiled steps, one below the other, in these lanes."""
    longest = max(trace["length"] for trace in traces.values()) / 1e3
    figure = Figure(figsize=(11, 1.15 + (0.95 + 0.3 * len(of.names)) * len(traces)), dpi=140, facecolor="white")
    FigureCanvasAgg(figure)  # draws into memory: no display, and none of pyplot's global state
    all_axes = figure.subplots(len(traces), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (name, trace) in zip(all_axes, traces.items(), strict=True):
        _draw_step(axes, name, trace, of)
    all_axes[-1].set_xlim(0, longest * 1.09)
    all_axes[-1].set_xlabel("milliseconds since the step began", fontsize=10, color=MUTED, loc="right")
    height = float(figure.get_size_inches()[1])
    figure.text(0.02, 1 - 0.3 / height, "One step on rank 0", fontsize=13, color=INK, weight="bold")
    figure.text(0.02, 1 - 0.52 / height, title, fontsize=9.5, color=MUTED)
    figure.subplots_adjust(left=0.085, right=0.985, top=1 - 1.2 / height, bottom=0.55 / height, hspace=0.42)
    figure.savefig(file)


def _draw_step(axes: Axes, name: str, trace: dict[str, Any], of: Lanes) -> None:
    length = trace["length"] / 1e3
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.xaxis.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=MUTED, labelsize=9.5, labelbottom=True)
    axes.set_title(f"{name}, {length:.0f} ms", loc="left", fontsize=10.5, color=INK, pad=18)
    for place, (lane, spans) in enumerate(of.sort(trace).items()):
        bars = [(begin / 1e3, (end - begin) / 1e3) for begin, end in merged(spans, gap=trace["length"] / 4000)]
        axes.broken_barh(bars, (place - BAND / 2, BAND), color=COLORS[lane], linewidth=0.25)
        total = sum(end - begin for begin, end in spans) / 1e3
        said = f"{total:.{0 if total >= 10 else 1}f} ms" if spans else ""
        axes.annotate(
            said,
            (length, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=COLORS[lane],
        )
    axes.axhline(of.own - 0.5, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)))  # below: other threads
    for number, (phase, (begin, end)) in enumerate(phases(trace).items()):
        if number:
            axes.axvline(begin / 1e3, color=INK, linewidth=0.9)
        axes.annotate(
            phase,
            ((begin + end) / 2e3, 1),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=9.5,
            color=MUTED,
        )
    axes.set_yticks(range(len(of.names)), of.names)
    for label, lane in zip(axes.get_yticklabels(), of.names, strict=True):
        label.set_color(COLORS[lane])
    axes.set_ylim(len(of.names) - 0.5, -0.5)
