"""Reads a page: which elements it has, and that they close in order."""

from __future__ import annotations

from html.parser import HTMLParser


class PageTags(HTMLParser):
    """Elements of a page.

    Attributes:
        open: those that are not closed yet.
        seen: all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
