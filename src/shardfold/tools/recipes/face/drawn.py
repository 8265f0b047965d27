"""Faces that are drawn: images of thousands of identities without a download, honest about being synthetic.

An identity is a vector of proportions and tones: of head, hair, eyes, brows, nose, mouth, and a few marks on the skin.
A shot of it has a pose, an expression, light, glasses or something before the face, blur, few pixels and noise, as
cameras of surveillance have: two shots of one identity differ more in pixels than two identities in the same shot do.
Everything follows from (seed, identity, shot), so that nothing is stored and every process draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DrawnFaces"]

Array = npt.NDArray[Any]

TRAITS = 26  # numbers that make up an identity
MARKS = 3  # moles and scars, three numbers each
SHOT = 24  # random numbers of a shot


class DrawnFaces:
    """Images by (identity, shot).

    Args:
        identities: how many there are.
        shots: of each.
        size: rows and columns in pixels.
        channels: 1, or 3 of which skin and hair have other tones.
        seed: of everything.
        first: number of the first identity: sets with other numbers have no identity in common.
        hard: from 0 (a portrait) to 1 (surveillance): how far shots vary.
    """

    def __init__(
        self,
        identities: int,
        shots: int,
        *,
        size: tuple[int, int] = (32, 32),
        channels: int = 1,
        seed: int = 0,
        first: int = 0,
        hard: float = 1.0,
    ) -> None:
        self.identities, self.shots, self.size, self.channels = identities, shots, size, channels
        self.seed, self.first, self.hard = seed, first, hard
        rows, columns = (np.linspace(-1.15, 1.15, n, dtype=np.float32) for n in size)
        self._y, self._x = np.meshgrid(rows, columns, indexing="ij")

    def __len__(self) -> int:
        return self.identities * self.shots

    def label(self, index: int) -> int:
        """The identity of an image."""
        return index // self.shots

    def draw(self, indices: Sequence[int]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """``(n, channels, rows, columns)`` and the identities ``(n,)``."""
        labels = np.array([self.label(index) for index in indices], dtype=np.int64)
        who = np.stack([self._numbers(1, label).standard_normal(TRAITS + 3 * MARKS) for label in labels])
        shot = [self._numbers(2, label, index % self.shots) for label, index in zip(labels, indices, strict=True)]
        how = np.stack([each.standard_normal(SHOT) for each in shot]).astype(np.float32)
        chance = np.stack([each.random(8) for each in shot]).astype(np.float32)
        noise = np.stack([each.standard_normal(self.size) for each in shot]).astype(np.float32)
        image = _Drawing(self._x, self._y, who.astype(np.float32), how * self.hard, chance, self.hard).draw(noise)
        if self.channels == 3:
            tint = 1 + 0.12 * np.tanh(who[:, :3].astype(np.float32))[:, :, None, None]
            image = np.clip(image[:, None] * tint, 0, 1)
        else:
            image = image[:, None]
        return (image * 255 + 0.5).astype(np.uint8), labels

    def _numbers(self, kind: int, label: int, shot: int = 0) -> np.random.Generator:
        key = (self.seed & (2**32 - 1)) | kind << 32
        return np.random.Generator(np.random.Philox(key=[key, (self.first + int(label)) << 24 | shot]))


class _Drawing:
    """A batch of faces on its way to pixels. All arrays are ``(n, rows, columns)``, numbers of a face ``(n, 1, 1)``."""

    def __init__(self, x: Array, y: Array, who: Array, how: Array, chance: Array, hard: float) -> None:
        self._who, self._how, self._hard = who, how, hard
        self._chance = chance
        n = len(who)
        self._place = 0
        self._yaw, self._pitch = 0.45 * np.tanh(how[:, 0:1, None]), 0.25 * np.tanh(how[:, 1:2, None])
        roll, scale = 0.16 * how[:, 2:3, None], np.exp(0.09 * how[:, 3:4, None])
        right, down = 0.09 * how[:, 4:5, None], 0.09 * how[:, 5:6, None]
        cos, sin = np.cos(roll), np.sin(roll)
        x, y = np.broadcast_to(x, (n, *x.shape)) - right, np.broadcast_to(y, (n, *y.shape)) - down
        self._x, self._y = (cos * x + sin * y) / scale, (cos * y - sin * x) / scale

    def _trait(self, mean: float, spread: float) -> Array:
        """The next number of the identity."""
        self._place += 1
        return np.asarray(mean + spread * np.tanh(self._who[:, self._place - 1, None, None] / 1.5) * 1.5, np.float32)

    def _blob(self, cx: Any, cy: Any, rx: Any, ry: Any, soft: float = 0.08, tilt: Any = 0.0) -> Array:
        """From 1 inside of an ellipse to 0 outside."""
        dx, dy = self._x - cx, self._y - cy
        c, s = np.cos(tilt), np.sin(tilt)
        far = np.sqrt(((c * dx + s * dy) / rx) ** 2 + ((c * dy - s * dx) / ry) ** 2 + 1e-6)
        return 1 / (1 + np.exp(np.clip((far - 1) * np.minimum(rx, ry) / (soft * 0.35), -30, 30)))

    def _turned(self, x: Array, y: Array, depth: float = 0.8) -> tuple[Array, Array]:
        """Where a point of the face is after the head has turned."""
        z = depth * np.sqrt(np.maximum(1 - x**2 - 0.6 * y**2, 0.05))
        turned = x * np.cos(self._yaw) + z * np.sin(self._yaw) * 0.55
        return turned, y * np.cos(self._pitch) + z * np.sin(self._pitch) * 0.45

    def draw(self, noise: Array) -> Array:
        """``(n, rows, columns)`` from 0 to 1."""
        self._head()
        self._eyes()
        self._nose_and_mouth()
        self._marks()
        return self._camera(noise)

    def _head(self) -> None:
        wide, high = self._trait(0.62, 0.07), self._trait(0.82, 0.07)
        jaw, self._skin = self._trait(0.8, 0.09), self._trait(0.62, 0.1)
        hair, line, side = self._trait(0.25, 0.16), self._trait(-0.52, 0.1), self._trait(0.1, 0.06)
        background = 0.5 + 0.25 * np.tanh(self._how[:, 6:7, None])
        narrow = wide * (1 - (1 - jaw) * np.clip(self._y / high, 0, 1))
        shift = 0.12 * np.sin(self._yaw)
        crown = self._blob(shift * 0.5, np.float32(-0.12), wide + side, high + 0.06)
        self._face = self._blob(shift, np.float32(0.0), narrow, high)
        ears = self._blob(shift - wide * np.cos(self._yaw), np.float32(0.02), np.float32(0.09), np.float32(0.17))
        ears = np.maximum(ears, self._blob(shift + wide, np.float32(0.02), np.float32(0.09), np.float32(0.17)))
        image = np.broadcast_to(background, self._x.shape)
        image = image * (1 - crown) + hair * crown
        image = image * (1 - 0.8 * ears) + 0.8 * ears * self._skin * 0.9
        parting = 0.12 * self._trait(0.0, 0.8) * self._x
        forehead = 1 / (1 + np.exp(np.clip(-(self._y - line - parting) / 0.03, -30, 30)))
        self._image = image * (1 - self._face * forehead) + self._skin * self._face * forehead
        self._high = high

    def _over(self, alpha: Array, tone: Any) -> None:
        self._image = self._image * (1 - alpha) + tone * alpha

    def _eyes(self) -> None:
        apart, level = self._trait(0.27, 0.05), self._trait(-0.12, 0.06)
        wide, open_ = self._trait(0.12, 0.025), self._trait(0.06, 0.018)
        slant, iris = self._trait(0.0, 0.16), self._trait(0.2, 0.13)
        above, thick = self._trait(0.16, 0.035), self._trait(0.034, 0.013)
        length, arch, brow = self._trait(0.16, 0.03), self._trait(0.0, 0.18), self._trait(0.28, 0.13)
        uneven = self._trait(0.0, 0.02)
        lids = open_ * np.exp(0.25 * self._how[:, 7:8, None])
        raised = above + 0.03 * self._how[:, 8:9, None]
        glasses = (self._chance[:, 0:1, None] < 0.18 * self._hard).astype(np.float32)
        for sign in (-1.0, 1.0):
            x, y = self._turned(sign * apart, level + sign * uneven)
            self._over(self._blob(x, y, wide * 1.5, lids * 2.4, 0.2) * 0.35, self._skin * 0.7)
            self._over(self._blob(x, y, wide, lids, 0.05, sign * slant), np.float32(0.88))
            gaze = 0.03 * self._how[:, 9:10, None]
            self._over(self._blob(x + gaze, y, lids * 0.95, lids * 0.95, 0.05), iris)
            bx, by = self._turned(sign * apart, level - raised + sign * uneven)
            self._over(self._blob(bx, by, length, thick, 0.05, sign * (slant * 0.5 + arch)), brow)
            ring = self._blob(x, y, np.float32(0.19), np.float32(0.15)) - self._blob(
                x, y, np.float32(0.15), np.float32(0.11)
            )
            self._over(glasses * np.clip(ring, 0, 1), np.float32(0.08))

    def _nose_and_mouth(self) -> None:
        long, wide, bridge = self._trait(0.24, 0.06), self._trait(0.1, 0.028), self._trait(0.045, 0.013)
        x, y = self._turned(np.zeros_like(long), 0.04 + long * 0.5, 1.0)
        self._over(self._blob(x, y, bridge, long * 0.7, 0.12) * 0.5, np.minimum(self._skin * 1.2, 0.97))
        x, y = self._turned(np.zeros_like(long), 0.04 + long, 1.0)
        self._over(self._blob(x, y, wide, np.float32(0.05), 0.1) * 0.6, self._skin * 0.72)
        width, low, full = self._trait(0.21, 0.045), self._trait(0.5, 0.045), self._trait(0.045, 0.016)
        tone = self._trait(0.38, 0.09)
        opened = full * np.exp(0.35 * self._how[:, 10:11, None])
        smile = 0.12 * self._how[:, 11:12, None]
        x, y = self._turned(np.zeros_like(low), low)
        bent = self._y
        self._y = self._y + smile * ((self._x - x) ** 2 / np.maximum(width, 0.05) - width * 0.3)
        self._over(self._blob(x, y, width * np.exp(0.1 * smile), opened, 0.06), tone)
        self._y = bent
        beard = np.clip(self._who[:, 24:25, None] - 0.7, 0, 1) * 0.5
        chin = self._blob(x, low + 0.12, np.float32(0.5), np.float32(0.36), 0.2) * self._face
        self._over(chin * beard * (1 - self._blob(x, y, width, opened, 0.06)), np.float32(0.25))

    def _marks(self) -> None:
        for mark in range(MARKS):
            a, b, c = (self._who[:, TRAITS + 3 * mark + i, None, None] for i in range(3))
            x, y = self._turned(0.3 * np.tanh(a), 0.1 + 0.4 * np.tanh(b))
            self._over(self._blob(x, y, np.float32(0.07), np.float32(0.07), 0.15) * 0.5, self._skin + 0.35 * np.tanh(c))

    def _camera(self, noise: Array) -> Array:
        """Light, what is before the face, and what a cheap camera makes of it."""
        how, chance, hard = self._how, self._chance, self._hard
        image = self._image
        aim = how[:, 12:13, None], how[:, 13:14, None]
        image = image * (1 + 0.3 * np.tanh(aim[0]) * self._x + 0.25 * np.tanh(aim[1]) * self._y)
        image = np.clip(image * np.exp(0.22 * how[:, 14:15, None]), 0.01, 1) ** np.exp(0.25 * how[:, 15:16, None])
        covered = (chance[:, 1:2, None] < 0.3 * hard).astype(np.float32)
        low = (chance[:, 2:3, None] < 0.5).astype(np.float32)
        mask = self._blob(0.1 * np.sin(self._yaw), np.float32(0.62), np.float32(0.5), np.float32(0.34), 0.1)
        cap = self._blob(0.1 * np.sin(self._yaw), np.float32(-0.85), np.float32(0.75), np.float32(0.42), 0.1)
        image = image + covered * (low * mask + (1 - low) * cap) * (0.2 + 0.6 * chance[:, 3:4, None] - image)
        blur = np.clip(0.55 + 0.35 * how[:, 16:17, None], 0.0, 1.4) * min(hard, 1.0)
        image = _smoothed(image, blur)
        few = (chance[:, 4:5, None] < 0.3 * hard).astype(np.float32)
        image = image * (1 - few) + few * _coarse(image)
        image = image + noise * 0.05 * hard * np.exp(0.5 * how[:, 17:18, None])
        steps = np.where(chance[:, 5:6, None] < 0.3 * hard, 12, 255).astype(np.float32)
        return np.clip(np.round(np.clip(image, 0, 1) * steps) / steps, 0, 1).astype(np.float32)


def _smoothed(image: Array, width: Array) -> Array:
    """A blur of that many pixels, along rows and columns."""
    side = np.exp(-0.5 / np.maximum(width, 0.05) ** 2)
    for axis in (1, 2):
        edges = [(0, 0)] * 3
        edges[axis] = (1, 1)
        wide = np.pad(image, edges, mode="edge")
        one, two = ([slice(None)] * 3 for _ in range(2))
        one[axis], two[axis] = slice(0, -2), slice(2, None)
        image = (image + side * (wide[tuple(one)] + wide[tuple(two)])) / (1 + 2 * side)
    return image


def _coarse(image: Array) -> Array:
    """As if it had half as many pixels each way."""
    rows, columns = (n // 2 * 2 for n in image.shape[1:])
    small = image[:, :rows, :columns].reshape(len(image), rows // 2, 2, columns // 2, 2).mean((2, 4))
    large = small.repeat(2, 1).repeat(2, 2)
    found = image.copy()
    found[:, :rows, :columns] = large
    return found
