"""Which tokens of which texts the next forward has: continuous batching over pages.

A forward has one token of each text that is under way, and behind them parts of texts that begin: several prompts, a
part of a long one, or what an evicted text had. Before the model is asked each has the pages for what it will store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardfold.errors import ConfigError
from shardfold.generation.page_books import PageBooks
from shardfold.generation.texts import Continuation

__all__ = ["BatchScheduler", "ForwardPlan", "TextPart"]


@dataclass(frozen=True)
class TextPart:
    """Tokens ``[first, last)`` of a text that one forward has; with its last token the next one is drawn."""

    text: Continuation
    first: int
    last: int

    @property
    def draws(self) -> bool:
        return self.last == len(self.text.tokens)


@dataclass(frozen=True)
class ForwardPlan:
    """What one forward has: a token each of ``under_way``, then ``parts``.

    Attributes:
        copies: of pages, ``(from, to, tokens)``: so many of their first tokens, when the forward has stored its own.
    """

    under_way: list[Continuation]
    parts: list[TextPart]
    copies: list[tuple[int, int, int]] = field(default_factory=list)


class BatchScheduler:
    """Args:
    books: of pages.
    rows: texts under way at once, at most.
    chunk: tokens of texts that begin in one forward, at most.

    Attributes:
        live: texts with pages, in the order in which they got them.
    """

    def __init__(self, books: PageBooks, *, rows: int, chunk: int) -> None:
        self.books, self.rows, self.chunk = books, rows, chunk
        self.live: list[Continuation] = []
        self._waiting: deque[Continuation] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.live or self._waiting)

    def add(self, text: Continuation) -> None:
        """It waits behind the others.

        Raises:
            ConfigError: all pages together do not hold it.
        """
        self.check(text)
        self._waiting.append(text)

    def check(self, text: Continuation) -> None:
        """
        Raises:
            ConfigError: all pages together do not hold the text at its longest.
        """
        # The last token is never stored.
        need = self.books.pages_of(text.start + text.most - 1)
        if self.books.limit is not None and need > self.books.limit:
            raise ConfigError(
                f"pages={self.books.limit} of {self.books.size} tokens do not hold request {text.request} with "
                f"{text.start} tokens and max_tokens={text.most}, which needs {need}: give more pages, or fewer tokens."
            )

    def plan(self) -> ForwardPlan:
        """The next forward; only while :attr:`busy`."""
        for text in list(self.live):
            if text.stored == len(text.tokens) - 1 and text.pages:
                self._grow(text)
        under_way: list[Continuation] = []
        parts: list[TextPart] = []
        copies: list[tuple[int, int, int]] = []
        room = self.chunk
        for text in self.live:
            if text.stored == len(text.tokens) - 1:
                under_way.append(text)
            elif room:
                room -= self._begin(text, room, parts)
        while room and self._waiting and len(self.live) < self.rows and self._admit(self._waiting[0], copies):
            text = self._waiting.popleft()
            self.live.append(text)
            if text.stored == len(text.tokens) - 1:
                under_way.append(text)
            else:
                room -= self._begin(text, room, parts)
        for text in under_way:
            text.stored += 1
            if text.stored % self.books.size == 0:
                self.books.name(text.pages, text.stored // self.books.size - 1, text.tokens)
        return ForwardPlan(under_way, parts, copies)

    def end(self, texts: Iterable[Continuation]) -> None:
        """These are whole, or nobody waits for them any more: their pages are others'."""
        for text in texts:
            if text.pages:
                self.books.release(text.pages)
                text.pages = []
            if text in self.live:
                self.live.remove(text)
            else:
                self._waiting.remove(text)

    def _grow(self, text: Continuation) -> None:
        """Gives a text under way the page for its next token; where there is none, the text that began last gives back
        all of its own and waits, perhaps the one that asks."""
        while text.pages and len(text.pages) * self.books.size <= text.stored:
            left = self.books.pages_of(text.start + text.most - 1) - len(text.pages)
            page = self.books.take(text.pages[-1], left)
            if page is None:
                self._evict(self.live[-1])
            else:
                text.pages.append(page)

    def _evict(self, text: Continuation) -> None:
        self.live.remove(text)
        self.books.release(text.pages)
        text.pages, text.runs, text.stored = [], [], 0
        text.evicted += 1
        self._waiting.appendleft(text)

    def _admit(self, text: Continuation, copies: list[tuple[int, int, int]]) -> bool:
        """Gives it pages for all that it has, those of others that begin alike among them, and a copy of the page in
        which another text's equal prompt ends; False: there are too few.

        Others will need pages soon: while there are any, a page for every fourth of them stays free, so that who
        begins now is not evicted at once.
        """
        books = self.books
        shared = books.share(text.tokens, len(text.tokens) - 1)
        need = books.pages_of(len(text.tokens)) - len(shared)
        if need + -(-len(self.live) // 4) > books.free:
            books.release(shared)
            return False
        end = books.end_of(shared, text.tokens)
        text.pages, text.stored = shared, len(shared) * books.size
        for _ in range(need):
            left = books.pages_of(text.start + text.most - 1) - len(text.pages)
            page = books.take(text.pages[-1] if text.pages else None, left)
            assert page is not None
            text.pages.append(page)
        if end is not None:
            copies.append((end[0], text.pages[-1], end[1]))
            text.stored += end[1]
        return True

    def _begin(self, text: Continuation, room: int, parts: list[TextPart]) -> int:
        """Tokens of a text that begins, as many as there is room for; how many."""
        first, last = text.stored, min(len(text.tokens), text.stored + room)
        parts.append(TextPart(text, first, last))
        for number in range(first // self.books.size, last // self.books.size):
            self.books.name(text.pages, number, text.tokens)
        if last == len(text.tokens):
            self.books.name_end(text.pages, text.tokens)
        text.stored = last
        return last - first
