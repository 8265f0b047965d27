"""The curves of a run: ``metrics.jsonl``, or TensorBoard's events, as blocks of rows. Their memory has a bound."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import threading
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from itertools import accumulate, chain
from operator import le
from pathlib import Path
from typing import Any, NamedTuple

from shardfold.tools.board._event_rows import EventRows
from shardfold.tools.observe.event_files import event_files
from shardfold.tools.observe.run_files import opened

__all__ = ["AXES", "CurvePoints", "StepCurves"]

AXES = ("step", "tokens", "seconds")
"""What points are drawn over. Tokens and seconds go on where a run that was started again counts anew."""
TIMES = ("tokens", "seconds", "tokens_per_s")
MOST_BLOCKS = 4096
PIECE = 2**20  # bytes that are read at a time: others wait for the interpreter meanwhile
MOST_REREAD = 64 * 2**20
"""Bytes that a look at a part of a curve reads again for it; of a longer part the blocks are shown."""
LAST = 64
"""Bytes in front of the place up to which a file was read, by which it is known to be the same."""
MOST_LATE = 16 * 2**10  # bytes of rows that are kept as they are
DIGITS = 6


@lru_cache(maxsize=256)
def _pattern(key: str) -> re.Pattern[bytes]:
    """Of a key's number in a row."""
    return re.compile(rb'"%b":\s*([^,}\s]+)' % re.escape(key.encode()))


class CurvePoints(NamedTuple):
    """A part of a curve.

    Attributes:
        points: ``[x, min, max, mean]`` of some rows, and a fifth number where some of them are not finite: how many;
            or ``[x, value]`` of one, as JSON text; ``null``: not finite.
        level: rows of a point.
        is_whole: whether they take the place of all that was told before, or go on from there.
    """

    points: str
    level: int
    is_whole: bool


class _Column:
    """Of a key, by block: the least and largest number, their sum and how many there are; and of all blocks."""

    __slots__ = ("all", "count", "high", "low", "sum")

    def __init__(self) -> None:
        self.low, self.high, self.sum, self.count = array("d"), array("d"), array("d"), array("L")
        self.all = 0

    def append(self, values: Sequence[float]) -> None:
        self.low.append(min(values, default=math.inf))
        self.high.append(max(values, default=-math.inf))
        self.sum.append(sum(values))
        self.count.append(len(values))
        self.all += len(values)

    def extend_last(self, values: Sequence[float]) -> None:
        if values:
            self.low[-1] = min(self.low[-1], *values)
            self.high[-1] = max(self.high[-1], *values)
            self.sum[-1] += sum(values)
            self.count[-1] += len(values)
            self.all += len(values)

    def halve(self) -> None:
        """Two blocks become one."""
        for name, join in (("low", min), ("high", max), ("sum", sum), ("count", sum)):
            old = getattr(self, name)
            setattr(self, name, array(old.typecode, (join(old[at : at + 2]) for at in range(0, len(old), 2))))


class _Rows(NamedTuple):
    """Rows of a piece of the file: where each begins, and numbers by key; None: it has none."""

    begins: Sequence[int]
    columns: Mapping[str, Sequence[float | None]]


class StepCurves:
    """Of one run, for the keys that were asked for.

    Rows are read once, by position; a file that became shorter or another one is read anew. Up to ``MOST_BLOCKS`` rows
    are kept as they are; of more, 2, 4, 8, ... rows share a block, and a look at a small part reads that part of the
    file again. Where a run went back, as from a checkpoint, the later rows hold.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "metrics.jsonl"
        self._place = os.fspath(self._path)
        self._events: EventRows | None = None
        self._lock = threading.Lock()
        self.used = 0.0
        self._which: tuple[int, bytes] | None = None
        self._seen: tuple[int, int, int] | None = None
        self._mark = ""
        self._reset(())

    def _opened(self) -> AbstractContextManager[int | None]:
        looks = self._events is None and not self.is_there  # else each look would cost another call of the system
        if looks and not os.path.lexists(self._place) and event_files(self._folder):
            self._events = EventRows(self._folder)
        return opened(self._path) if self._events is None else self._events.opened()

    def _reset(self, keys: Iterable[str]) -> None:
        self._turns, self._last, self._late = 0, b"", b""
        self._told: Mapping[str, Sequence[float | None]] | None = None
        self._read, self._rows, self._size, self._length = 0, 0, 1, 0
        self._begins = array("Q")
        self._columns = {key: _Column() for key in keys}
        self._totals = _Totals()
        self._step = -math.inf
        self._skips = False

    @property
    def num_numbers(self) -> int:
        """That are in memory, about."""
        return len(self._begins) * (1 + 4 * len(self._columns))

    @property
    def is_there(self) -> bool:
        """Whether there was a file when it was read last."""
        return self._which is not None

    @property
    def share_read(self) -> float:
        return self._read / self._length if self._length else 1.0

    @property
    def cursor(self) -> str:
        return f"{self._mark}.{self._turns}.{self._read}"

    def keys(self) -> list[str]:
        """The keys of numbers in the first and last rows, without those that are axes."""
        found: dict[str, None] = {}
        with self._opened() as file:
            if file is not None:
                for at in (0, max(0, os.fstat(file).st_size - 64 * 1024)):
                    lines = os.pread(file, 64 * 1024, at).split(b"\n")
                    for line in lines[(1 if at else 0) : -1][-32:] + lines[:1] * (not at):
                        for key, value in _row(line).items():
                            if _is_number(value) or value is None:
                                found.setdefault(key)
        return [key for key in found if key not in ("step", "seconds") and len(key) < 200]

    def read_on(self, keys: Collection[str], by: str, until: float) -> None:
        """Read what is new, or all for keys that are new; it ends at a time of the monotonic clock."""
        wanted = {*keys, "step", *(TIMES if by != "step" or "tokens" in keys else ())}
        self.used = time.monotonic()
        if wanted <= self._columns.keys() and self._is_as_it_was():
            return
        with self._lock, self._opened() as file:
            first = os.pread(file, 64, 0).partition(b"\n")[0] if file is not None else b""
            found = os.fstat(file) if file is not None else None
            which, length = ((found.st_ino, first), found.st_size) if found is not None else (None, 0)
            before = os.pread(file, len(self._last), self._read - len(self._last)) if file is not None else b""
            if which != self._which or length < self._read or before != self._last:
                self._reset({*wanted, *self._columns})
                self._which, self._mark = which, secrets.token_hex(4)
            elif not wanted <= self._columns.keys():
                self._reset({*wanted, *self._columns})
            self._length, self._late, self._told = length, b"", None
            self._seen = (found.st_ino, length, found.st_mtime_ns) if found is not None else None
            if file is None:
                return
            while self._read < self._length:
                before = self._read
                piece = whole = os.pread(file, min(PIECE, length - before), before)
                end = piece.rfind(b"\n") + 1
                if not end:
                    if len(piece) < PIECE:  # half a line, that comes
                        self._length = self._read
                        return
                    self._skips, end = True, len(piece)  # a line without end
                elif self._skips:
                    start = piece.find(b"\n") + 1
                    self._skips, self._read, piece, end = False, self._read + start, piece[start:end], end - start
                columns = self._take(piece[:end]) if end and not self._skips else None
                self._read += end
                late = whole[: self._read - before]
                self._last = (self._last + late[-LAST:])[-LAST:]
                # For who looks all the time; of a long piece there would be one for each run.
                self._late, self._told = (late, columns) if len(late) <= MOST_LATE else (b"", None)
                if time.monotonic() > until:
                    return

    def _is_as_it_was(self) -> bool:
        """Whether all was read of the file, and nothing came since."""
        if self._events is not None or self._read != self._length:
            return False
        with suppress(OSError):
            found = os.lstat(self._place)
            return self._seen == (found.st_ino, found.st_size, found.st_mtime_ns)
        return False

    def _take(self, piece: bytes) -> Mapping[str, Sequence[float | None]]:
        """Take the rows of whole lines, and return their numbers."""
        has_times = "tokens" in self._columns
        begins, columns = _rows_of(piece, [key for key in self._columns if key != "tokens"])
        if has_times:
            columns = {**columns, **self._totals.of(columns)}
        if not self._read:  # the size that blocks would come to
            parts = self._length / len(piece) if self._length > PIECE else 1.0  # else the rest is half a line
            while len(begins) * parts / self._size > MOST_BLOCKS:
                self._size *= 2
        steps = _finite(columns["step"])
        self._turns += sum(map(le, steps, chain((self._step,), steps)))
        self._step = steps[-1] if steps else self._step
        clean = {key for key in self._columns if _is_clean(columns[key])}
        at, count = 0, len(begins)
        while at < count:
            inside = self._rows % self._size
            if not inside and len(self._begins) == MOST_BLOCKS:
                self._size *= 2
                self._begins = self._begins[::2]
                for column in self._columns.values():
                    column.halve()
                continue
            until = min(count, at + self._size - inside)
            if not inside:
                self._begins.append(self._read + begins[at])
            for key, column in self._columns.items():
                values: Any = columns[key][at:until]
                values = values if key in clean else _finite(values)
                column.extend_last(values) if inside else column.append(values)
            self._rows += until - at
            at = until
        return columns

    # -- what is told

    def whole(self, key: str, by: str, pixels: int, part: tuple[float, float] | None = None) -> CurvePoints:
        """The curve, or the part of it between two values of the axis, with a point for a pixel at most."""
        with self._lock:
            blocks = self._valid(by)
            if part is not None:
                x = self._columns[by].low
                inside = [at for at, block in enumerate(blocks) if part[0] <= x[block] <= part[1]]
                # The block in front may end within the part.
                blocks = blocks[max(0, inside[0] - 1) : inside[-1] + 2] if inside else blocks[:0]
                if self._size > 1 and len(blocks) < pixels and (rows := self._again(blocks, key, by)) is not None:
                    return self._grouped_rows([each for each in rows if part[0] <= each[0] <= part[1]], pixels)
            return self._grouped(blocks, key, by, pixels)

    def since(self, cursor: str, key: str, by: str, pixels: int) -> CurvePoints | None:
        """What came behind a cursor; None: nothing."""
        mark, _, place = cursor.rpartition(".")
        begin = int(place) if place.isdecimal() and len(place) < 20 else -1
        if mark != f"{self._mark}.{self._turns}" or not 0 <= begin <= self._read or self._read - begin > PIECE:
            return self.whole(key, by, pixels)
        if begin == self._read:
            return None
        with self._lock:
            if self._told is not None and self._read - begin == len(self._late):  # who looks all the time
                rows = self._pairs(self._told[by], self._told[key], key)
            else:
                rows = self._exact(self._between(begin), key, by, total=self._totals.now(by))
        return CurvePoints(_joined(_one(x, y) for x, y in rows), 1, False)

    def _between(self, begin: int) -> bytes:
        """Lines from a byte of the file on, up to what was read."""
        size = self._read - begin
        if size <= len(self._late):
            return self._late[-size:]
        with self._opened() as file:
            return os.pread(file, size, begin) if file is not None else b""

    def texts(self, keys: Sequence[str]) -> Iterator[str]:
        """The file as CSV, row by row."""
        yield ",".join(key if key.replace("_", "").isalnum() else _quoted(key) for key in keys) + "\n"
        with self._opened() as file:
            at, rest = 0, b""
            while file is not None and (piece := os.pread(file, PIECE, at)):
                at += len(piece)
                *lines, rest = (rest + piece).split(b"\n") if len(rest) < PIECE else piece.split(b"\n")
                rows = ([_number(row.get(key)) for key in keys] for row in map(_row, lines) if "step" in row)
                yield "".join(
                    ",".join("" if each is None or not math.isfinite(each) else f"{each:.9g}" for each in row) + "\n"
                    for row in rows
                )

    def _valid(self, by: str) -> list[int]:
        """Blocks with an x and that no later row takes the place of."""
        steps, x = self._columns["step"], self._columns[by]
        blocks = [at for at in range(len(self._begins)) if x.count[at] and steps.count[at]]
        if self._turns:
            least, kept = math.inf, []
            for at in reversed(blocks):
                if steps.low[at] < least:
                    least = steps.low[at]
                    kept.append(at)
            blocks = kept[::-1]
        return blocks

    def _again(self, blocks: Sequence[int], key: str, by: str) -> list[tuple[float, float | None]] | None:
        """The rows of some blocks, from the file; None: they are too many."""
        found: list[tuple[float, float | None]] = []
        spans = [
            (self._begins[at], self._begins[at + 1] if at + 1 < len(self._begins) else self._read) for at in blocks
        ]
        if sum(end - begin for begin, end in spans) > MOST_REREAD:
            return None
        with self._opened() as file:
            for at, (begin, end) in zip(blocks, spans, strict=True):
                piece = os.pread(file, end - begin, begin) if file is not None else b""
                found += self._exact(piece, key, by, first=self._columns[by].low[at])
        if self._turns and by == "step":
            least = [math.inf, *accumulate((x for x, _ in reversed(found)), min)]
            found = [each for each, later in zip(found, reversed(least[:-1]), strict=True) if each[0] < later]
        return found

    def _exact(
        self, piece: bytes, key: str, by: str, *, first: float | None = None, total: float | None = None
    ) -> list[tuple[float, float | None]]:
        """Rows of a piece as x and number, where the first x or the last total of the axis is known; numbers that are
        not finite only in a curve that has one in most rows."""
        columns = _rows_of(piece, {key, "step", *(TIMES[1:] if by != "step" else ())}).columns
        if by == "step":
            x = columns["step"]
        else:
            x = _Totals().of(columns)[by]
            known = [each for each in x if each is not None]
            shift = 0.0 if not known else first - known[0] if first is not None else (total or 0.0) - known[-1]
            x = [None if each is None else each + shift for each in x]
        return self._pairs(x, columns[key], key)

    def _pairs(
        self, x: Sequence[float | None], y: Sequence[float | None], key: str
    ) -> list[tuple[float, float | None]]:
        dense, isfinite = self._is_dense(key), math.isfinite
        numbers = (None if each is None or not isfinite(each) else each for each in y)
        pairs = zip(x, numbers, strict=True)
        return [(at, each) for at, each in pairs if at is not None and isfinite(at) and (dense or each is not None)]

    def _is_dense(self, key: str) -> bool:
        return 2 * self._columns[key].all > self._rows

    def _grouped(self, blocks: Sequence[int], key: str, by: str, pixels: int) -> CurvePoints:
        x, y, steps, dense = self._columns[by], self._columns[key], self._columns["step"], self._is_dense(key)
        group = max(1, -(-len(blocks) // pixels))
        points: list[str] = []
        for at in range(0, len(blocks), group):
            some = blocks[at : at + group]
            count = sum(y.count[each] for each in some)
            strange = max(0, sum(steps.count[each] for each in some) - count) if dense else 0
            if count > 1 or (count and self._size * group > 1):
                low, high = min(y.low[each] for each in some), max(y.high[each] for each in some)
                mean = sum(y.sum[each] for each in some) / count
                points.append(_several(x.low[some[0]], low, high, mean, strange))
            elif count or dense:
                points.append(_one(x.low[some[0]], y.sum[some[0]]) if count else _none(x.low[some[0]], strange))
        return CurvePoints(_joined(points), self._size * group, True)

    @staticmethod
    def _grouped_rows(rows: Sequence[tuple[float, float | None]], pixels: int) -> CurvePoints:
        group = max(1, -(-len(rows) // pixels))
        if group == 1:
            return CurvePoints(_joined(_one(x, y) for x, y in rows), 1, True)
        points: list[str] = []
        for at in range(0, len(rows), group):
            some = rows[at : at + group]
            values = [y for _, y in some if y is not None]
            first, strange = some[0][0], len(some) - len(values)
            if values:
                points.append(_several(first, min(values), max(values), sum(values) / len(values), strange))
            else:
                points.append(_none(first, strange))
        return CurvePoints(_joined(points), group, True)


class _Totals:
    """Tokens and seconds since the run's begin, also of one that was started again in its folder."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._before = 0.0

    def now(self, by: str) -> float:
        return self._tokens if by == "tokens" else self._seconds

    def of(self, columns: Mapping[str, Sequence[float | None]]) -> dict[str, list[float | None]]:
        tokens: list[float | None] = []
        seconds: list[float | None] = []
        for now, rate in zip(columns["seconds"], columns["tokens_per_s"], strict=True):
            if now is not None and math.isfinite(now):
                passed = now - self._before if now >= self._before else now
                self._before = now
                self._seconds += max(0.0, passed)
                if rate is not None and math.isfinite(rate):
                    self._tokens += max(0.0, passed) * rate
            seconds.append(None if now is None else self._seconds)
            tokens.append(None if now is None else self._tokens)
        return {"tokens": tokens, "seconds": seconds}


def _rows_of(piece: bytes, keys: Iterable[str]) -> _Rows:
    """Of whole lines. Flat rows that all have a key are read without making objects of them."""
    lines = piece.split(b"\n")
    lines.pop()
    begins = [length + at for at, length in enumerate(accumulate(map(len, lines), initial=0))][:-1]
    flat = piece.count(b"{") == len(lines) and b"\\" not in piece
    columns: dict[str, Sequence[float | None]] = {}
    rest: list[str] = []
    for key in keys:
        found = _pattern(key).findall(piece) if flat else ()
        if flat and not found:
            columns[key] = [None] * len(lines)
            continue
        if flat and len(found) == len(lines):
            with suppress(ValueError):
                columns[key] = list(map(float, found))
                continue
            with suppress(ValueError):
                columns[key] = [None if each == b"null" else float(each) for each in found]
                continue
        rest.append(key)
    if rest:
        rows = [_row(line) for line in lines]
        for key in rest:
            columns[key] = [_number(row.get(key)) for row in rows]
    return _Rows(begins, columns)


def _row(line: bytes) -> dict[str, Any]:
    """Empty where it is no object."""
    if len(line) < PIECE:
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def _quoted(key: str) -> str:
    """A name in CSV; what a spreadsheet would take for a formula is none."""
    name = key.replace('"', '""')
    return f'"{name}"' if key[:1].isalnum() else f'" {name}"'


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    if not _is_number(value):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _finite(values: Sequence[float | None]) -> Sequence[float]:
    return [each for each in values if each is not None and math.isfinite(each)]


def _is_clean(values: Sequence[Any]) -> bool:
    """Whether all are finite, and their sum is."""
    try:
        return math.isfinite(sum(values))
    except TypeError:
        return False


def _several(x: float, low: float, high: float, mean: float, strange: int) -> str:
    mean = mean if math.isfinite(mean) else low / 2 + high / 2  # a sum beyond all floats
    return f"[{x:.12g},{low:.{DIGITS}g},{high:.{DIGITS}g},{mean:.{DIGITS}g}{f',{strange}' if strange else ''}]"


def _one(x: float, y: float | None) -> str:
    return f"[{x:.12g},{'null' if y is None else format(y, f'.{DIGITS}g')}]"


def _none(x: float, strange: int) -> str:
    """Of rows none of which is finite."""
    return f"[{x:.12g},null,null,null,{strange}]" if strange > 1 else _one(x, None)


def _joined(points: Iterable[str]) -> str:
    return f"[{','.join(points)}]"
