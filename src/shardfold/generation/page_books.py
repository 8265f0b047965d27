"""Which pages of keys and values are whose: counts and names, without a tensor.

A page holds ``size`` tokens of one text, for all layers. A full page may be held by several texts that begin alike; a
page that is not full is one text's own. A full page is named by all tokens up to its end. Some that nobody holds any
more stay, the latest, so that a text that comes later finds what it begins with. The page in which a prompt ends is
named besides by the prompt without its last token, as long as somebody holds it: the same prompt's next text copies
what it needs of it.

A text's pages stand behind each other where that costs nothing, so that what reads them need not collect them first: a
text begins where others leave it a stretch, and grows into it. Nothing is reserved: who finds no other page takes one
of a stretch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

__all__ = ["PageBooks"]

_DEAD = b"-"
"""The name of a page that is never found, nor any behind it."""
FREE, HELD, CLAIMED = 0, 1, 2
"""A page that stays though nobody holds it is HELD; one into which a text may grow is CLAIMED."""
STRETCH = 16
"""Pages that a text claims at once, at most."""


class PageBooks:
    """Args:
    limit: pages there may be; None: as many as are asked for.
    size: tokens of a page.
    keep: pages that stay when nobody holds them, at most, as long as nobody needs one; None: any.
    apart: texts leave each other pages to grow into, where a page that nobody has written takes no memory.

    Attributes:
        used: pages that somebody holds.
        made: pages that were taken at some time.
    """

    def __init__(self, limit: int | None, size: int, keep: int | None = 0, *, apart: bool = False) -> None:
        self.limit, self.size, self.keep = limit, size, keep
        self._most = STRETCH if apart else 1
        self.used, self.made = 0, 0
        self._map = bytearray()  # of each page FREE, HELD or CLAIMED; where a page was not asked for yet it may end
        self._kept: OrderedDict[int, None] = OrderedDict()  # the oldest first
        self._taken = bytearray()
        self._holders: list[int] = []
        self._names: list[bytes] = []  # of each page's text up to its end; empty: it is not full
        self._by_name: dict[bytes, int] = {}
        self._ends: dict[bytes, int] = {}  # pages in which prompts end, by the prompt without its last token
        self._end_of: dict[int, bytes] = {}

    def pages_of(self, tokens: int) -> int:
        """Pages that so many tokens fill or begin."""
        return -(-tokens // self.size)

    @property
    def free(self) -> float:
        """Pages that may still be taken."""
        return float("inf") if self.limit is None else self.limit - self.used

    @property
    def kept(self) -> int:
        """Pages that nobody holds, and that are found all the same."""
        return len(self._kept)

    @property
    def end(self) -> int:
        """Page numbers are less."""
        return len(self._map)

    def take(self, behind: int | None = None, stretch: int = 1) -> int | None:
        """A page for one holder, or None: there is none.

        Args:
            behind: the page that it should stand behind.
            stretch: pages that the holder will want behind each other, this one among them, if it begins elsewhere.
        """
        if behind is not None and self._is_free(behind + 1):
            page = behind + 1
        elif self.limit is None or self.used + self.kept < self.limit:
            page = self._begin(stretch)
        elif self._kept:
            page = self._forget_oldest()
        else:
            return None
        self._reach(page + 1)
        self._map[page] = HELD
        self._claim(page + 1, page + min(stretch, self._most))
        if self._taken[page] == 0:
            self._taken[page] = 1
            self.made += 1
        self._holders[page] = 1
        self.used += 1
        return page

    @property
    def _is_wide(self) -> bool:
        """So much memory lies idle that no more is written."""
        return self.limit is None and self.made - self.used - self.kept > self.used // 4 + STRETCH

    def _is_free(self, page: int) -> bool:
        if page >= len(self._map):
            return not self._is_wide if self.limit is None else page < self.limit
        return self._map[page] != HELD and not (self._is_wide and not self._taken[page])

    def _begin(self, stretch: int) -> int:
        """The first page of a stretch, or of a shorter one; there is a page that nobody has."""
        stretch = max(1, min(stretch, self._most))
        places = self._map
        if self.limit is not None:
            self._reach(self.limit)
        else:  # what was written once is taken again, before other memory is
            places = bytearray(np.where(np.array(self._taken, bool), np.array(self._map, np.uint8), HELD).tobytes())
        page = places.find(bytes(stretch))
        if page < 0 and self.limit is None and not self._is_wide:
            places = self._map
            page = places.find(bytes(stretch))
            page = page if page >= 0 else len(places.rstrip(bytes([FREE])))
        while page < 0 and stretch > 1:
            stretch //= 2
            page = places.find(bytes(stretch))
        return page if page >= 0 else places.find(CLAIMED)

    def _claim(self, first: int, last: int) -> None:
        """Pages up to the first that somebody has."""
        last = last if self.limit is None else min(last, self.limit)
        self._reach(last)
        for page in range(first, last):
            if self._map[page] == HELD:
                break
            self._map[page] = CLAIMED

    def _reach(self, pages: int) -> None:
        """There are numbers for so many."""
        more = pages - len(self._map)
        if more > 0:
            self._map.extend(bytes(more))
            self._taken.extend(bytes(more))
            self._holders.extend([0] * more)
            self._names.extend([b""] * more)

    def share(self, tokens: Sequence[int], most: int) -> list[int]:
        """Full pages that there are of the text's first ``most`` tokens, from the begin on; each is held again."""
        found: list[int] = []
        before = b""
        for start in range(0, most - self.size + 1, self.size):
            before = _name(before, tokens[start : start + self.size])
            page = self._by_name.get(before)
            if page is None:
                break
            found.append(page)
        for page in found:
            if not self._holders[page]:
                del self._kept[page]
                self.used += 1
            self._holders[page] += 1
        return found

    def name(self, pages: Sequence[int], number: int, tokens: Sequence[int]) -> None:
        """The ``number``-th of a text's pages is full, or is so once the forward that is being planned has stored:
        others that begin alike may hold it."""
        if self._names[pages[number]]:
            return
        before = self._names[pages[number - 1]] if number else b""
        if before == _DEAD:
            self._names[pages[number]] = _DEAD
            return
        made = _name(before, tokens[number * self.size : (number + 1) * self.size])
        self._names[pages[number]] = made
        self._by_name.setdefault(made, pages[number])

    def name_end(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """A text of these tokens, whose page this is, stores the last of them with the forward that is planned."""
        first, last = self._last(tokens)
        before = self._names[pages[first // self.size - 1]] if first else b""
        page = pages[first // self.size]
        if last > first and self._names[page] != _DEAD and page not in self._end_of:
            name = _name(before, tokens[first:last])
            if self._ends.setdefault(name, page) == page:
                self._end_of[page] = name

    def end_of(self, shared: Sequence[int], tokens: Sequence[int]) -> tuple[int, int] | None:
        """The page from which a text copies what stands behind its shared pages, all but its last token, and how many
        tokens that is; None: no other text of the same tokens is under way."""
        first, last = self._last(tokens)
        if len(shared) * self.size != first:
            return None
        page = self._ends.get(_name(self._names[shared[-1]] if shared else b"", tokens[first:last]))
        return None if page is None else (page, last - first)

    def _last(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Where the page of the last token begins, and where that token stands."""
        last = len(tokens) - 1
        return last // self.size * self.size, last

    def release(self, pages: Sequence[int]) -> None:
        """A text no longer holds its pages, which are given back where nobody else does; the last ones first, so that
        of what is kept the begin of a text is forgotten last."""
        for page in range(pages[-1] + 1 if pages else self.end, self.end):
            if self._map[page] != CLAIMED:
                break
            self._map[page] = FREE
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            self.used -= 1
            self._forget_end(page)
            if self.keep == 0 or self._by_name.get(self._names[page]) != page:
                self._forget(page)
                self._map[page] = FREE
                continue
            self._kept[page] = None
            if self.keep is not None and len(self._kept) > self.keep:
                self._map[self._forget_oldest()] = FREE

    def forget(self) -> None:
        """Nothing that is stored is found any more, nor what texts under way add to it: other weights have other keys
        and values."""
        while self._kept:
            self._map[self._forget_oldest()] = FREE
        self._by_name.clear()
        self._ends.clear()
        self._end_of.clear()
        self._names = [_DEAD if holders else b"" for holders in self._holders]

    def stretches(self) -> list[tuple[int, int]]:
        """Pages that were taken at some time: the first, and the first behind them, of each stretch."""
        found, at = [], self._taken.find(1)
        while at >= 0:
            end = self._taken.find(0, at)
            end = end if end >= 0 else len(self._taken)
            found.append((at, end))
            at = self._taken.find(1, end)
        return found

    def holders(self, page: int) -> int:
        """How many texts hold a page."""
        return self._holders[page]

    def _forget_end(self, page: int) -> None:
        name = self._end_of.pop(page, None)
        if name is not None:
            del self._ends[name]

    def _forget(self, page: int) -> None:
        if self._by_name.get(self._names[page]) == page:
            del self._by_name[self._names[page]]
        self._names[page] = b""

    def _forget_oldest(self) -> int:
        page, _ = self._kept.popitem(last=False)
        self._forget(page)
        return page


def _name(before: bytes, tokens: Sequence[int]) -> bytes:
    """Of a page: a digest of all tokens up to its end."""
    return blake2b(before + np.array(tokens, np.int64).tobytes(), digest_size=16).digest()
