"""Text of an answer as its tokens come: only what cannot change any more, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardfold.errors import ConfigError

__all__ = ["TextStream"]

BROKEN = "\ufffd"
"""In the place of bytes that are no character, or not yet."""

MOST_HELD = 8
"""Tokens that are waited for until a character is whole; UTF-8 needs four."""


class TextStream:
    """From tokens to text. What all calls gave, joined, is the text of the answer.

    Args:
        tokenizer: a fast one of transformers. Its special tokens give no text.
        stops: strings that end the answer; they are not part of it.
        before: tokens in front of the text, if it goes on with theirs: some tokenizers say less at a begin.

    Attributes:
        stopped: whether a stop string was met; from then on there is no more text.
        decoded: characters that tokens have given, those that are held back among them.

    Raises:
        ConfigError: a stop string is empty.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        if not all(stops):
            raise ConfigError("a stop string is empty: leave it out, or give the text that ends an answer.")
        self.stopped, self.decoded = False, 0
        self._backend, self._stops = tokenizer.backend_tokenizer, tuple(stops)
        self._tokens = list(before[-MOST_HELD:])
        self._before, self._read = 0, len(self._tokens)
        self._held = ""

    def push(self, token: int) -> str:
        """One more token: the text that may be shown now. Held back are unfinished characters, and an end that a stop
        string may begin with."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        text = self._text(final=False)
        return self._safe(text) if text else ""

    def rest(self) -> str:
        """The answer is over: what was held back."""
        if self.stopped:
            return ""
        shown = self._safe(self._text(final=True))
        if not self.stopped:
            shown, self._held = shown + self._held, ""
        return shown

    def _text(self, *, final: bool) -> str:
        """What tokens that were not read yet add; decoded behind the ones before, as some say less at a begin."""
        known = self._decoded(self._tokens[self._before : self._read])
        whole = self._decoded(self._tokens[self._before :])
        waits = whole.endswith(BROKEN) and len(self._tokens) - self._read < MOST_HELD
        if (waits and not final) or len(whole) <= len(known):
            return ""
        self._before, self._read = self._read, len(self._tokens)
        return whole[len(known) :]

    def _decoded(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=True) if tokens else ""

    def _safe(self, text: str) -> str:
        self.decoded += len(text)
        held = self._held + text
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return held[: min(places)]
        longest = max((_begun(held, stop) for stop in self._stops), default=0)
        shown = len(held) - longest
        self._held = held[shown:]
        return held[:shown]


def _begun(text: str, stop: str) -> int:
    """Characters at the end of the text with which the stop string begins."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:count]):
            return count
    return 0
