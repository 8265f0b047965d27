"""Text as tokens come: joined it is the text of all tokens, up to the first stop string."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shardfold.errors import ConfigError
from shardfold.tools.answering.byte_tokenizer import ByteTokenizer
from shardfold.tools.answering.text_stream import TextStream

TEXT = "Ein Äffchen aß 🍌 und sagte: „Ja“。 \U0001f468\u200d\U0001f469 x̂ Ende."


def with_byte_fallback() -> Any:
    """A tokenizer as SentencePiece's are: words begin with a mark, characters that are unknown become bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz.:"]
    backend = Tokenizer(
        models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {"bytes": ByteTokenizer, "fallback": with_byte_fallback}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


def pieces(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.rest()]


def test_is_the_text_of_all_tokens(tokenizer: Any) -> None:
    """Each piece is whole characters, and a piece comes with the token that makes it whole."""
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    found = pieces(TextStream(tokenizer), tokens)
    assert "".join(found) == tokenizer.decode(tokens, skip_special_tokens=True) == TEXT
    assert found[-1] == ""
    assert all("\ufffd" not in piece for piece in found)


def test_bytes_are_tokens_as_with_transformers() -> None:
    """Whatever a text has in it, the letter among it that stands for the end of a document."""
    ours, draw = ByteTokenizer(), random.Random(0)
    letters = [*TEXT, "Ā", "\0", "\n", " ", "\xa0", "ÿ"]
    for text in ("", TEXT, *("".join(draw.choices(letters, k=9)) for _ in range(200))):
        ids = ours(text, add_special_tokens=False)["input_ids"]
        assert ids == list(text.encode()) == ours(text).input_ids == ours.whole(text)["input_ids"]
        tokens = [*ids, 0, *draw.choices(range(256), k=5)]
        for skips in (True, False):
            said = ours.backend_tokenizer.decode(tokens, skip_special_tokens=skips)
            assert said == ours.whole.backend_tokenizer.decode(tokens, skip_special_tokens=skips)
    whole = ours.whole
    assert (len(ours), ours.eos_token_id, ours.bos_token_id) == (len(whole), whole.eos_token_id, whole.bos_token_id)
    assert ours(["a", "b"])["input_ids"] == [[97], [98]] and ours.convert_ids_to_tokens(0) == "Ā"


def test_goes_on_with_the_text_before(tokenizer: Any) -> None:
    """A space in front of the first word is there, as it is where the text is one."""
    text = "some words. " * 3
    tokens = tokenizer(text + "more words", add_special_tokens=False)["input_ids"]
    first = len(tokenizer(text.rstrip(), add_special_tokens=False)["input_ids"])
    stream = TextStream(tokenizer, before=tokens[:first])
    assert "".join(pieces(stream, tokens[first:])) == " more words"


def test_special_tokens_give_no_text(tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    tokens = tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert "".join(pieces(TextStream(tokenizer), [*tokens, end, *tokens])) in ("abab", "ab ab")


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (("Ja",), TEXT.partition("Ja")[0]),
        (("Ende.", "sagte"), TEXT.partition("sagte")[0]),
        (("Ja", "„Ja"), TEXT.partition("„Ja")[0]),
        (("🍌 und",), TEXT.partition("🍌")[0]),
        (("sagte!", "Jahr", "Ende.."), TEXT),
        (("E",), ""),
        (("nothing",), TEXT),
    ],
)
def test_nothing_from_a_stop_string_on(tokenizer: Any, stops: tuple[str, ...], expected: str) -> None:
    stream = TextStream(tokenizer, stops)
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert "".join(pieces(stream, tokens)) == expected
    assert stream.stopped == (expected != TEXT)
    assert stream.push(tokens[0]) == stream.rest() == "" or not stream.stopped


def test_drawn_texts_and_stops(tokenizer: Any) -> None:
    """Over random texts of few letters, where stops often begin and seldom end: the text up to the first stop."""
    draw = random.Random(1)
    for _ in range(300):
        text = "".join(draw.choices("aab ñ🍌", k=draw.randint(1, 40))).strip() or "a"
        stops = ["".join(draw.choices("aab ñ🍌", k=draw.randint(1, 5))) for _ in range(draw.randint(0, 3))]
        stream = TextStream(tokenizer, stops)
        places = [text.find(stop) for stop in stops if stop in text]
        found = pieces(stream, tokenizer(text, add_special_tokens=False)["input_ids"])
        assert "".join(found) == text[: min(places, default=len(text))], (text, stops)


def test_what_is_no_text_is_not_held_for_ever() -> None:
    """Bytes that never become a character are shown as broken ones while the answer goes on."""
    stream = TextStream(ByteTokenizer())
    found = [stream.push(0xFF) for _ in range(64)]
    assert "".join(found).count("\ufffd") >= 56


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    tokens = list("é".encode())
    assert pieces(TextStream(ByteTokenizer()), tokens[:1]) == ["", "\ufffd"]


def test_a_stop_that_is_empty_is_refused() -> None:
    with pytest.raises(ConfigError, match="a stop string is empty"):
        TextStream(ByteTokenizer(), ["a", ""])
