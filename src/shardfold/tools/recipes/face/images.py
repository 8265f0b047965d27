"""Images by identity: drawn ones, or files in a folder for each identity; and how they are changed for training.

An image is the same whenever it is read. What training changes about it (a shift, a mirror image, light, a covered
patch) follows from (seed, epoch, image), so it is another one in each epoch and for each image, whichever rank or
worker process reads it, and the same again where a run is resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import data

from shardfold.data import Sampler
from shardfold.errors import ConfigError
from shardfold.tools.recipes.face.config import FaceConfig
from shardfold.tools.recipes.face.drawn import DrawnFaces

__all__ = ["Batches", "EpochSampler", "Source", "sources"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".pgm", ".ppm", ".webp")
SHIFT = 2  # pixels of 32


class Source(Protocol):
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
        self._kept = np.zeros((len(faces), faces.channels, *faces.size), np.uint8)
        self._there = np.zeros(len(faces), bool)

    def read(self, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
        absent = [index for index in indices if not self._there[index]]
        for start in range(0, len(absent), 64):
            part = absent[start : start + 64]
            self._kept[part] = self._faces.draw(part)[0]
            self._there[part] = True
        return self._kept[list(indices)]


class Files:
    """Image files, of which each folder is an identity."""

    def __init__(self, folders: Sequence[Path], size: tuple[int, int], channels: int) -> None:
        self.names = [folder.name for folder in folders]
        self._size, self._mode = size, "L" if channels == 1 else "RGB"
        self._files: list[Path] = []
        labels: list[int] = []
        for number, folder in enumerate(folders):
            mine = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
            self._files += mine
            labels += [number] * len(mine)
        self.labels = np.array(labels, dtype=np.int64)

    def read(self, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
        return np.stack([self._one(self._files[index]) for index in indices])

    def _one(self, file: Path) -> npt.NDArray[np.uint8]:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(file) as opened:
                image = opened.convert(self._mode).resize(self._size[::-1], Image.Resampling.BILINEAR)
        except (OSError, UnidentifiedImageError) as error:
            raise ConfigError(f"the image {str(file)!r} cannot be read: {error}.") from None
        found = np.asarray(image, np.uint8)
        return found[None] if found.ndim == 2 else found.transpose(2, 0, 1)


def sources(config: FaceConfig) -> tuple[Source, Source]:
    """Images to train on, and those of identities that are kept apart.

    Raises:
        ConfigError: the folder has too few identities with two images or more.
    """
    size = config.image_size()
    if config.data is None:
        made = {"size": size, "channels": config.channels, "seed": config.seed, "hard": config.difficulty}
        train = DrawnFaces(config.identities, config.shots, **made)
        apart = DrawnFaces(config.held_out, config.shots, first=10**8, **made)
        return Drawn(train), Drawn(apart)
    folder = config.data.expanduser()
    try:
        found = sorted(each for each in folder.iterdir() if each.is_dir())
    except OSError as error:
        raise ConfigError(f"the folder {str(folder)!r} cannot be read: {error.strerror}.") from None
    folders = [each for each in found if sum(f.suffix.lower() in SUFFIXES for f in each.iterdir()) >= 2]
    apart = min(config.held_out, len(folders) // 2)
    if apart < 2:
        raise ConfigError(
            f"{str(folder)!r} has {len(folders)} folders with two images or more, of which half are kept apart for "
            f"evaluation: give a folder with a folder for each of 4 identities at least ({', '.join(SUFFIXES)})."
        )
    order = np.random.default_rng(0).permutation(len(folders))  # whatever the seed, so that runs can be compared
    held, train = sorted(order[:apart]), sorted(order[apart:])
    return tuple(Files([folders[i] for i in part], size, config.channels) for part in (train, held))  # pyright: ignore


class EpochSampler(Sampler):
    """A sampler whose indices say the epoch too: ``epoch * length + index``."""

    def batches(self) -> Iterator[list[int]]:
        start = self.epoch * self.length
        for batch in super().batches():
            yield [start + index for index in batch]


class Batches(data.Dataset[tuple[Tensor, Tensor]]):
    """Whole batches of images from -1 to 1, and their identities.

    Args:
        source: of the images.
        augment: whether they are changed.
        seed: of the changes.
    """

    def __init__(self, source: Source, *, augment: bool, seed: int) -> None:
        self._source, self._augment, self._seed = source, augment, seed

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
