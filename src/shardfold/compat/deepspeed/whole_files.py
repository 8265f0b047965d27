"""Files that are there whole or not at all, also where several processes write the same one at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["written_whole"]


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yields a path in the folder of ``target`` to write, which takes its place when the block ends.

    Who reads ``target`` meanwhile finds the file that was there, or the whole of the new one. The path is of this call
    alone. If the block raises, nothing is left.
    """
    draft = target.with_name(f".{target.name}.{os.urandom(6).hex()}.writing")
    try:
        yield draft
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
