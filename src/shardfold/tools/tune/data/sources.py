"""Files of rows, and blocks of them: what is read at once.

A block is at most ``ROWS`` rows or about ``BYTES`` bytes. Where blocks lie in a file of lines is found by counting its
lines, in the pass that also takes its checksum; nothing is parsed for that.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import xxhash

from shardfold.errors import ConfigError, did_you_mean
from shardfold.tools.extras import sentence

__all__ = ["Raw", "RowBlock", "SourceFile", "find_files", "read_block", "scan"]

ROWS = 1024
BYTES = 1 << 20
_CHUNK = 8 << 20  # bytes that are looked through at once
_LINE = 64 << 20  # bytes of a row, at most
_BLANKS = " \t\r\n\v\f"

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".md": "text",
}


_PACKED = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz"}


@dataclass(frozen=True)
class RowBlock:
    """Rows of one file that follow each other.

    Attributes:
        first: the number of its first row in the file, from 0; for files of lines that of its line.
        rows: how many, blank lines included.
        start, stop: bytes of the file; 0 where it is not read by bytes.
    """

    first: int
    rows: int
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class SourceFile:
    """A file and its blocks.

    Attributes:
        path: of the file.
        form: ``jsonl``, ``json``, ``parquet``, ``arrow``, ``csv`` or ``text``.
        checksum: of its bytes.
        blocks: all of its rows, in order.
    """

    path: str
    form: str
    checksum: str
    blocks: tuple[RowBlock, ...]


@dataclass(frozen=True)
class Raw:
    """A row as it lies in a file.

    Attributes:
        where: file and line (or row), as messages name it.
        value: its columns, or the text of a plain file; None: a blank line.
    """

    where: str
    value: dict[str, Any] | str | None


def find_files(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """The files of a source, with their forms: itself, or those of a folder, also of one that ``datasets`` saved.

    Raises:
        ConfigError: there is none, or it is of no known form.
    """
    place = Path(path)
    if place.is_file():
        return [(str(place), _form(place))]
    if not place.is_dir():
        near = did_you_mean(place.name, [each.name for each in place.parent.iterdir()]) if place.parent.is_dir() else ""
        raise ConfigError(f"data: there is no file or folder {str(place)!r}.{near}")
    if (place / "dataset_dict.json").is_file():
        splits = json.loads((place / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        if "train" not in splits:
            raise ConfigError(
                f"data: {str(place)!r} has the splits {', '.join(splits)}: give the folder of one of them."
            )
        return find_files(place / "train")
    if (place / "state.json").is_file():  # written by Dataset.save_to_disk
        names = json.loads((place / "state.json").read_text(encoding="utf-8")).get("_data_files", [])
        return [(str(place / each["filename"]), "arrow") for each in names]
    found = sorted(each for each in place.rglob("*") if each.suffix.lower() in _SUFFIXES and each.is_file())
    if not found:
        raise ConfigError(f"data: the folder {str(place)!r} has no file that ends in {', '.join(_SUFFIXES)}.")
    return [(str(each), _form(each)) for each in found]


def _form(path: Path) -> str:
    form = _SUFFIXES.get(path.suffix.lower())
    if form is None:
        raise ConfigError(
            f"data: {str(path)!r} ends in {path.suffix or 'nothing'}, but files end in {', '.join(_SUFFIXES)}."
            f"{' Unpack it.' if path.suffix.lower() in _PACKED else did_you_mean(path.suffix, _SUFFIXES)}"
        )
    if form == "json":  # lines of JSON are often named so, too
        with path.open("rb") as file:
            form = "json" if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[" else "jsonl"
    return form


def scan(path: str, form: str, memory: Path | None = None) -> SourceFile:
    """Look through a file: its checksum, and where its blocks are.

    Args:
        memory: a folder that keeps what was found, by the file's path, size and time of change.

    Raises:
        ConfigError: it cannot be read.
    """
    status = os.stat(path)
    key = xxhash.xxh3_128_hexdigest(
        f"{os.path.abspath(path)}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}|{form}|{ROWS}|{BYTES}".encode()
    )
    kept = memory / f"{key}.json" if memory is not None else None
    if kept is not None and kept.is_file():
        try:
            known = json.loads(kept.read_text(encoding="utf-8"))
            return SourceFile(path, form, known["checksum"], tuple(RowBlock(*each) for each in known["blocks"]))
        except (ValueError, KeyError, TypeError):
            kept.unlink(missing_ok=True)
    if form in ("jsonl", "text"):
        found = SourceFile(path, form, *_scan_lines(path, by_rows=form == "jsonl"))
    else:
        found = SourceFile(path, form, _checksum(path), _cut(_count(path, form)))
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        blocks = [list(asdict(each).values()) for each in found.blocks]
        temporary = kept.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"checksum": found.checksum, "blocks": blocks}), encoding="utf-8")
        os.replace(temporary, kept)
    return found


def _checksum(path: str) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _scan_lines(path: str, *, by_rows: bool) -> tuple[str, tuple[RowBlock, ...]]:
    """Checksum, and blocks that end at ends of lines; ``by_rows``: a line is a row, else a block is."""
    digest = xxhash.xxh3_128()
    blocks: list[RowBlock] = []
    start = first = line = at = 0  # start of the block, its first line, lines and bytes so far

    def close(stop: int, lines: int) -> None:
        nonlocal start, first
        blocks.append(RowBlock(first, lines - first, start, stop) if by_rows else RowBlock(first, 1, start, stop))
        start, first = stop, lines

    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            ends = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == 10) + at + 1
            done = 0
            while done < len(ends):
                last = int(np.searchsorted(ends, start + BYTES))  # the first line that ends beyond
                if by_rows:
                    last = min(last, first + ROWS - line - 1)
                if (last := max(last, done)) >= len(ends):
                    break
                close(int(ends[last]), line + last + 1)
                done = last + 1
            line += len(ends)
            at += len(chunk)
    if at > start:
        close(at, line + 1 if by_rows and not _ends_line(path) else max(line, first + 1))
    return digest.hexdigest(), tuple(blocks)


def _ends_line(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _cut(rows: int) -> tuple[RowBlock, ...]:
    return tuple(RowBlock(first, min(ROWS, rows - first)) for first in range(0, rows, ROWS))


def _count(path: str, form: str) -> int:
    if form == "parquet":
        pyarrow = _pyarrow("arrow")
        try:
            return pyarrow.parquet.ParquetFile(path).metadata.num_rows
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ConfigError(f"data: {path} is no Parquet file: {' '.join(str(error).split())}.") from None
    if form == "arrow":
        return _arrow(path).num_rows
    return len(_whole(path, form, os.stat(path).st_mtime_ns))


def _pyarrow(module: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ConfigError(f"{sentence(f'Reading {module} files', error) or error}.") from None
    return pyarrow.parquet if module == "parquet" else pyarrow


@lru_cache(maxsize=4)
def _arrow(path: str) -> Any:
    """A table over the mapped file, a stream as ``datasets`` writes it, or a file of Arrow's."""
    pyarrow = _pyarrow("arrow")
    mapped = pyarrow.memory_map(path, "r")
    try:
        return pyarrow.ipc.open_stream(mapped).read_all()
    except pyarrow.ArrowInvalid:
        try:
            return pyarrow.ipc.open_file(pyarrow.memory_map(path, "r")).read_all()
        except pyarrow.ArrowInvalid as error:
            raise ConfigError(f"data: {path} is no Arrow file: {error}.") from None


@lru_cache(maxsize=2)
def _row_group(path: str, group: int) -> Any:
    return _pyarrow("parquet").ParquetFile(path).read_row_group(group)


@lru_cache(maxsize=2)
def _whole(path: str, form: str, _changed: int) -> list[Any]:
    """All rows of a file that has to be parsed from its start.

    Raises:
        ConfigError: it cannot be parsed.
    """
    with open(path, encoding="utf-8-sig", newline="") as file:
        if form == "csv":
            csv.field_size_limit(1 << 30)
            return list(_table(file, path))
        try:
            rows = json.load(file)
        except UnicodeDecodeError as error:
            raise ConfigError(f"data: {path} is not UTF-8: {error.reason}, at byte {error.start}.") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"data: {path} is no JSON: {error}.") from None
    return rows


def _table(file: TextIO, path: str) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(file, delimiter="\t" if path.lower().endswith(".tsv") else ",")
    try:
        for row in reader:
            if None in row or None in row.values():
                names = ", ".join(map(repr, reader.fieldnames or ()))
                raise ConfigError(f"data: {path}:{reader.line_num}: a row has other fields than the header: {names}.")
            yield dict(row)
    except csv.Error as error:
        raise ConfigError(f"data: {path}:{reader.line_num}: {error}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"data: {path}:{reader.line_num + 1}: not UTF-8: {error.reason}.") from None


def read_block(file: SourceFile, block: RowBlock) -> Iterator[Raw]:
    """Yield the rows of a block.

    Raises:
        ConfigError: one is not what its file says it is; names file and line.
    """
    if file.form in ("jsonl", "text"):
        with open(file.path, "rb") as opened:
            opened.seek(block.start)
            content = opened.read(block.stop - block.start)
        if file.form == "text":
            yield Raw(f"{file.path}:{block.first + 1}", _decoded(content, file.path, block.first + 1).lstrip("\ufeff"))
            return
        yield from _lines(file.path, block, content)
        return
    for number, value in enumerate(_columns(file, block), block.first):
        if not isinstance(value, dict):
            raise ConfigError(f"data: {file.path}, row {number + 1}: a row is an object of columns, not {value!r:.60}.")
        yield Raw(f"{file.path}, row {number + 1}", value)


def _decoded(content: bytes, path: str, line: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line += content[: error.start].count(b"\n")
        raise ConfigError(f"data: {path}:{line}: not UTF-8: {error.reason}.") from None


def _lines(path: str, block: RowBlock, content: bytes) -> Iterator[Raw]:
    lines = _decoded(content, path, block.first + 1).split("\n")
    if lines[-1] == "":
        lines.pop()
    long = len(content) > _LINE
    for number, line in enumerate(lines, block.first + 1):
        if number == 1:
            line = line.removeprefix("\ufeff")
        where = f"{path}:{number}"
        if not line.strip(_BLANKS):
            yield Raw(where, None)
            continue
        if long and (size := len(line.encode())) > _LINE:
            raise ConfigError(
                f"data: {where}: a line of {size:,} bytes, but a row has at most {_LINE:,}: split it into rows."
            )
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"data: {where}: not JSON: {error}.") from None
        if not isinstance(value, dict):
            raise ConfigError(f"data: {where}: a row is an object, {{...}}, not {value!r:.60}.")
        yield Raw(where, value)


def _columns(file: SourceFile, block: RowBlock) -> Sequence[Any]:
    if file.form == "arrow":
        return _arrow(file.path).slice(block.first, block.rows).to_pylist()
    if file.form != "parquet":
        rows = _whole(file.path, file.form, os.stat(file.path).st_mtime_ns)
        return rows[block.first : block.first + block.rows]
    found: list[Any] = []
    metadata, start = _pyarrow("parquet").ParquetFile(file.path).metadata, 0
    for group in range(metadata.num_row_groups):
        stop = start + metadata.row_group(group).num_rows
        low, high = max(block.first, start), min(block.first + block.rows, stop)
        if low < high:
            found += _row_group(file.path, group).slice(low - start, high - low).to_pylist()
        start = stop
    return found
