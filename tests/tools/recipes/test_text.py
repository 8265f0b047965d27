"""The recipe's corpus is a deterministic function of its files, and its baselines count what they say."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardfold.errors import ConfigError
from shardfold.tools.recipes import _corpus as text
from shardfold.tools.recipes._corpus import Corpus, Windows, baselines, held_out_windows, load_corpus, pair_counts


def corpus_of(train: bytes, held_out: bytes = b"x" * 1000) -> Corpus:
    return Corpus(
        source="a test",
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        held_out=torch.frombuffer(bytearray(held_out), dtype=torch.uint8),
        num_files=1,
    )


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A hundred small files in two folders."""
    for number in range(100):
        path = tmp_path / ("ab"[number % 2]) / f"{number:03}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"document {number:03}")
    return tmp_path


def test_whole_files_are_held_out(folder: Path):
    """Every document is in exactly one split, whole, and about one in twenty is held out."""
    corpus = load_corpus(folder)
    train, held_out = (content(split).split(text.SEPARATOR) for split in (corpus.train, corpus.held_out))
    assert sorted(train + held_out) == [f"document {number:03}".encode() for number in range(100)]
    assert 1 <= len(held_out) <= 12
    assert corpus.num_files == 100


def test_the_split_follows_names_not_order_or_place(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """The same files elsewhere are split alike, and a new file moves no other from split to split."""
    before = load_corpus(folder)
    moved = tmp_path_factory.mktemp("moved") / "deep"
    folder.rename(moved)
    assert load_corpus(moved).digest == before.digest
    (moved / "new.txt").write_text("new document")
    after = load_corpus(moved)
    old = set(content(before.held_out).split(text.SEPARATOR))
    assert set(content(after.held_out).split(text.SEPARATOR)) - {b"new document"} == old


@pytest.mark.parametrize("number", [2, 3, 10])
def test_few_files_still_give_both_splits(tmp_path: Path, number: int):
    for each in range(number):
        (tmp_path / f"{each}.md").write_text(f"text {each}")
    corpus = load_corpus(tmp_path)
    assert len(corpus.train) and len(corpus.held_out)


def test_of_a_single_file_the_tail_is_held_out(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(65, 85)) * 5)
    corpus = load_corpus(path)
    assert content(corpus.train) + content(corpus.held_out) == path.read_bytes()
    assert len(corpus.held_out) == 5


def test_binary_and_unreadable_files_are_listed(folder: Path):
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    (folder / "blank.txt").write_text("\n")
    corpus = load_corpus(folder)
    assert corpus.skipped == ("gone.txt: No such file or directory", "image.png: binary")
    assert corpus.num_files == 100


@pytest.mark.parametrize("name", ["absent", "empty-folder", "empty-file", "binary-file"])
def test_no_text_is_one_sentence(tmp_path: Path, name: str):
    (tmp_path / "empty-folder").mkdir()
    (tmp_path / "empty-file").touch()
    (tmp_path / "binary-file").write_bytes(b"\0\1\2")
    with pytest.raises(ConfigError) as error:
        load_corpus(tmp_path / name)
    message = str(error.value)
    assert name in message and "--data" in message and "\n" not in message


def test_by_default_the_standard_library_is_read():
    corpus = load_corpus()
    assert len(corpus.train) > 1_000_000
    assert 0.01 < len(corpus.held_out) / len(corpus.train) < 0.15
    assert b"import " in content(corpus.train[:100_000])


def test_a_device_is_no_text():
    with pytest.raises(ConfigError, match="'/dev/null' is neither a file nor a folder"):
        load_corpus("/dev/null")


@given(length=st.integers(17, 2000))
def test_windows_predict_each_byte_once(length: int):
    """Every byte but the first is the target of one position, up to a tail of less than a window."""
    train = (bytes(range(251)) * 8)[:length]
    windows = Windows(corpus_of(train), context=16)
    tokens, targets = windows.batch(list(range(len(windows))))
    assert tokens.shape == targets.shape == (len(windows), 16)
    assert 1 <= length - len(windows) * 16 <= 16
    assert content(tokens.flatten()) == train[: len(windows) * 16]
    assert content(targets.flatten()) == train[1 : len(windows) * 16 + 1]
    assert torch.equal(windows.batch([len(windows) - 1])[0], tokens[-1:])


@pytest.mark.parametrize(("train", "held_out"), [(16, 100), (100, 16)])
def test_too_short_a_text_is_refused(train: int, held_out: int):
    with pytest.raises(ConfigError, match="has 16 bytes"):
        Windows(corpus_of(b"x" * train, b"x" * held_out), context=16)


@given(length=st.integers(17, 2000), number=st.integers(1, 64))
def test_held_out_windows_spread_over_the_text(length: int, number: int):
    """Windows are always the same, lie within the text, do not overlap and do not exceed what was asked."""
    corpus = corpus_of(b"x", (bytes(range(251)) * 8)[:length])
    windows = held_out_windows(corpus, context=16, number=number)
    assert torch.equal(windows, held_out_windows(corpus, context=16, number=number))
    assert windows.shape[1] == 17 and 1 <= len(windows) <= number
    assert len(windows) * 17 <= length
    assert content(windows[0]) == content(corpus.held_out[:17])


def test_baselines_are_the_entropies_they_say():
    """On `abab...` a byte is one bit to the unigram and nothing to the bigram; random bytes are 8 bits to both."""
    alternating = torch.tensor([97, 98] * 50_000, dtype=torch.uint8)
    bits = baselines(alternating, alternating[:1000].long()[None])
    assert bits["uniform"] == 8.0
    assert bits["unigram"] == pytest.approx(1.0, abs=0.01)
    assert bits["bigram"] == pytest.approx(0.0, abs=0.01)
    noise = torch.randint(256, (1_000_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    bits = baselines(noise, noise[:50_000].long()[None])
    assert bits["unigram"] == pytest.approx(8.0, abs=0.01)


@given(st.binary(min_size=2, max_size=100), st.binary(min_size=2, max_size=30))
def test_baselines_equal_counting_by_hand(train: bytes, window: bytes):
    ones, pairs = Counter(train), Counter(pairwise(train))
    rows = Counter(train[:-1])

    def unigram(byte: int) -> float:
        return (ones[byte] + 1) / (len(train) + 256)

    found = baselines(
        torch.frombuffer(bytearray(train), dtype=torch.uint8), torch.tensor([list(window)], dtype=torch.int64)
    )
    steps = list(pairwise(window))
    assert found["unigram"] == pytest.approx(-sum(math.log2(unigram(b)) for _, b in steps) / len(steps))
    bigram = [(pairs[a, b] + unigram(b)) / (rows[a] + 1) for a, b in steps]
    assert found["bigram"] == pytest.approx(-sum(map(math.log2, bigram)) / len(steps))


def test_pairs_across_chunks_are_counted_once(monkeypatch: pytest.MonkeyPatch):
    tokens = torch.randint(256, (100,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    whole = pair_counts(tokens)
    assert whole.sum() == 99
    for chunk in (1, 7, 99, 100):
        monkeypatch.setattr(text, "COUNT_CHUNK", chunk)
        assert torch.equal(pair_counts(tokens), whole)
