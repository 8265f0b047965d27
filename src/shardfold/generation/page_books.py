"""Which pages of keys and values are whose: counts and names, without a tensor.

A page holds ``size`` tokens of one text, for all layers. A full page may be held by several texts that begin alike; a
page that is not full is one text's own, so none is ever copied.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["PageBooks"]

Tokens = tuple[int, ...]


class PageBooks:
    """Args:
    limit: pages there may be; None: as many as are asked for.
    size: tokens of a page.

    Attributes:
        used: pages that somebody holds.
        made: pages that there have been at the same time, at most; page numbers are less.
    """

    def __init__(self, limit: int | None, size: int) -> None:
        self.limit, self.size = limit, size
        self.used, self.made = 0, 0
        self._free: list[int] = []  # a heap: low numbers first, so that memory behind high ones is not touched
        self._holders: list[int] = []
        self._keys: list[tuple[int, Tokens] | None] = []
        self._by_key: dict[tuple[int, Tokens], int] = {}

    def pages_of(self, tokens: int) -> int:
        """Pages that so many tokens fill or begin."""
        return -(-tokens // self.size)

    @property
    def free(self) -> float:
        """Pages that may still be taken."""
        return float("inf") if self.limit is None else self.limit - self.used

    def take(self) -> int | None:
        """A page for one holder, or None: there is none."""
        if self._free:
            page = heapq.heappop(self._free)
        elif self.limit is None or self.made < self.limit:
            page = self.made
            self.made += 1
            self._holders.append(0)
            self._keys.append(None)
        else:
            return None
        self._holders[page] = 1
        self.used += 1
        return page

    def share(self, tokens: Sequence[int], most: int) -> list[int]:
        """Full pages that others hold of the text's first ``most`` tokens, from the begin on; each is held again."""
        found: list[int] = []
        before = -1
        for start in range(0, most - self.size + 1, self.size):
            page = self._by_key.get((before, tuple(tokens[start : start + self.size])))
            if page is None:
                break
            found.append(page)
            before = page
        for page in found:
            self._holders[page] += 1
        return found

    def name(self, pages: Sequence[int], number: int, tokens: Sequence[int]) -> None:
        """The ``number``-th of a text's pages is full, or is so once the forward that is being planned has stored:
        others that begin alike may hold it. A page is told by its tokens and the page before it."""
        key = (pages[number - 1] if number else -1, tuple(tokens[number * self.size : (number + 1) * self.size]))
        if key not in self._by_key and self._keys[pages[number]] is None:
            self._by_key[key] = pages[number]
            self._keys[pages[number]] = key

    def release(self, pages: Sequence[int]) -> None:
        """A text no longer holds its pages, which are given back where nobody else does; the last ones first, as a name
        is told by the page before."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if (key := self._keys[page]) is not None:
                del self._by_key[key]
                self._keys[page] = None
            heapq.heappush(self._free, page)
            self.used -= 1

    def holders(self, page: int) -> int:
        """How many texts hold a page."""
        return self._holders[page]
