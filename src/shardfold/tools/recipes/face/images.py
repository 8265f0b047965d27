"""Images by identity, drawn or read; and how they are changed for training.

An image is the same whenever it is read. What training changes about it (a shift, a mirror image, light, a covered
patch) follows from (seed, epoch, image), so it is another one in each epoch and for each image, whichever rank or
worker process reads it, and the same again where a run is resumed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import data

from shardfold.data import Sampler
from shardfold.errors import ConfigError
from shardfold.tools.extras import sentence
from shardfold.tools.recipes.face._stores import SUFFIXES, Store, store_of
from shardfold.tools.recipes.face.drawn import DrawnFaces
from shardfold.tools.recipes.face.face_config import FaceConfig

__all__ = ["Encoded", "EpochSampler", "ImageBatches", "ImageSource", "sources"]

SHIFT = 2  # pixels of 32
LOOKED_AT = 2000  # images, once one of them cannot be read
TOLD = 3  # of those that cannot be read


class ImageSource(Protocol):
    """Images of some identities."""

    @property
    def names(self) -> Sequence[str]:
        """Of the identities."""
        ...

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The identity of each image ``(n,)``."""
        ...

    def read(self, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
        """``(n, channels, rows, columns)``."""
        ...


class Drawn:
    """Drawn ones, kept from the first time on that they are read."""

    def __init__(self, faces: DrawnFaces) -> None:
        self._faces = faces
        self.names = [f"drawn-{faces.seed}-{faces.first + number}" for number in range(faces.identities)]
        self.labels = np.repeat(np.arange(faces.identities, dtype=np.int64), faces.shots)
        shape = (len(faces), faces.channels, *faces.size)
        try:
            self._kept = np.zeros(shape, np.uint8)
        except MemoryError:
            raise ConfigError(
                f"{shape[0]:,} drawn images of {shape[1:]} take {math.prod(shape) / 2**30:,.0f} GiB, which this "
                "machine does not have: give fewer --identities or --shots, or a smaller --size."
            ) from None
        self._there = np.zeros(len(faces), bool)

    def read(self, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
        absent = [index for index in indices if not self._there[index]]
        for start in range(0, len(absent), 64):
            part = absent[start : start + 64]
            self._kept[part] = self._faces.draw(part)[0]
            self._there[part] = True
        return self._kept[list(indices)]


class Encoded:
    """Images as files are, decoded when they are read.

    Args:
        store: of the images.
        names: of the identities.
        chosen: of each identity, its images in the store.
        size: rows and columns that they get.
        channels: 1 or 3.
    """

    def __init__(
        self, store: Store, names: Sequence[str], chosen: Sequence[Sequence[int]], size: tuple[int, int], channels: int
    ) -> None:
        self.names = list(names)
        self.left_out = 0
        """Identities with one image, of which there is no pair."""
        try:
            importlib.import_module("PIL.Image")
        except ModuleNotFoundError as error:
            if (words := sentence("a folder of images", error)) is None:
                raise
            raise ConfigError(f"{words}.") from None
        self._store, self._size, self._mode = store, size, "L" if channels == 1 else "RGB"
        self._places = [place for mine in chosen for place in mine]
        self.labels = np.repeat(np.arange(len(chosen), dtype=np.int64), [len(mine) for mine in chosen])

    def read(self, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
        return np.stack([self._one(self._places[index]) for index in indices])

    def _one(self, place: int) -> npt.NDArray[np.uint8]:
        found = self._decoded(place)
        if isinstance(found, str):
            raise ConfigError(self._unreadable(place, found))
        return found[None] if found.ndim == 2 else found.transpose(2, 0, 1)

    def _decoded(self, place: int) -> npt.NDArray[np.uint8] | str:
        """An image, or why it cannot be read."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(BytesIO(self._store.data(place))) as opened:
                image = opened.convert(self._mode).resize(self._size[::-1], Image.Resampling.BILINEAR)
        except UnidentifiedImageError:
            return "it is not an image"
        except (OSError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
            return str(error).rstrip(".")
        return np.asarray(image, np.uint8)

    def _unreadable(self, place: int, why: str) -> str:
        """What there is to say of an image that cannot be read, and of others that are looked at for it."""
        number = len(self._store.identities)
        others = [each for each in range(min(number, LOOKED_AT)) if each != place]
        broken = {place: why}
        broken |= {each: found for each in others if isinstance(found := self._decoded(each), str)}
        told = [f"{self._store.where(each)!r} ({broken[each]})" for each in sorted(broken)[:TOLD]]
        if len(broken) == 1:
            return f"the image {self._store.where(place)!r} cannot be read: {why}; remove it, or replace it."
        more = " and others" * (len(broken) > TOLD)
        looked = f"{len(others) + 1:,} images" + (f", of {number:,}, that were looked at" * (number > LOOKED_AT))
        return f"{len(broken):,} of {looked} cannot be read: {', '.join(told)}{more}; remove them, or replace them."


def sources(config: FaceConfig) -> tuple[ImageSource, ImageSource]:
    """Images to train on, and those of identities that are kept apart.

    Raises:
        ConfigError: there are too few identities with two images or more.
    """
    size = config.image_size()
    if config.data is None:
        made = {"size": size, "channels": config.channels, "seed": config.seed, "hard": config.difficulty}
        train = DrawnFaces(config.identities, config.shots, **made)
        apart = DrawnFaces(config.held_out, config.shots, first=10**8, **made)
        return Drawn(train), Drawn(apart)
    path = config.data.expanduser()
    store = store_of(path)
    mine: dict[str, list[int]] = {}
    for index, name in enumerate(store.identities):
        mine.setdefault(name, []).append(index)
    names = sorted(name for name, images in mine.items() if len(images) >= 2)
    apart = min(config.held_out, len(names) // 2)
    if apart < 2:
        raise ConfigError(
            f"{str(path)!r} has {len(names)} {'identity' if len(names) == 1 else 'identities'} with two images or "
            f"more, of {len(mine)} in all, and half of them are kept apart for evaluation: at least 4 are needed. It "
            f"is a folder with a folder of images for each identity ({', '.join(SUFFIXES)}), or .tar (not compressed) "
            "or .parquet files."
        )
    order = np.random.default_rng(0).permutation(len(names))  # whatever the seed, so that runs can be compared
    parts = [[names[i] for i in sorted(part)] for part in (order[apart:], order[:apart])]
    train, held = (Encoded(store, part, [mine[name] for name in part], size, config.channels) for part in parts)
    train.left_out = len(mine) - len(names)
    return train, held


class EpochSampler(Sampler):
    """A sampler whose indices say the epoch too: ``epoch * length + index``."""

    def _indices(self, positions: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        return epoch * self.length + super()._indices(positions, epoch)


class ImageBatches(data.Dataset[tuple[Tensor, Tensor]]):
    """Whole batches of images from -1 to 1, and their identities.

    Args:
        source: of the images.
        augment: whether they are changed.
        seed: of the changes.
        change: how, in place of this module's own way: takes an image ``(channels, rows, columns)`` and gives another
            one. What it draws from PyTorch's generator follows from (seed, epoch, image).
    """

    def __init__(
        self, source: ImageSource, *, augment: bool, seed: int, change: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._source, self._augment, self._seed, self._change = source, augment, seed, change

    def __len__(self) -> int:
        return len(self._source.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        epochs, numbers = zip(*(divmod(index, len(self)) for index in indices), strict=True)
        images = self._source.read(numbers).astype(np.float32) / 127.5 - 1
        if self._augment:
            for place, (epoch, number) in enumerate(zip(epochs, numbers, strict=True)):
                images[place] = self._changed(images[place], epoch, number)
        return torch.from_numpy(images), torch.from_numpy(self._source.labels[list(numbers)])

    def _changed(self, image: npt.NDArray[np.float32], epoch: int, number: int) -> npt.NDArray[np.float32]:
        draw = np.random.Generator(np.random.Philox(key=[self._seed, epoch << 40 | number]))
        if self._change is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(draw.integers(2**62)))
                found = self._change(torch.from_numpy(image))
            if found.shape != image.shape:
                raise ConfigError(
                    f"a transform made {tuple(found.shape)} of an image of {image.shape}: it keeps rows and columns."
                )
            return found.numpy()
        rows, columns = image.shape[1:]
        down, right = (int(draw.integers(-1, 2) * max(SHIFT * side // 64, 1)) for side in (rows, columns))
        image = np.roll(image, (down, right), (1, 2))
        if draw.random() < 0.5:
            image = image[:, :, ::-1]
        image = image * np.float32(np.exp(0.15 * draw.standard_normal())) + np.float32(0.1 * draw.standard_normal())
        if draw.random() < 0.3:
            high, wide = rows // 4, columns // 4
            top, left = int(draw.integers(rows - high + 1)), int(draw.integers(columns - wide + 1))
            image[:, top : top + high, left : left + wide] = np.float32(draw.uniform(-1, 1))
        return image


def unchanged(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What a loader makes of a batch that is one already."""
    return batch
