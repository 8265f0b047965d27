"""What a setting takes of a device, for any batch, by the planner: nothing is trained for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardfold.plan import presets
from shardfold.plan.layout import Layout, Tier
from shardfold.plan.lifetimes import CPU, GPU
from shardfold.plan.offload import offloaded
from shardfold.plan.rewrites import Overlap
from shardfold.planner.division import Division
from shardfold.planner.hardware import Device
from shardfold.planner.memory import MemoryPlan, Setting
from shardfold.planner.seconds import plan_seconds
from shardfold.planner.setting import LINE, PlannedRank, Subject
from shardfold.sharding.materialize import meta_init
from shardfold.sharding.slices import mark_slice
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.face.vit import FaceModel

__all__ = ["SETTINGS", "Need", "Needs"]

SETTINGS: dict[str, tuple[str, str | None]] = {
    "base": ("ddp", None),
    "stage 2": ("zero2", None),
    "stage 2 + offload": ("zero2", "host"),
    "stage 3 + offload": ("zero3", "params=host,grads=host,optimizer=host"),
    "stage 3": ("zero3", None),
}
"""The report's five configurations, as layouts and what rests in host memory."""

MOST = 512  # images per rank


@dataclass(frozen=True)
class Need:
    """What a setting takes of a rank.

    Attributes:
        lines: bytes of the device without an image, and of each image, at points of a step: the highest counts.
        host: bytes of host memory at rest.
    """

    lines: tuple[tuple[float, float], ...]
    host: int = 0

    def of(self, batch: int) -> int:
        """Bytes of the device with so many images."""
        return math.ceil(max(fixed + each * batch for fixed, each in self.lines))

    def largest(self, allowed: float, most: int = MOST) -> int:
        """The most images with which a step fits; 0: not even one does."""
        fit = [(allowed - fixed) / each if each > 0 else most * (fixed <= allowed) for fixed, each in self.lines]
        return max(min(math.floor(min(fit)), most), 0)


class Needs:
    """Of a model, by setting.

    Args:
        config: of the model; its layout does not count.
        classes: of the head.
        ranks: over which states, and of a sharded head the classes, are split.
        streams: plan for devices that have them, as GPUs.
    """

    def __init__(self, config: FaceConfig, classes: int, ranks: int, *, streams: bool = False) -> None:
        self.ranks, self._precision = ranks, config.precision
        self._rank = PlannedRank(mesh={"intra": ranks}, precision=config.precision, behaviour=GPU if streams else CPU)
        with meta_init():
            model = _Alone(config, classes, ranks)
        rows, columns = config.image_size()
        images = torch.empty(LINE[1], config.channels, rows, columns, device="meta")
        labels = torch.empty(LINE[1], dtype=torch.int64, device="meta")
        self._subject = Subject(model, (images, labels), division=Division(streams=streams))
        self.parameters = sum(p.numel() for p in model.parameters())

    def of(self, name: str, overlap: Overlap | None = None) -> Need:
        """What one of SETTINGS takes."""
        _, plan = self._plan(name, LINE[0], overlap)
        few, more = (self._subject.trace(self._precision, "keep", n) for n in LINE)
        line = plan.line(few, more, LINE)
        lines = tuple(zip(line.starts.tolist(), line.slopes.tolist(), strict=True))
        return Need(lines, int(plan.tiers.get(Tier.HOST, 0.0)))

    def largest(self, name: str, allowed: float) -> int:
        """The most images that fit, as ``sf.plan.largest_batch`` finds them."""
        return replace(self._rank, budget=allowed).largest(self._subject, self._plan(name, LINE[0])[1])

    def seconds(self, name: str, batch: int, device: Device) -> float:
        """Of a step on such devices."""
        return plan_seconds(*self._plan(name, batch), device).step

    def _plan(self, name: str, batch: int, overlap: Overlap | None = None) -> tuple[Setting, MemoryPlan]:
        return replace(self._rank, overlap=overlap).plan(self._subject, table_of(name), "keep", batch)


def table_of(name: str) -> Layout:
    """The table of one of SETTINGS."""
    layout, offload = SETTINGS[name]
    return offloaded(presets.named(layout), offload)


class _Alone(FaceModel):
    """One rank's part of a face model, in one process: of a sharded head its classes, and in its forward as many rows
    as all ranks have, which it would gather."""

    def __init__(self, config: FaceConfig, classes: int, ranks: int) -> None:
        split = config.head == "sharded" and ranks > 1
        super().__init__(config, -(-classes // ranks) if split else classes)
        self.copies = ranks if split else 1
        if split:
            whole = classes, config.embedding
            mark_slice(self.head, "weight", axis="intra", whole=whole, start=(0, 0))

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        embeddings = super().forward(images)
        assert labels is not None
        if self.copies > 1:
            embeddings, labels = embeddings.repeat(self.copies, 1), labels.repeat(self.copies)
        return self.head(embeddings, labels)
