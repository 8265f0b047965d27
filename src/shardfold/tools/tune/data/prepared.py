"""Data that was tokenized once, in mapped files, by whichever process needed it first.

Each block of rows becomes one file in a folder that is named by what went into it: the bytes of the sources, the
tokenizer, the template and the settings. A file is written beside its place and moved there, so it is whole or absent,
and a run that is killed goes on where it was. A process that needs a block which another one is making waits for a lock
of the file system; no collective is ever waited in.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardfold.errors import ConfigError, did_you_mean
from shardfold.tools.observe.working_line import Tick, working
from shardfold.tools.tune.data.encoding import EncodedRow, Encoder
from shardfold.tools.tune.data.row_formats import FORMATS, read_example
from shardfold.tools.tune.data.rows import Kind, Labelled, Pair, Prompt, Row, Tokens
from shardfold.tools.tune.data.sources import SourceFile, find_files, read_block, scan
from shardfold.tools.tune.data.templates import TrainOn

__all__ = ["DataSource", "DataText", "Prepared", "prepare"]

VERSION = 1  # of the files
_OPEN = 256  # blocks that stay mapped


class DataSource(Protocol):
    """Where rows come from.

    Attributes:
        path: a file or folder.
        format: of ``row_formats.FORMATS``; None: told by the columns.
        weight: how often each row is read per epoch; 0.3: three rows of ten, others in the next epoch.
    """

    @property
    def path(self) -> str | os.PathLike[str]: ...
    @property
    def format(self) -> str | None: ...
    @property
    def weight(self) -> float: ...


class DataText(Protocol):
    """How text becomes tokens.

    Attributes:
        length: the most tokens of a row.
        template: ``"model"``, a name or a file.
        train_on: what is trained.
    """

    @property
    def length(self) -> int: ...
    @property
    def template(self) -> str: ...
    @property
    def train_on(self) -> TrainOn: ...


class _Mapped:
    """A block in its file: a header of JSON, then arrays."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        data = np.memmap(path, dtype=np.uint8, mode="r")
        self.facts: dict[str, int] = header["facts"]
        self.stops: dict[str, int] = header["stops"]

        def array(name: str, dtype: str) -> npt.NDArray[Any]:
            start, stop = header["arrays"][name]
            return data[8 + size + start : 8 + size + stop].view(dtype)

        self.ids = array("ids", "<i4")
        self.trained = array("trained", "bool")
        self.ends = array("ends", "<i8")
        self.good = array("good", "bool")
        self.fields = array("fields", "uint8")
        self.field_ends = array("field_ends", "<i8")

    def tokens(self, sequence: int) -> Tokens:
        start, stop = int(self.ends[sequence]), int(self.ends[sequence + 1])
        return Tokens(self.ids[start:stop], self.trained[start:stop])


def _write(path: Path, encoded: Sequence[EncodedRow]) -> None:
    sequences = [each for one in encoded for each in one.sequences]
    facts: Counter[str] = Counter()
    stops: Counter[int] = Counter()
    for one in encoded:
        if one.facts:
            facts.update(one.facts)
        stops.update(one.stops)
    ends = np.cumsum([0] + [len(each) for each in sequences], dtype="<i8")
    trained = np.concatenate([np.zeros(0, np.bool_)] + [each.trained for each in sequences])
    firsts = ends[:-1][np.diff(ends) > 0]  # tokens that nothing stands in front of
    facts["rows"] = sum(1 for one in encoded if len(one.sequences[0]))
    facts["tokens"] = len(trained)
    facts["trained"] = int(np.count_nonzero(trained)) - int(np.count_nonzero(trained[firsts]))
    said = [json.dumps(one.fields, default=str).encode() if one.fields else b"" for one in encoded]
    empty: list[npt.NDArray[Any]] = [np.zeros(0, np.int32)]
    parts = {  # the widest first: each array begins at a multiple of its own width
        "ends": ends,
        "field_ends": np.cumsum([0] + [len(each) for each in said], dtype="<i8"),
        "ids": np.concatenate(empty + [each.ids for each in sequences]).astype("<i4"),
        "trained": trained,
        "good": np.array([one.good for one in encoded], dtype=np.bool_),
        "fields": np.frombuffer(b"".join(said), dtype=np.uint8),
    }
    places, at = {}, 0
    for name, each in parts.items():
        places[name] = (at, at + each.nbytes)
        at += each.nbytes
    header = json.dumps({"facts": facts, "stops": {str(k): v for k, v in stops.items()}, "arrays": places}).encode()
    header += b" " * (-len(header) % 8)
    temporary = path.with_suffix(f".{os.getpid()}.part")
    with temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for each in parts.values():
            file.write(each.tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Prepared:
    """Rows of a data set; made by :func:`prepare`.

    Rows are numbered as they lie in the sources. A row that was left out (blank, empty, or too long to be trained)
    keeps its number and has no tokens.

    Attributes:
        kind: of rows.
        fingerprint: of all that went into it: sources, weights, tokenizer, template, settings.
    """

    def __init__(self, folder: Path, files: Sequence[tuple[DataSource, SourceFile]], encoder: Encoder) -> None:
        self.kind: Kind = encoder.kind
        self.folder = folder
        self._encoder = encoder
        self._blocks = [(source, file, block) for source, file in files for block in file.blocks]
        self._firsts = np.cumsum([0] + [block.rows for _, _, block in self._blocks])
        self._open: OrderedDict[int, _Mapped] = OrderedDict()
        said = json.dumps([folder.name, [source.weight for source, _ in files]])
        self.fingerprint = hashlib.sha256(said.encode()).hexdigest()[:32]
        self._tick: Tick | None = None
        self._ahead: Thread | None = None
        self._closed = Event()

    # -- rows

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, row: int) -> Row:
        """A row by its number; of length 0 if it was left out.

        Raises:
            IndexError: there is no such row.
        """
        row = row + len(self) if row < 0 else row
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        block = bisect_right(self._firsts, row) - 1
        mapped, at = self._block(block), row - int(self._firsts[block])
        if self.kind == "pair":
            return Pair(mapped.tokens(2 * at), mapped.tokens(2 * at + 1))
        tokens = mapped.tokens(at)
        if self.kind == "label":
            return Labelled(tokens, bool(mapped.good[at]))
        if self.kind == "prompt":
            said = bytes(mapped.fields[int(mapped.field_ends[at]) : int(mapped.field_ends[at + 1])])
            return Prompt(tokens.ids, json.loads(said) if said else {})
        return tokens

    def __iter__(self) -> Iterator[Row]:
        """Yield rows that were not left out, in order."""
        for block in range(self.blocks):
            for row in np.flatnonzero(self.lengths(block)).tolist():
                yield self[int(self._firsts[block]) + row]

    # -- blocks, which batches are drawn from

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    def first(self, block: int) -> int:
        """The number of a block's first row."""
        return int(self._firsts[block])

    def weight(self, block: int) -> float:
        """How often each of its rows is read per epoch."""
        return self._blocks[block][0].weight

    def lengths(self, block: int) -> npt.NDArray[np.int64]:
        """(rows of the block,) int64, tokens of each row, both sequences of a pair together; 0: left out."""
        lengths = np.diff(self._block(block).ends)
        return lengths[0::2] + lengths[1::2] if self.kind == "pair" else lengths

    @property
    def facts(self) -> dict[str, Any]:
        """What there is; it waits until all blocks are prepared.

        ``rows`` that are read, ``tokens``, ``trained`` ones (targets); rows that were ``cut``; rows left out as they
        were ``empty``, ``too_long``, or had nothing to train (``untrained``); ``altered_turns`` of the assistant, which
        are not trained; and the numbers of ``stop`` tokens that answers end with.
        """
        facts: Counter[str] = Counter()
        stops: Counter[str] = Counter()
        self._make_all(range(self.blocks))
        for block in range(self.blocks):
            mapped = self._block(block)
            facts.update(mapped.facts)
            stops.update(mapped.stops)
        names = ("rows", "tokens", "trained", "cut", "empty", "too_long", "untrained", "altered_turns")
        return {**{name: facts[name] for name in names}, "stop": sorted(int(each) for each in stops)}

    # -- preparation

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Inside, a line says of how many rows there are tokens, while they are made or waited for."""
        with working("tokenizing", unit="rows") as line:
            self._tick = line.amount
            try:
                yield
            finally:
                self._tick = None

    def _path(self, block: int) -> Path:
        return self.folder / f"block-{block:06d}"

    def _block(self, block: int) -> _Mapped:
        """A block, mapped; it is made if nobody did, or waited for if somebody does."""
        if (mapped := self._open.get(block)) is None:
            path = self._path(block)
            if not path.is_file():
                with _locked(path.with_suffix(".lock")):
                    if not path.is_file():
                        self._make(block)
            mapped = self._open[block] = _Mapped(path)
            if self._tick is not None:
                self._tick(float(self._firsts[block + 1]), len(self))
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(block)
        return mapped

    def _make(self, number: int) -> None:
        source, file, block = self._blocks[number]
        columns = getattr(source, "columns", None)
        examples = (read_example(raw, source.format, self.kind, columns) for raw in read_block(file, block))
        _write(self._path(number), self._encoder.encode(examples))

    def ahead(self, order: Sequence[int]) -> None:
        """Make blocks in this order from now on, in threads beside, unless another process of this host does."""
        if self._ahead is None and any(not self._path(block).is_file() for block in order):
            self._ahead = Thread(target=self._go_ahead, args=(list(order),), daemon=True, name="prepared-ahead")
            self._ahead.start()

    def _go_ahead(self, order: Sequence[int]) -> None:
        with _locked(self.folder / "ahead.lock", wait=False) as mine:
            if mine:
                self._make_all(order)

    def _make_all(self, order: Sequence[int]) -> None:
        """Make blocks that nobody has made or is making, two at a time: while the tokenizer has one, the other is read
        or written. It ends at a row that cannot be read: whoever needs its block meets the same error, and can say it.
        """
        rest = iter(order)

        def work() -> None:
            for block in rest:
                path = self._path(block)
                if self._closed.is_set():
                    return
                if path.is_file():
                    continue
                with _locked(path.with_suffix(".lock"), wait=False) as free:
                    try:
                        if free and not path.is_file():
                            self._make(block)
                    except ConfigError:
                        deque(rest, maxlen=0)  # nothing is left
                        return

        beside = Thread(target=work, daemon=True, name="prepared-beside")
        beside.start()
        work()
        beside.join()

    def close(self) -> None:
        """End what works beside; files stay."""
        self._closed.set()
        if self._ahead is not None:
            self._ahead.join()


@contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """A lock between processes, which its holder's end frees; yields whether it was got.

    A file system without locks gives none: two processes may make the same block then, and write the same.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            got = True
        except BlockingIOError:
            got = False
        except OSError:
            got = True
        yield got
    finally:
        os.close(file)


def prepare(
    sources: Sequence[DataSource],
    tokenizer: Any,
    text: DataText,
    kind: Kind,
    *,
    cache: str | os.PathLike[str],
) -> Prepared:
    """Data, ready to be read; tokens are made when they are asked for, and kept.

    It counts rows, and returns. Every process of a run calls it with the same arguments; there is no collective in it.

    Args:
        sources: files and folders, see :class:`DataSource`.
        tokenizer: a fast one of transformers.
        text: how text becomes tokens.
        kind: what rows are read for.
        cache: a folder for prepared files, which runs share.

    Raises:
        ConfigError: a source is not there, is of no known format, or has no rows.
    """
    place = Path(cache)
    (place / "scans").mkdir(parents=True, exist_ok=True)
    encoder = Encoder(tokenizer, kind, text.template, text.train_on, text.length)
    files: list[tuple[DataSource, SourceFile]] = []
    for source in sources:
        if source.format is not None and source.format not in FORMATS:
            raise ConfigError(f"data: there is no format {source.format!r}.{did_you_mean(source.format, FORMATS)}")
        if not source.weight > 0:
            raise ConfigError(f"data: {source.path}: weight={source.weight}, but has to be above 0.")
        found: list[SourceFile] = []
        with working("reading") as line:
            for path, form in find_files(source.path):
                line.now(os.path.basename(path))
                found.append(scan(path, form, place / "scans"))
        if not any(file.blocks for file in found):
            raise ConfigError(f"data: {source.path} has no rows.")
        files += [(source, file) for file in found]
    said = json.dumps(
        [VERSION, encoder.fingerprint]
        + [[file.checksum, file.form, source.format, getattr(source, "columns", None)] for source, file in files]
    )
    folder = place / hashlib.sha256(said.encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    return Prepared(folder, files, encoder)
