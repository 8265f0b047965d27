"""Where images by identity lie: a folder for each identity, webdataset's shards, parquet. An image is read when it is
asked for; nothing is unpacked, and nothing that is read may run code."""

from __future__ import annotations

import json
import os
import tarfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from shardfold.errors import ConfigError
from shardfold.tools.extras import sentence

__all__ = ["SUFFIXES", "Folders", "Parquet", "Shards", "Store", "store_of"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".pgm", ".ppm", ".webp")
NAMES = ("identity", "label", "class", "cls", "id")
"""Of the column, or the entry of a sample's JSON, that says whose image it is."""
IMAGES = ("image", "img", "jpg", "png")
GZIP = b"\x1f\x8b"
GROUPS = 4  # row groups of parquet that are kept


class Store(Protocol):
    """Images as files are, each of an identity."""

    @property
    def identities(self) -> Sequence[str]:
        """Of each image, its identity."""
        ...

    def data(self, index: int) -> bytes:
        """An encoded image."""
        ...

    def where(self, index: int) -> str:
        """What a message calls it."""
        ...


def store_of(path: Path) -> Store:
    """What lies at a path: parquet or shards, one file or a folder of them, or else folders by identity.

    Raises:
        ConfigError: nothing that can be read.
    """
    kinds: dict[str, Callable[[Sequence[Path]], Store]] = {".parquet": Parquet, ".tar": Shards}
    try:
        if path.is_file():
            if path.suffix.lower() not in kinds:
                raise ConfigError(
                    f"{str(path)!r} is a file: images come from a folder with a folder for each identity, .tar files "
                    "(webdataset, not compressed) or .parquet files."
                )
            return kinds[path.suffix.lower()]([path])
        inside = sorted(path.iterdir())
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    inside = [each for each in inside if each.name[0] != "."]
    for suffix, make in kinds.items():
        if mine := [each for each in inside if each.suffix.lower() == suffix and each.is_file()]:
            return make(mine)
    folders = [each for each in inside if each.is_dir()]
    flat = [each.name for each in inside if each.suffix.lower() in SUFFIXES]
    zipped = [each.name for each in inside if ".tar." in each.name.lower()]
    if flat and not folders:
        raise ConfigError(
            f"{str(path)!r} has images, {flat[0]!r} and {len(flat) - 1} others, but not in a folder for each identity: "
            "move them there."
        )
    if zipped and not folders:
        raise ConfigError(f"{str(path)!r} has {zipped[0]!r}, which is compressed: unpack it to .tar.")
    return Folders(folders)


class Folders:
    """A folder for each identity."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._files: list[Path] = []
        self.identities: list[str] = []
        for folder in folders:
            try:
                with os.scandir(folder) as inside:  # names that begin with a dot are systems' own
                    names = sorted(each.name for each in inside if each.name[0] != "." and each.is_file())
                mine = [folder / name for name in names if Path(name).suffix.lower() in SUFFIXES]
            except OSError as error:
                raise ConfigError(f"the folder {str(folder)!r} cannot be read: {error.strerror}.") from None
            self._files += mine
            self.identities += [folder.name] * len(mine)

    def data(self, index: int) -> bytes:
        return self._files[index].read_bytes()

    def where(self, index: int) -> str:
        return str(self._files[index])


class Shards:
    """Webdataset's: tar files in which the files of a sample have one name before the first dot, an image and whose it
    is: ``.cls``, ``.id`` or ``.txt`` with a number or a name, or ``.json`` with one of NAMES. An index of them is made
    once, of headers only; an image is read from its place."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._places: list[tuple[Path, str, int, int]] = []
        self.identities: list[str] = []
        for file in files:
            try:
                self._index(file)
            except (OSError, tarfile.TarError, EOFError) as error:
                why = "it is compressed, unpack it to .tar" if _zipped(file) else error
                raise ConfigError(f"the shard {str(file)!r} cannot be read: {why}.") from None
        if not self._places:
            named = " and ".join(repr(str(file)) for file in files[:2]) + " and others" * (len(files) > 2)
            raise ConfigError(f"{named}: there are no images inside; their names end in {', '.join(SUFFIXES)}.")

    def _index(self, file: Path) -> None:
        whose: dict[str, str] = {}
        images: dict[str, tuple[Path, str, int, int]] = {}
        with tarfile.open(file, "r:") as shard:
            for member in shard:
                name = PurePosixPath(member.name)
                stem, _, kind = name.name.partition(".")
                key, kind = str(name.parent / stem), "." + kind.lower()
                if not member.isfile():
                    continue
                if kind in SUFFIXES:
                    images[key] = file, member.name, member.offset_data, member.size
                elif kind in (".cls", ".id", ".txt", ".json"):
                    opened = shard.extractfile(member)
                    assert opened is not None
                    text = opened.read().decode("utf-8", errors="replace").strip()
                    where = f"{member.name!r} in {str(file)!r}"
                    whose[key] = text if kind != ".json" else _of_json(text, where)
                    if not whose[key]:
                        raise ConfigError(f"{where} is empty: it says whose the image beside it is.")
            _check_end(file, shard.offset)
        for key, place in images.items():
            if key not in whose:
                raise ConfigError(
                    f"the shard {str(file)!r} does not say whose image {place[1]!r} is: beside it there is no .cls, "
                    f".id, .txt or .json file of the same name."
                )
            self._places.append(place)
            self.identities.append(whose[key])

    def data(self, index: int) -> bytes:
        file, _, offset, size = self._places[index]
        with file.open("rb") as opened:
            opened.seek(offset)
            return opened.read(size)

    def where(self, index: int) -> str:
        return f"{self._places[index][1]} in {self._places[index][0]}"


def _check_end(file: Path, at: int) -> None:
    """``tarfile`` takes whatever is no header for the end: only nothing and zeros are."""
    with file.open("rb") as opened:
        opened.seek(at)
        if any(opened.read(tarfile.BLOCKSIZE)):
            raise tarfile.ReadError(f"behind {at:,} bytes it is damaged, or was cut off there")


def _zipped(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(GZIP)) == GZIP
    except OSError:
        return False


def _of_json(text: str, where: str) -> str:
    try:
        found = json.loads(text)
    except ValueError:
        raise ConfigError(f"{where} is not JSON.") from None
    for name in NAMES:
        if isinstance(found, dict) and isinstance(found.get(name), str | int):
            return str(found[name])
    raise ConfigError(f"{where} does not say whose image it is: it has none of {', '.join(NAMES)}.")


class Parquet:
    """Files with a column of encoded images (bytes, or as `datasets` writes them a struct with bytes) and one of
    identities."""

    def __init__(self, files: Sequence[Path]) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ModuleNotFoundError as error:
            if (words := sentence("a folder of parquet files", error)) is None:
                raise
            raise ConfigError(f"{words}.") from None
        self._files: list[Any] = []
        self._groups: list[tuple[int, int, int]] = []  # the first image, the file, the row group
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._paths, self.identities = list(files), []
        self._images: list[str] = []  # of each file the column
        for number, file in enumerate(files):
            try:
                opened = parquet.ParquetFile(file)
                whose, image = self._columns(opened.schema_arrow.names, file)
                first = len(self.identities)
                for group in range(opened.num_row_groups):
                    self._groups.append((len(self.identities), number, group))
                    values = opened.read_row_group(group, columns=[whose]).column(0).to_pylist()
                    if None in values:
                        row = len(self.identities) - first + values.index(None)
                        raise ConfigError(f"row {row} of {str(file)!r} has no {whose}: it says whose its image is.")
                    self.identities += [str(value) for value in values]
            except (OSError, pyarrow.ArrowException) as error:
                raise ConfigError(f"{str(file)!r} cannot be read as parquet: {str(error).rstrip('.')}.") from None
            self._files.append(opened)
            self._images.append(image)

    def _columns(self, names: Sequence[str], file: Path) -> tuple[str, str]:
        found = [next((each for each in known if each in names), None) for known in (NAMES, IMAGES)]
        if found[0] is None or found[1] is None:
            raise ConfigError(
                f"{str(file)!r} has the columns {', '.join(names)}: of images one is called "
                f"{' or '.join(IMAGES)}, of identities one {' or '.join(NAMES)}."
            )
        return found[0], found[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": [None] * len(self._paths), "_kept": OrderedDict()}

    def data(self, index: int) -> bytes:
        at = bisect_right(self._groups, index, key=lambda each: each[0]) - 1
        first, number, group = self._groups[at]
        if at not in self._kept:
            from pyarrow import parquet

            opened = self._files[number] = self._files[number] or parquet.ParquetFile(self._paths[number])
            self._kept[at] = opened.read_row_group(group, columns=[self._images[number]]).column(0)
            if len(self._kept) > GROUPS:
                self._kept.popitem(last=False)
        value = self._kept[at][index - first].as_py()
        value = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(value, bytes):
            raise ValueError(f"the column {self._images[number]!r} has no bytes of an image there")
        return value

    def where(self, index: int) -> str:
        _, number, _ = self._groups[bisect_right(self._groups, index, key=lambda each: each[0]) - 1]
        start = min(f for f, n, _ in self._groups if n == number)
        return f"row {index - start} of {self._paths[number]}"
