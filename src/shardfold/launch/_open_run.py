"""Where hosts that come later find a run that is under way and may take them in.

That is said in the store at which nodes meet (``--rdzv-endpoint``), beside what torch's rendezvous keeps there, by the
launcher that has the store of the attempt. A launcher that comes later looks there first: it begins in torch's way, for
which all ranks are ended and started again, only where nothing is said.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["GONE", "OpenRun"]

ANSWERS = 1.5
"""Seconds that the store has to answer."""
GONE = (DistError, RuntimeError, OSError)
"""What a store raises whose host is gone."""


class OpenRun:
    """
    Args:
        host, port: of the store where nodes meet.
        name: of the job; others with the same address do not find it.
        most: how many nodes there may be.
    """

    def __init__(self, host: str, port: int, name: str, most: int) -> None:
        self.most = most
        self._host, self._port, self._key = host, port, f"shardfold/{name}/open"

    def tell(self, address: str, port: int) -> None:
        """The attempt's store is there now; in a thread of its own, as the host of that which is asked may be gone."""
        said = json.dumps([address, port])
        self._ask(lambda store: store.set(self._key, said), wait=False)

    def take_back(self) -> None:
        """No attempt is under way."""
        self._ask(lambda store: store.set(self._key, ""))

    def find(self) -> tuple[str, int] | None:
        """Where the attempt's store is, if one is under way."""
        found: list[tuple[str, int]] = []

        def look(store: Any) -> None:
            if store.check([self._key]) and (said := store.get(self._key)):
                found.append(tuple(json.loads(said)))

        self._ask(look)
        return found[0] if found else None

    def _ask(self, what: Callable[[Any], object], *, wait: bool = True) -> None:
        def ask() -> None:
            with suppress(*GONE):
                limit = timedelta(seconds=ANSWERS)
                what(TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=limit))

        asking = threading.Thread(target=ask, name="shardfold-open-run", daemon=True)
        asking.start()
        if wait:
            asking.join(2 * ANSWERS)
