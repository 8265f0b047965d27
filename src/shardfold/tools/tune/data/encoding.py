"""Rows as numbers of tokens, by the fast tokenizer's threads. What Python does is done for many rows at once, where it
can be: for each row by itself it would soon take as long as the tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from threading import Lock
from typing import Any, TypeGuard
from unicodedata import is_normalized

import numpy as np
import numpy.typing as npt

from shardfold.errors import ConfigError
from shardfold.tools.tune.data.row_formats import Example, Words
from shardfold.tools.tune.data.rows import Kind, Tokens
from shardfold.tools.tune.data.templates import ChatTemplate, Rendered, TrainOn, chat_template

__all__ = ["ByteTokens", "EncodedRow", "Encoder", "tokens_of"]

TRAIN_ON = ("assistant", "last", "completion", "all")
_TAIL = 4  # tokens at the end of a turn among which its stop token is looked for: behind it, line breaks may stand
_TOGETHER = 256  # rows that are tokenized at once
_NONE = Tokens(np.zeros(0, np.int32), np.zeros(0, np.bool_))


@dataclass
class EncodedRow:
    """What became of a row.

    Attributes:
        sequences: one, or the chosen and the rejected one; of length 0: the row is left out.
        good: of ``kind="label"``.
        fields: of ``kind="prompt"``.
        facts: what is counted: ``cut``, ``empty``, ``too_long``, ``untrained``, ``altered_turns``.
        stops: tokens that its answers end with.
    """

    sequences: list[Tokens]
    good: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    facts: Counter[str] = field(default_factory=Counter)
    stops: list[int] = field(default_factory=list)


@dataclass
class _Piece:
    """A text to be tokenized, for one sequence of one row."""

    row: EncodedRow
    where: str
    rendered: Rendered
    special: bool = False  # the tokenizer adds what it puts around texts
    ended: bool = False  # a stop token is put behind it

    @property
    def whole(self) -> bool:
        """Whether all of the text is trained, or nothing: places of its tokens are not asked for."""
        spans = self.rendered.spans
        return not spans or (spans == ((0, len(self.rendered.text)),) and not self.rendered.answers)


class Encoder:
    """Makes rows of examples.

    Args:
        tokenizer: a fast one of transformers.
        kind: of rows.
        template: ``"model"``, the name of one or a file.
        train_on: what is trained.
        length: the most tokens of a row, but of texts, which are cut into pieces later.

    Raises:
        ConfigError: the tokenizer is not a fast one, or an argument is unknown.
    """

    def __init__(self, tokenizer: Any, kind: Kind, template: str, train_on: TrainOn, length: int) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"the tokenizer is {type(tokenizer).__name__}, but has to be a fast one (tokenizer.json), which says "
                "where in a text each token comes from."
            )
        if train_on not in TRAIN_ON:
            raise ConfigError(f"train_on={train_on!r}: it is one of {', '.join(TRAIN_ON)}.")
        from tokenizers import Tokenizer

        self.tokenizer = tokenizer
        self.kind: Kind = kind
        self.train_on: TrainOn = train_on
        self.length = length
        self._source = chat_template(tokenizer, template)
        self._template: ChatTemplate | None = None
        text = tokenizer.backend_tokenizer.to_str()
        self._backend = Tokenizer.from_str(text)  # its own: nobody else sets how it cuts or pads
        self._backend.no_truncation()
        self._backend.no_padding()
        self._bytes = ByteTokens.of(self._backend) if kind != "text" else None  # which is trained whole
        plain, special = (self._backend.encode("x", add_special_tokens=each).ids for each in (False, True))
        more = len(special) - len(plain)
        self._front = more if special[more:] == plain else 0  # tokens in front of texts, where none are behind them
        self.eos: int | None = tokenizer.eos_token_id
        self.special = frozenset(tokenizer.all_special_ids) | ({self.eos} if self.eos is not None else frozenset())
        said = json.dumps([kind, train_on, length, self._source, tokenizer.special_tokens_map], default=str)
        self.fingerprint = hashlib.sha256(f"{text}\n{said}".encode()).hexdigest()
        self._rendering = Lock()  # what is known of shapes is one thread's at a time

    @property
    def template(self) -> ChatTemplate:
        """
        Raises:
            ConfigError: there is none.
        """
        if self._template is None:
            if self._source is None:
                raise ConfigError(
                    "rows are conversations, but the tokenizer brings no chat template: give template='chatml', "
                    "template='plain' or a file of one."
                )
            self._template = ChatTemplate(self.tokenizer, self._source)
        return self._template

    def encode(self, examples: Iterable[Example | None]) -> list[EncodedRow]:
        """Tokenize rows; threads may call it at the same time.

        Args:
            examples: of a block; None: a blank line.

        Returns:
            One for each, in order.

        Raises:
            ConfigError: one cannot be rendered, or ends without a stop token; names file and line.
        """
        found: list[EncodedRow] = []
        rest = iter(examples)
        while part := list(islice(rest, _TOGETHER)):
            found += self._rows(part)
        return found

    def _rows(self, part: Sequence[Example | None]) -> list[EncodedRow]:
        found: list[EncodedRow] = []
        pieces: list[_Piece] = []
        with self._rendering:
            for example in part:
                if not _says(example):
                    found.append(EncodedRow([_NONE] * self.width, facts=Counter({"empty": 1})))
                    continue
                fields = example.fields if self.kind == "prompt" else {}
                found.append(EncodedRow([], bool(example.good), fields))
                for piece in self._pieces(example, found[-1]):
                    _check_text(piece.rendered.text, example.where)
                    if piece.rendered.altered:
                        piece.row.facts["altered_turns"] += piece.rendered.altered
                    pieces.append(piece)
        if pieces:
            self._put(pieces)
        return found

    @property
    def width(self) -> int:
        """Sequences of a row."""
        return 2 if self.kind == "pair" else 1

    def _pieces(self, example: Example, row: EncodedRow) -> list[_Piece]:
        if self.kind == "text":
            text = example.answers[0]
            assert isinstance(text, str)
            whole = Rendered(text, ((0, len(text)),), ())
            return [_Piece(row, example.where, whole, special=True, ended=True)]
        if self.kind == "prompt":
            rendered, special = self._prompt(example)
            return [_Piece(row, example.where, rendered, special)]
        return [_Piece(row, example.where, *self._answer(example, answer)) for answer in example.answers]

    def _prompt(self, example: Example) -> tuple[Rendered, bool]:
        """A prompt, and whether the tokenizer adds to it what it puts around texts."""
        if isinstance(example.prompt, str):
            return Rendered(example.prompt, (), ()), True
        say = {"tools": example.tools, "settings": example.settings, "where": example.where}
        return Rendered(self.template.render(example.prompt, prompt=True, **say), (), ()), False

    def _answer(self, example: Example, answer: Words) -> tuple[Rendered, bool, bool]:
        """An answer behind its prompt; whether the tokenizer adds to it what it puts around texts, and whether a stop
        token is put behind it."""
        if isinstance(answer, str):
            assert isinstance(example.prompt, str)
            if self.eos is None:
                raise ConfigError("the tokenizer has no eos_token, so answers would never end: set one.")
            text, start = example.prompt + answer, len(example.prompt)
            span = (0 if self.train_on == "all" else start, len(text))
            return Rendered(text, (span,), ()), True, True
        prompt = example.prompt if isinstance(example.prompt, list) else []
        # Answers that are compared are the recipe's whole subject: their turns are trained, and none in front of them.
        train_on = "completion" if self.kind in ("pair", "label") else self.train_on
        rendered = self.template.conversation(
            [*prompt, *answer],
            len(prompt),
            train_on,
            where=example.where,
            tools=example.tools,
            settings=example.settings,
        )
        return rendered, False, False

    def _put(self, pieces: Sequence[_Piece]) -> None:
        """Gives rows the tokens of their texts."""
        numbers: list[list[int]] = [[]] * len(pieces)
        places: list[Sequence[tuple[int, int]] | None] = [() if each.whole else None for each in pieces]
        direct = [k for k, place in enumerate(places) if self._bytes is not None or place is not None]
        for k, encoding in _encoded(self._backend.encode_batch_fast, pieces, direct):
            numbers[k] = encoding.ids
        if self._bytes is None:
            self._locate(pieces, numbers, places)
        own = [len(each) for each in numbers]
        for piece, each in zip(pieces, numbers, strict=True):
            if piece.ended and self.eos is not None:
                if not each or each[-1] != self.eos:
                    each.append(self.eos)
                piece.row.stops.append(self.eos)
        sizes = np.array([len(each) for each in numbers])
        stops = np.cumsum(sizes)
        starts = stops - sizes
        ids = np.fromiter(chain.from_iterable(numbers), np.int32, int(stops[-1]))
        if self._bytes is not None and (asked := [k for k, place in enumerate(places) if place is None]):
            texts = [pieces[k].rendered for k in asked]
            front = np.array([self._front if pieces[k].special else 0 for k in asked])
            found = self._bytes.places(texts, ids, starts[asked], np.array(own)[asked], front)
            for k, place in zip(asked, found, strict=True):
                places[k] = place
            self._locate(pieces, numbers, places)
        trained = np.zeros(len(ids), np.bool_)
        for start, stop, numbered, piece, place in zip(
            starts.tolist(), stops.tolist(), numbers, pieces, places, strict=True
        ):
            assert place is not None
            if piece.whole and piece.rendered.spans:
                trained[start:stop] = True
            for span, (first, last) in zip(() if piece.whole else piece.rendered.spans, place, strict=True):
                trained[start + first : start + last] = True
                if span in piece.rendered.answers:
                    self._check_stop(numbered[first:last], piece)
            if piece.ended and numbered:
                trained[stop - 1] = True
            piece.row.sequences.append(Tokens(ids[start:stop], trained[start:stop]))
        self._fit_rows(pieces, trained, starts, stops)

    def _locate(
        self,
        pieces: Sequence[_Piece],
        numbers: list[list[int]],
        places: list[Sequence[tuple[int, int]] | None],
    ) -> None:
        """Asks the tokenizer for the tokens of spans that have no places yet."""
        asked = [k for k, place in enumerate(places) if place is None]
        for k, encoding in _encoded(self._backend.encode_batch, pieces, asked):
            numbers[k] = numbers[k] or encoding.ids
            places[k] = [tokens_of(encoding, *span) for span in pieces[k].rendered.spans]

    def _check_stop(self, turn: Sequence[int], piece: _Piece) -> None:
        """
        Raises:
            ConfigError: the turn ends with no token that a model can stop at.
        """
        for token in reversed(turn[-_TAIL:]):
            if token in self.special:
                piece.row.stops.append(token)
                return
        end = self.tokenizer.decode(turn[-_TAIL:])
        raise ConfigError(
            f"data: {piece.where}: the assistant's turn ends with {end!r}, which has no stop token, so the model "
            "would never learn to end: let the chat template put {{ eos_token }} behind the assistant's content, or "
            "give template='chatml'."
        )

    def _fit_rows(
        self,
        pieces: Sequence[_Piece],
        trained: npt.NDArray[np.bool_],
        starts: npt.NDArray[np.int64],
        stops: npt.NDArray[np.int64],
    ) -> None:
        """Cut rows that are too long, and empty those that have nothing left to learn from."""
        if self.kind == "text":
            return
        counts = np.concatenate([[0], np.cumsum(trained)])
        targets = counts[stops] - counts[np.minimum(starts + 1, stops)]
        doubtful = (stops - starts > self.length) | (targets == 0)
        last = None
        for k in np.flatnonzero(doubtful).tolist():
            if pieces[k].row is not last:
                self._fit(last := pieces[k].row)

    def _fit(self, each: EncodedRow) -> None:
        if self.kind == "prompt":
            reason = "too_long" if len(each.sequences[0]) > self.length else ""
        else:
            if any(len(one) > self.length for one in each.sequences):
                each.sequences = [Tokens(one.ids[: self.length], one.trained[: self.length]) for one in each.sequences]
                each.facts["cut"] = 1
            lost = any(not one.targets for one in each.sequences)
            reason = ("too_long" if each.facts["cut"] else "untrained") if lost else ""
        if reason:
            each.facts = Counter({reason: 1, "altered_turns": each.facts["altered_turns"]})
            each.sequences = [_NONE] * self.width


class ByteTokens:
    """Where texts are in tokens that are bytes, as of GPT-2, LLaMA 3 and Qwen.

    Such a token stands for a number of bytes that is its own, so a sum over them says where each begins. A tokenizer
    that is asked for places takes twice as long as for tokens alone.

    Args:
        widths: (vocabulary,) int64, bytes of each token.
        form: of Unicode, which texts are brought to; None: they stay as they are.
    """

    def __init__(self, widths: npt.NDArray[np.int64], form: Any) -> None:
        self._widths, self._form = widths, form

    @classmethod
    def of(cls, backend: Any) -> ByteTokens | None:
        """Of a tokenizer; None: its tokens are no bytes."""
        from tokenizers import decoders, normalizers, pre_tokenizers

        normalizer = backend.normalizer
        form = next((name for name in _FORMS if isinstance(normalizer, getattr(normalizers, name))), None)
        if not isinstance(backend.decoder, decoders.ByteLevel) or (normalizer is not None and form is None):
            return None
        letters = frozenset(pre_tokenizers.ByteLevel.alphabet())
        added, known = backend.get_added_tokens_decoder(), backend.get_vocab()
        widths = np.full(max(known.values(), default=0) + 1, _NO_BYTES, np.int64)
        for token, number in known.items():
            if number in added:
                widths[number] = len(added[number].content.encode())
            elif letters.issuperset(token):
                widths[number] = len(token)
        return cls(widths, form)

    def places(
        self,
        texts: Sequence[Rendered],
        ids: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        front: npt.NDArray[np.int64],
    ) -> list[list[tuple[int, int]] | None]:
        """As :func:`tokens_of` for each span of each text.

        Args:
            texts: with spans.
            ids: of all of them, and of others.
            starts, lengths: which tokens are those of a text.
            front: how many of them stand in front of it.

        Returns:
            Of each text [first, stop) of its own tokens for each span; None: its tokens are not its bytes, and no more.
        """
        ends = np.cumsum(self._widths[ids])
        edges = np.concatenate([[0], ends])
        before, behind = edges[starts + front], edges[starts + lengths]
        asked: list[int] = []
        known: list[bool] = []
        for one, base, size in zip(texts, before.tolist(), (behind - before).tolist(), strict=True):
            text, inner = one.text, [edge for span in one.spans for edge in span]
            if not (plain := text.isascii()):
                inner = [len(text[:edge].encode()) for edge in inner]
            same = plain or self._form is None or is_normalized(self._form, text)
            known.append(same and size > 0 and size == (len(text) if plain else len(text.encode())))
            asked += [base + edge for edge in inner]
        at = iter(np.searchsorted(ends, asked, side="right").tolist())
        found: list[list[tuple[int, int]] | None] = []
        for one, start, sure in zip(texts, starts.tolist(), known, strict=True):
            mine = [(next(at) - start, next(at) - start) for _ in one.spans]
            found.append(mine if sure else None)
        return found


_FORMS: tuple[Any, ...] = ("NFC", "NFKC", "NFD", "NFKD")
_NO_BYTES = 1 << 32  # of a token that stands for none: no sum with it is a text's


def _says(example: Example | None) -> TypeGuard[Example]:
    return example is not None and not example.empty


def _check_text(text: str, where: str) -> None:
    """
    Raises:
        ConfigError: it is no text, but has halves of a surrogate pair, which JSON can spell.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"data: {where}: {text[error.start]!a} is half of a character.") from None


def _encoded(encode: Any, pieces: Sequence[_Piece], chosen: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Encodings of chosen texts, with their numbers."""
    for special in (False, True):
        if some := [k for k in chosen if pieces[k].special == special]:
            texts = [pieces[k].rendered.text for k in some]
            yield from zip(some, encode(texts, add_special_tokens=special), strict=True)


def tokens_of(encoding: Any, start: int, stop: int) -> tuple[int, int]:
    """The tokens of characters [start, stop): one that begins in front of it and reaches into it counts, as it holds
    what is trained; one that reaches beyond does not, as it is of what follows."""
    first = None
    while start < stop and (first := encoding.char_to_token(start)) is None:
        start += 1
    if first is None:
        return 0, 0
    last = None
    place = stop - 1
    while place >= start and (last := encoding.char_to_token(place)) is None:
        place -= 1
    last = first if last is None else last
    while last + 1 < len(encoding) and (after := encoding.token_to_chars(last + 1)) and after[0] < stop:
        last += 1  # several tokens of one character
    while last >= first and (of := encoding.token_to_chars(last)) and of[1] > stop:
        last -= 1
    return first, last + 1
