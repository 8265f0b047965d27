"""Rows as numbers of tokens, by the fast tokenizer's threads: while these work on some, the next are rendered."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
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
    """

    sequences: list[Tokens]
    good: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    facts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Piece:
    """A text to be tokenized, for one sequence of one example."""

    rendered: Rendered
    special: bool = False  # the tokenizer adds what it puts around texts
    ended: bool = False  # a stop token is put behind it
    stops: bool = True  # turns have to end with a stop token


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
        self._bytes = ByteTokens.of(self._backend)
        self.eos: int | None = tokenizer.eos_token_id
        self.special = frozenset(tokenizer.all_special_ids) | ({self.eos} if self.eos is not None else frozenset())
        said = json.dumps([kind, train_on, length, self._source, tokenizer.special_tokens_map], default=str)
        self.fingerprint = hashlib.sha256(f"{text}\n{said}".encode()).hexdigest()
        self.stops: Counter[int] = Counter()

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
        """Tokenize rows.

        Args:
            examples: of a block; None: a blank line.

        Returns:
            One for each, in order.

        Raises:
            ConfigError: one cannot be rendered, or ends without a stop token; names file and line.
        """
        found: list[EncodedRow] = []
        rest, begun = iter(examples), None
        with ThreadPoolExecutor(1, "encoder") as beside:
            while part := list(islice(rest, _TOGETHER)):
                pieces = [(k, piece) for k, each in enumerate(part) if _says(each) for piece in self._pieces(each)]
                for k, piece in pieces:
                    _check_text(piece.rendered.text, part[k])
                encodings = beside.submit(self._tokenized, [piece for _, piece in pieces])
                if begun is not None:
                    found += self._rows(*begun)
                begun = part, pieces, encodings
            if begun is not None:
                found += self._rows(*begun)
        return found

    def _rows(
        self, part: Sequence[Example | None], pieces: Sequence[tuple[int, _Piece]], encodings: Future[list[Any]]
    ) -> list[EncodedRow]:
        """Rows of examples whose texts were tokenized."""
        found = [
            EncodedRow([], bool(each.good), each.fields if self.kind == "prompt" else {})
            if _says(each)
            else EncodedRow([_NONE] * self.width, facts=Counter({"empty": 1}))
            for each in part
        ]
        for (number, piece), encoding in zip(pieces, encodings.result(), strict=True):
            example = part[number]
            assert example is not None
            found[number].sequences.append(self._sequence(piece, encoding, example))
            if piece.rendered.altered:
                found[number].facts["altered_turns"] += piece.rendered.altered
        for each in found:
            self._fit(each)
        return found

    @property
    def width(self) -> int:
        """Sequences of a row."""
        return 2 if self.kind == "pair" else 1

    def _pieces(self, example: Example) -> list[_Piece]:
        if self.kind == "text":
            text = example.answers[0]
            assert isinstance(text, str)
            return [_Piece(Rendered(text, ((0, len(text)),), ()), special=True, ended=True)]
        if self.kind == "prompt":
            return [self._prompt(example)]
        return [self._answer(example, answer) for answer in example.answers]

    def _prompt(self, example: Example) -> _Piece:
        if isinstance(example.prompt, str):
            return _Piece(Rendered(example.prompt, (), ()), special=True)
        say = {"tools": example.tools, "settings": example.settings, "where": example.where}
        return _Piece(Rendered(self.template.render(example.prompt, prompt=True, **say), (), ()))

    def _answer(self, example: Example, answer: Words) -> _Piece:
        if isinstance(answer, str):
            assert isinstance(example.prompt, str)
            if self.eos is None:
                raise ConfigError("the tokenizer has no eos_token, so answers would never end: set one.")
            text, start = example.prompt + answer, len(example.prompt)
            span = (0 if self.train_on == "all" else start, len(text))
            return _Piece(Rendered(text, (span,), ()), special=True, ended=True)
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
        return _Piece(rendered)

    def _tokenized(self, pieces: Sequence[_Piece]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Of each text its tokens, and of its spans [first, stop) of them."""
        texts = [each.rendered.text for each in pieces]
        found: list[Any] = [None] * len(pieces)
        rest: list[int] = []
        for special in (False, True):
            chosen = [k for k, each in enumerate(pieces) if each.special == special]
            fast = [k for k in chosen if self._bytes is not None or _is_whole(pieces[k].rendered)]
            for k, numbers in self._numbers(self._backend.encode_batch_fast, texts, fast, special):
                spans = pieces[k].rendered.spans if not _is_whole(pieces[k].rendered) else ()
                places = self._bytes.places(texts[k], numbers.ids, spans) if self._bytes and spans else []
                found[k] = None if places is None else (numbers.ids, places)
            rest = [k for k in chosen if found[k] is None]
            for k, numbers in self._numbers(self._backend.encode_batch, texts, rest, special):
                found[k] = numbers.ids, [tokens_of(numbers, *span) for span in pieces[k].rendered.spans]
        return found

    @staticmethod
    def _numbers(encode: Any, texts: Sequence[str], chosen: Sequence[int], special: bool) -> Iterable[tuple[int, Any]]:
        """Encodings of chosen texts, with their numbers."""
        if not chosen:
            return ()
        return zip(chosen, encode([texts[k] for k in chosen], add_special_tokens=special), strict=True)

    def _sequence(self, piece: _Piece, encoding: tuple[list[int], list[tuple[int, int]]], example: Example) -> Tokens:
        rendered, (numbers, places) = piece.rendered, encoding
        if piece.ended and self.eos is not None:
            if not numbers or numbers[-1] != self.eos:
                numbers.append(self.eos)
            self.stops[self.eos] += 1
        ids = np.array(numbers, dtype=np.int32)
        if _is_whole(rendered):
            return Tokens(ids, np.full(len(ids), bool(rendered.spans)))
        trained = np.zeros(len(ids), dtype=np.bool_)
        for span, (first, stop) in zip(rendered.spans, places, strict=True):
            trained[first:stop] = True
            if span in rendered.answers:
                self._check_stop(ids[first:stop], example)
        if piece.ended and len(ids):
            trained[-1] = True
        return Tokens(ids, trained)

    def _check_stop(self, turn: npt.NDArray[np.int32], example: Example) -> None:
        """
        Raises:
            ConfigError: the turn ends with no token that a model can stop at.
        """
        for token in reversed(turn[-_TAIL:].tolist()):
            if token in self.special:
                self.stops[token] += 1
                return
        end = self.tokenizer.decode(turn[-_TAIL:])
        raise ConfigError(
            f"data: {example.where}: the assistant's turn ends with {end!r}, which has no stop token, so the model "
            "would never learn to end: let the chat template put {{ eos_token }} behind the assistant's content, or "
            "give template='chatml'."
        )

    def _fit(self, each: EncodedRow) -> None:
        """Cut what is too long, and empty what has nothing left to learn from."""
        if self.kind == "text" or each.facts["empty"]:
            return
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
        self, text: str, numbers: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]] | None:
        """As :func:`tokens_of` for each span; None: the tokens are not the bytes of this text, and no more."""
        if self._form is not None and not is_normalized(self._form, text):
            return None
        ends = np.cumsum(self._widths[numbers])
        edges = [edge for span in spans for edge in span]
        if not text.isascii():
            edges = [len(text[:edge].encode()) for edge in edges]
        if not len(ends) or ends[-1] != len(text.encode()):
            return None
        found = np.searchsorted(ends, edges, side="right").tolist()
        return list(zip(found[0::2], found[1::2], strict=True))


_FORMS: tuple[Any, ...] = ("NFC", "NFKC", "NFD", "NFKD")
_NO_BYTES = 1 << 40  # of a token that stands for none: no sum with it is a text's


def _says(example: Example | None) -> TypeGuard[Example]:
    return example is not None and not example.empty


def _check_text(text: str, example: Example | None) -> None:
    """
    Raises:
        ConfigError: it is no text, but has halves of a surrogate pair, which JSON can spell.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = example.where if example is not None else ""
        raise ConfigError(f"data: {where}: {text[error.start]!a} is half of a character.") from None


def _is_whole(rendered: Rendered) -> bool:
    """Whether all of a text is trained, or nothing: places of its tokens are not asked for."""
    return not rendered.spans or (rendered.spans == ((0, len(rendered.text)),) and not rendered.answers)


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
