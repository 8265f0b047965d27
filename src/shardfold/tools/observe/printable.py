"""What comes from files, hosts and models, on its way to a terminal.

A name or a text from elsewhere may hold a terminal's control codes: they move the cursor, change the window's title, or
make a line read as another. Whatever is printed and not ours goes through this one function.
"""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: bytes | str, *, lines: bool = True) -> str:
    """Return the text with a dot in place of each character that does not print: control codes, marks that turn the
    direction of writing, halves of surrogate pairs.

    Args:
        text: bytes are read as UTF-8.
        lines: False: a new line is such a character too, as in a name.
    """
    decoded = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
    return "".join(c if c.isprintable() or (lines and c == "\n") else "·" for c in decoded.expandtabs(4))
