"""Pictures of a face run: curves of errors, and what the images look like."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from shardfold.tools.recipes.face.images import ImageSource
from shardfold.tools.recipes.face.verification import PairVerification

__all__ = ["faces_picture", "roc_picture"]

COLOURS = ("#1f5fa8", "#b04a2f", "#6b6b6b", "#2f8f5b", "#8a5fa8")


def roc_picture(path: Path, found: Mapping[str, PairVerification]) -> None:
    """ROC and DET curves, side by side."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    roc, det = figure.subplots(1, 2)
    for (name, each), colour in zip(found.items(), COLOURS * 4, strict=False):
        rates, accepted = (np.array(values) for values in zip(*each.curve, strict=True))
        roc.step(rates, accepted, where="post", label=name, color=colour)
        det.step(rates, np.maximum(1 - accepted, 1e-4), where="post", label=name, color=colour)
    roc.set(xscale="log", xlim=(1e-5, 1), ylim=(0, 1), xlabel="false-accept rate", ylabel="true-accept rate")
    det.set(xscale="log", yscale="log", xlim=(1e-5, 1), ylim=(1e-3, 1.05))
    det.set(xlabel="false-accept rate", ylabel="false-reject rate")
    for axes, title in ((roc, "ROC"), (det, "DET")):
        axes.set_title(title, loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    roc.legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path, dpi=110)


def faces_picture(path: Path | BytesIO, source: ImageSource, identities: int = 8, shots: int = 12) -> None:
    """A row of images for each of some identities."""
    rows = []
    for identity in range(min(identities, len(source.names))):
        mine = np.flatnonzero(source.labels == identity)[:shots]
        images = source.read(mine.tolist())
        blank = np.full((shots - len(mine), *images.shape[1:]), 255, np.uint8)
        rows.append(np.concatenate([images, blank]).transpose(2, 0, 3, 1).reshape(images.shape[2], -1, images.shape[1]))
    sheet = np.concatenate(rows).squeeze()
    high, wide = sheet.shape[:2]
    figure = Figure(figsize=(9, 9 * high / wide))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(sheet, cmap="gray", vmin=0, vmax=255, interpolation="nearest", aspect="auto")
    axes.set_axis_off()
    figure.savefig(path, dpi=110)
