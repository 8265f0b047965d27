"""The corpus: bytes of text files, split by file into training and held-out text, and the windows cut from it.

By default the text is the Python standard library's own source, which is on every machine that runs this. Everything
is a deterministic function of the files: their order, the split, the windows that training reads, and those that a
model and the counting baselines are both evaluated on.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.tools.observe.printable import printable

HELD_OUT_SHARE = 0.05
SEPARATOR = b"\0"  # stands between documents; a file that contains it is no text
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
COUNT_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training and held-out text."""

    source: str
    """What was read, for people."""
    train: Tensor  # (bytes,) uint8
    held_out: Tensor  # (bytes,) uint8
    num_files: int
    skipped: tuple[str, ...] = ()
    """Files and folders left out, because they are binary or unreadable or by their name, each with the reason."""

    @property
    def digest(self) -> int:
        """A 32-bit checksum of both splits, by which ranks can tell that they read the same text."""
        return zlib.crc32(self.held_out.numpy().data, zlib.crc32(self.train.numpy().data))


def load_corpus(data: str | Path | None = None) -> Corpus:
    """Read the text under `data`, a file or a folder; without it, the Python standard library's sources."""
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for path in walk(root) if path.suffix == ".py"]
        source, left_out = "the Python standard library's sources", []
    else:
        root = Path(data).expanduser()
        if not root.exists():
            raise ConfigError(f"there is no file or folder {str(root)!r}: give --data the path of some text.")
        if not (root.is_file() or root.is_dir()):
            raise ConfigError(f"{str(root)!r} is neither a file nor a folder: give --data the path of some text.")
        left_out: list[str] = []
        paths = [root] if root.is_file() else list(walk(root, left_out))
        root, source = (root.parent if root.is_file() else root), str(root)
    documents, skipped = read_documents(root, paths)
    skipped += left_out
    if not documents:
        why = (
            f" ({skipped[0]})"
            if len(skipped) == 1
            else f" (all {len(skipped)} files and folders were skipped)"
            if skipped
            else ""
        )
        raise ConfigError(f"no text was found in {source}{why}: give --data a file or folder with text.")
    train, held_out = split(documents)
    named = tuple(printable(each, lines=False) for each in skipped)
    return Corpus(source=source, train=train, held_out=held_out, num_files=len(documents), skipped=named)


def walk(root: Path, left_out: list[str] | None = None) -> Iterator[Path]:
    """Yield the files under `root` in sorted order, leaving out hidden ones, installed packages and test suites.

    Args:
        left_out: gets a line for each folder that is left out, other than hidden ones.
    """
    said: list[str] = [] if left_out is None else left_out

    def unreadable(error: OSError) -> None:
        said.append(f"{Path(error.filename).relative_to(root).as_posix()}/: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=unreadable):
        shown = sorted(name for name in folders if not name.startswith("."))
        folders[:] = [name for name in shown if name not in SKIPPED_FOLDERS]
        said += [
            f"{Path(folder, name).relative_to(root).as_posix()}/: folders of this name are left out"
            for name in shown
            if name in SKIPPED_FOLDERS
        ]
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def read_documents(root: Path, paths: list[Path]) -> tuple[dict[str, bytes], list[str]]:
    """Return the texts that are not blank, by path relative to `root`, and the files skipped with the reason."""
    documents, skipped = {}, []
    for path in paths:
        name = path.relative_to(root).as_posix()
        try:
            if path.exists() and not path.is_file():  # reading a pipe would wait for a writer
                skipped.append(f"{name}: not a regular file")
                continue
            content = path.read_bytes()
        except OSError as error:
            skipped.append(f"{name}: {error.strerror}")
            continue
        if SEPARATOR in content:
            skipped.append(f"{name}: binary")
        elif content.strip():
            documents[name] = content
    return documents, skipped


def split(documents: dict[str, bytes]) -> tuple[Tensor, Tensor]:
    """Return (training, held-out) text. Whole files are held out, chosen by their name; of a single file, its tail."""
    if len(documents) == 1:
        (content,) = documents.values()
        cut = len(content) - round(len(content) * HELD_OUT_SHARE)
        return to_tensor([content[:cut]]), to_tensor([content[cut:]])
    rank = {name: int.from_bytes(hashlib.blake2b(os.fsencode(name)).digest()[:8], "big") / 2**64 for name in documents}
    held_out = {name for name in documents if rank[name] < HELD_OUT_SHARE}
    if not held_out or len(held_out) == len(documents):  # few files: chance may have chosen none, or all
        held_out = {min(rank, key=rank.__getitem__)}
    return (
        to_tensor([content for name, content in documents.items() if name not in held_out]),
        to_tensor([content for name, content in documents.items() if name in held_out]),
    )


def to_tensor(documents: list[bytes]) -> Tensor:
    joined = bytearray(SEPARATOR.join(documents))
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)


def windows_at(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return (len(starts), length) bytes as int64."""
    return text[starts[:, None] + torch.arange(length)].long()


class Windows:
    """The training text as samples: windows that lie end to end, so that an epoch predicts each byte once.

    Window i reads the `context` bytes from i * context on and predicts the byte behind each. What is left at the end of
    the text, less than a window, is not read.
    """

    def __init__(self, corpus: Corpus, *, context: int) -> None:
        for name, text in (("training", corpus.train), ("held-out", corpus.held_out)):
            if len(text) <= context:
                raise ConfigError(
                    f"the {name} text of {corpus.source} has {len(text)} bytes, which is no more than one context of "
                    f"{context}: give more text with --data or a shorter --context."
                )
        self.text = corpus.train
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets), each (len(indices), context) int64."""
        windows = windows_at(self.text, torch.tensor(indices) * self.context, self.context + 1)
        return windows[:, :-1], windows[:, 1:]


def held_out_windows(corpus: Corpus, *, context: int, number: int) -> Tensor:
    """Return up to `number` evenly spread windows of the held-out text, (number, context + 1); always the same ones."""
    last = len(corpus.held_out) - (context + 1)
    number = max(1, min(number, len(corpus.held_out) // (context + 1)))
    starts = torch.linspace(0, last, number, dtype=torch.float64).long()
    return windows_at(corpus.held_out, starts, context + 1)


def pair_counts(text: Tensor) -> Tensor:
    """Return how often each byte (row) is followed by each other (column), (256, 256) in fp64."""
    counts = torch.zeros(256 * 256, dtype=torch.int64)
    for start in range(0, len(text) - 1, COUNT_CHUNK):
        chunk = text[start : start + COUNT_CHUNK + 1].long()
        counts += torch.bincount(chunk[:-1] * 256 + chunk[1:], minlength=256 * 256)
    return counts.view(256, 256).double()


def baselines(train: Tensor, windows: Tensor) -> dict[str, float]:
    """Return the bits per byte that counting reaches on the windows a model is evaluated on.

    `unigram` counts bytes of the training text with add-one smoothing; `bigram` counts pairs, each row smoothed by one
    unit of count spread as the unigram is, which is kinder to the baseline than add-one over 256 bytes.
    """
    pairs = pair_counts(train)
    unigram = torch.bincount(train.long(), minlength=256).double() + 1
    unigram /= unigram.sum()
    bigram = (pairs + unigram) / (pairs.sum(1, keepdim=True) + 1)
    before, after = windows[:, :-1], windows[:, 1:]
    return {
        "uniform": 8.0,
        "unigram": -unigram.log2()[after].mean().item(),
        "bigram": -bigram.log2()[before, after].mean().item(),
    }
