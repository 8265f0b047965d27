"""The report's 10 cards, by the planner: a model of its size under its five settings, beside what it published."""

from __future__ import annotations

from typing import NamedTuple

from shardfold.planner.hardware import DEVICES
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.face.needs import SETTINGS, Needs

__all__ = ["ALLOWED", "CARDS", "PUBLISHED", "CardSetting", "Published", "on_cards"]


class Published(NamedTuple):
    """What the report says of a setting: images of a card and step, images/s, MB."""

    batch: int
    rate: str
    mb: int


PUBLISHED = {
    "base": Published(440, "2500", 15950),
    "stage 2": Published(440, "2600-2650", 14000),
    "stage 2 + offload": Published(584, "2800-2850", 15900),
    "stage 3 + offload": Published(660, "> 2950", 15900),
    "stage 3": Published(600, "2500-2550", 15900),
}
RATES = {"base": 2500.0, "stage 2": 2625.0, "stage 2 + offload": 2825.0, "stage 3 + offload": 2950.0, "stage 3": 2525.0}
"""The middles of them."""

CARDS, ALLOWED = 10, 16150  # MB of each

CLASSES = 159_000
MODEL = FaceConfig.load(
    {
        "size": "96",
        "patch": 8,
        "width": 512,
        "layers": 12,
        "heads": 8,
        "embedding": 512,
        "precision": "fp16",
        "identities": CLASSES,
        "procs": 1,
    }
)
"""121.5 million parameters, as the report's file of 243 MB in fp16 has, of which over two thirds are the head's. It
names neither its ViT nor the size of its images: this one's take 32 MB of activations each, as its batches do."""


class CardSetting(NamedTuple):
    """What is computed of one: MB at its published batch, the most images that fit, and images/s of a card with them;
    0 where none fit."""

    name: str
    mb: float
    batch: int
    rate: float


def on_cards(head: str = "replicated") -> tuple[int, list[CardSetting]]:
    """Parameters that one card computes with, and the five settings on 10 V100."""
    config = FaceConfig.load({**MODEL.model_dump(exclude_unset=True), "head": head})
    needs = Needs(config, CLASSES, CARDS, streams=True)
    found: list[CardSetting] = []
    for name in SETTINGS:
        need = needs.of(name)
        batch = need.largest(ALLOWED * 1e6, most=4096)
        rate = batch / needs.seconds(name, batch, DEVICES["V100-16G"]) if batch else 0.0
        found.append(CardSetting(name, need.of(PUBLISHED[name].batch) / 1e6, batch, rate))
    return needs.parameters, found
