"""Event files of TensorBoard's: their scalars, read from any byte on, also while they are written.

A file is records: 8 bytes of length, a checksum of them, the data, a checksum of the data (CRC-32C, masked), all
little-endian; the data are a protocol buffer ``Event`` (tensorboard/compat/proto/{event,summary,tensor}.proto). Only
scalars are taken, as ``simple_value`` (TensorFlow 1, PyTorch) or as a tensor of one element (TensorFlow 2, Keras).
Nothing in a file is trusted: it may be cut off, damaged, huge, or no event file at all.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardfold.tools.observe.run_files import opened

__all__ = ["EventFile", "ScalarEvent", "event_files", "last_scalars"]

NAME = "events.out.tfevents."
HEAD, FOOT = 12, 4  # bytes before and behind the data of a record
MOST = 1024 * 1024  # bytes of a record that is read; longer ones are pictures and graphs
PIECE = 1024 * 1024  # bytes read at a time
TAIL = 64 * 1024  # bytes in which the last scalars are looked for
POLYNOMIAL = 0x82F63B78  # of CRC-32C, reflected
KINDS = {1: ("f", 5), 2: ("d", 6), 3: ("i", 7), 9: ("q", 10)}
"""Types of tensors that are taken: their format, and the field with values that are not packed as bytes."""


class ScalarEvent(NamedTuple):
    step: int
    time: float
    """Seconds since 1970."""
    key: str
    value: float
    """May be infinite or NaN."""


class EventFile:
    """One file, read on from a byte.

    Attributes:
        cursor: the byte behind the last record that was taken; give it again to go on from there.
        damaged: records that were left out, as their checksum is wrong.
        problem: why nothing behind the cursor can be read; "": nothing is wrong, the rest is not written yet.
    """

    def __init__(self, path: Path, cursor: int = 0) -> None:
        self.path, self.cursor = path, cursor
        self.damaged, self.problem = 0, ""

    def scalars(self, most: int | None = None) -> Iterator[ScalarEvent]:
        """The scalars of the whole records from the cursor on; half a record at the end is left for the next call.

        Args:
            most: bytes after which it is enough; None: all that there are.
        """
        self.problem = ""
        with opened(self.path) as file, suppress(OSError):  # the disk is gone: what was read is read
            if file is None:
                self.problem = "it cannot be opened, or is no regular file"
                return
            size = os.fstat(file).st_size
            yield from self._records(file, size if most is None else min(size, self.cursor + most), size)

    def _records(self, file: int, end: int, size: int) -> Iterator[ScalarEvent]:
        begin, held = self.cursor, b""  # where what is held begins
        while self.cursor < end:
            at = self.cursor - begin
            if at + HEAD > len(held):
                begin, held, at = self.cursor, os.pread(file, PIECE, self.cursor), 0
            head = held[at : at + HEAD]
            length = _length(head)
            if length is None:
                if len(head) == HEAD:
                    self.problem = f"at byte {self.cursor} no record begins: it is damaged, or no event file"
                return
            whole, found = HEAD + length + FOOT, []
            if self.cursor + whole > size:
                return
            if length <= MOST:
                if at + whole > len(held):
                    begin, held, at = self.cursor, os.pread(file, max(PIECE, whole), self.cursor), 0
                data, foot = held[at + HEAD : at + whole - FOOT], held[at + whole - FOOT : at + whole]
                if _masked_crc(data) == int.from_bytes(foot, "little"):
                    found = _scalars(data)
                else:
                    self.damaged += 1
            self.cursor += whole
            yield from found


def event_files(folder: Path) -> list[Path]:
    """The event files in a folder, the earliest first."""
    with suppress(OSError):
        return sorted(each for each in folder.iterdir() if each.name.startswith(NAME))
    return []


def last_scalars(folder: Path) -> dict[str, float | None]:
    """The last value of each key at the end of the last event file in a folder, and ``step``, the last of the steps;
    None: it is not finite. Empty if there is none."""
    found: dict[str, float | None] = {}
    for path in event_files(folder)[-1:]:
        for each in EventFile(path, _late_record(path)).scalars():
            found |= {each.key: each.value if math.isfinite(each.value) else None, "step": each.step}
    return found


def _late_record(path: Path) -> int:
    """Where a record begins in the last bytes of a file: where eight bytes are followed by their checksum."""
    with opened(path) as file, suppress(OSError):
        start = max(0, os.fstat(file).st_size - TAIL) if file is not None else 0
        if file is not None and start:
            tail = os.pread(file, TAIL, start)
            for match in re.finditer(rb"(?=[\s\S]{3}\0{5})", tail):  # of less than 16 MiB
                if _length(tail[match.start() : match.start() + HEAD]) is not None:
                    return start + match.start()
    return 0


def _length(head: bytes) -> int | None:
    if len(head) < HEAD or _masked_crc(head[:8]) != int.from_bytes(head[8:], "little"):
        return None
    return int.from_bytes(head[:8], "little")


def _crc_table() -> list[int]:
    table: list[int] = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_CRC = _crc_table()


def _masked_crc(data: bytes) -> int:
    crc, table = 0xFFFFFFFF, _CRC
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _scalars(data: bytes) -> list[ScalarEvent]:
    """Of one ``Event``; none if it is not a well-formed one."""
    time, step, found = 0.0, 0, []
    try:
        for number, value in _fields(data):
            if number == 1 and isinstance(value, bytes):
                (time,) = struct.unpack("<d", value)
            elif number == 2 and isinstance(value, int):
                step = value - (1 << 64) * (value >> 63)
            elif number == 5 and isinstance(value, bytes):
                found += [_value(each) for field, each in _fields(value) if field == 1 and isinstance(each, bytes)]
    except (ValueError, IndexError, struct.error):
        return []
    return [ScalarEvent(step, time, key, value) for key, value in found if key and value is not None]


def _value(data: bytes) -> tuple[str, float | None]:
    key, found = "", None
    for number, value in _fields(data):
        if isinstance(value, bytes):
            if number == 1:
                key = value.decode("utf-8", errors="replace")
            elif number == 2:
                (found,) = struct.unpack("<f", value)
            elif number == 8:
                found = _only_element(value)
    return key, found


def _only_element(data: bytes) -> float | None:
    """Of a tensor that has one."""
    kind, elements, packed, given = 0, 1, b"", None
    for number, value in _fields(data):
        if number == 1 and isinstance(value, int):
            kind = value
        elif isinstance(value, bytes) and number == 2:
            sizes = [dict(_fields(each)).get(1, 0) for _, each in _fields(value) if isinstance(each, bytes)]
            elements = 1 if all(size == 1 for size in sizes) else 0
        elif isinstance(value, bytes) and number == 4:
            packed = value
        elif number == KINDS.get(kind, ("", 0))[1]:
            given = value
    if elements != 1 or kind not in KINDS:
        return None
    form = KINDS[kind][0]
    if packed or (isinstance(given, bytes) and form in "fd"):
        return float(struct.unpack(f"<{form}", packed or given)[0])  # pyright: ignore[reportArgumentType]
    if isinstance(given, bytes):
        given = _varint(given, 0)[0]
    return float(given - (1 << 64) * (given >> 63)) if given is not None else None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message by their number: integers of varints, bytes of all else.

    Raises:
        ValueError, IndexError: it is none.
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"there is no wire type {wire}")
        if at + size > len(data):
            raise ValueError("a field is longer than its message")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise ValueError("a number has no end")
