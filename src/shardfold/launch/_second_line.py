"""A second connection to the store of launchers, for when the first one is silent.

What TCP has sent and nobody has acknowledged is sent again behind 0.2 s, 0.4, 0.8 and so on: behind a link that was cut
for a while, an answer comes up to twice that while after the cut. A connection that is begun meanwhile comes through as
soon as the link is whole. So a launcher whose question has no answer tries one again and again: by it the node that has
the store hears that this one lives, and this one that the store is there and an answer may still come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["SecondLine"]


class SecondLine:
    """
    Args:
        come: connects to the store and gives a sign of life there; whether that went well.
    """

    def __init__(self, come: Callable[[], bool]) -> None:
        self._come = come
        self._heard = 0.0
        self._trying: threading.Thread | None = None

    def knock(self) -> float:
        """Begin to try it, unless that is under way; when the store was last heard of so, by the monotonic clock."""
        if self._trying is None or not self._trying.is_alive():
            self._trying = threading.Thread(target=self._try, name="shardfold-knock", daemon=True)
            self._trying.start()
        return self._heard

    def _try(self) -> None:
        if self._come():
            self._heard = time.monotonic()
