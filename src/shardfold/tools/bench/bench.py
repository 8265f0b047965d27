"""What `shardfold bench` does: choose, run, report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from shardfold.errors import ConfigError, did_you_mean
from shardfold.tools.bench import _tables as show
from shardfold.tools.bench import contenders, results, turns
from shardfold.tools.bench.settings import Settings

__all__ = ["bench", "draw_timeline", "usual_precision", "words"]

LOSS_TOLERANCE = 1e-3  # relative, fp32: beyond it somebody trains something else


def words(given: Sequence[str] | None) -> list[str]:
    """Names from options that may be repeated and may hold several, with commas."""
    return [word.strip() for each in given or () for word in each.split(",") if word.strip()]


def usual_precision(job: str, device: str) -> str:
    """In what a job is computed where nobody says: offload in bf16, as its states are, unless it is on a CPU that takes
    many times as long for that."""
    if job != "offload":
        return "fp32"
    if device == "cpu":
        import torch

        from shardfold import accelerator

        return "bf16" if accelerator.product_dtype(torch.device("cpu")) is torch.bfloat16 else "fp32"
    return "bf16"


def bench(
    settings: Settings,
    only: Sequence[str],
    without: Sequence[str],
    *,
    reference: str | None,
    json_file: Path | None,
    as_markdown: bool,
) -> bool:
    """Runs the comparison and prints it; False if no contender ran or their losses disagree.

    Raises:
        ConfigError: a name is unknown, or was asked for and cannot take part.
    """
    chosen, left_out = contenders.choose(settings, only, without)
    names = [each.name for each in chosen]
    if reference is not None and reference not in names:
        raise ConfigError(f"the reference {reference!r} does not take part.{did_you_mean(reference, names)}")
    if json_file is not None and not json_file.expanduser().parent.is_dir():
        raise ConfigError(f"there is no folder {str(json_file.parent)!r} for --json.")
    with show.Show(reference) as shown:
        measured = turns.compare(settings, chosen, shown.watch)
    if json_file is not None:
        record = {
            "environment": show.environment(measured),
            "left_out": left_out,
            **results.as_json(measured, measured.reference(reference)),
        }
        json_file.expanduser().write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return show.print_report(measured, reference, left_out, as_markdown=as_markdown, tolerance=LOSS_TOLERANCE)


def draw_timeline(settings: Settings, only: Sequence[str], file: Path) -> None:
    """Profiles one step of two contenders on rank 0 and draws both.

    Raises:
        ConfigError: not two are named.
    """
    from shardfold.tools.bench import _timeline as timeline

    asked = only or timeline.DEFAULT.get(settings.job, timeline.USUAL)
    chosen, _ = contenders.choose(settings, asked)
    if len(chosen) != 2:
        raise ConfigError(f"--timeline draws two contenders, but --only names {len(chosen)}: name two.")
    if chosen[0].name != asked[0]:
        chosen.reverse()
    timeline.draw(settings, chosen, file.expanduser())
