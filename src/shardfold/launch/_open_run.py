"""Where hosts that come later find a run that is under way and may take them in.

That is said in the store at which nodes meet (``--rdzv-endpoint``), beside what torch's rendezvous keeps there, by the
launcher that has the store of the attempt. A launcher that comes later looks there first: it begins in torch's way, for
which all ranks are ended and started again, only where nothing is said.

The host of that store may be lost while the run goes on, and started again: its new store knows of nobody, and who
meets there would begin the same run a second time. So it is said again, as soon as a store answers there, and who
comes first to one gives that some time.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shardfold.comm.answered import Answered, StoreLine, answered
from shardfold.plan.patience import Patience

__all__ = ["GONE", "OpenRun"]

ANSWERS = 1.5
"""Seconds that the store has to answer."""
OFTEN = 8
"""Times in the patience that it is tried whether the store is another one."""
LOOK = 0.05
GONE = (DistError, RuntimeError, OSError)
"""What a store raises whose host is gone."""


class OpenRun:
    """
    Args:
        host, port: of the store where nodes meet.
        name: of the job; others with the same address do not find it.
        most: how many nodes there may be.
        patience: how long nothing may be heard of a node.
    """

    def __init__(self, host: str, port: int, name: str, most: int, patience: Patience) -> None:
        self.most, self._patience = most, patience
        self._telling, self._told_no_more = threading.Lock(), threading.Event()
        self._host, self._port, self._key = host, port, f"shardfold/{name}/open"

    def tell(self, address: str, port: int) -> None:
        """The attempt's store is there now, until :meth:`take_back`; in a thread of its own, as the host of that which
        is asked may be gone."""
        self._told_no_more.set()
        self._told_no_more = over = threading.Event()
        said, name = json.dumps([address, port]), "shardfold-open-run"
        threading.Thread(target=self._keep, args=(said, over), name=name, daemon=True).start()

    def _keep(self, said: str, over: threading.Event) -> None:
        every, store = self._patience.seconds / OFTEN, None
        while not over.is_set():
            try:
                if store is None:
                    socket.create_connection((self._host, self._port), timeout=every).close()
                    line = StoreLine()
                    store = Answered(answered(self._joined, ANSWERS, line), ANSWERS, line)
                    with self._telling:
                        if not over.is_set():
                            store.set(self._key, said)
                store.check([self._key])
            except GONE:
                store = None
            over.wait(every)

    def take_back(self) -> None:
        """No attempt is under way."""
        self._told_no_more.set()
        with self._telling:
            self._ask(lambda store: store.set(self._key, ""))

    def find(self, *, first: bool) -> tuple[str, int] | None:
        """Where the attempt's store is, if one is under way; who comes ``first`` to a store, which may have taken the
        place of another one, waits until that would be said there."""
        found: list[tuple[str, int]] = []
        wait = self._patience.echo if first else 0.0

        def look(store: Any) -> None:
            until = time.monotonic() + wait
            while not (store.check([self._key]) and (said := store.get(self._key))):
                if time.monotonic() >= until:
                    return
                time.sleep(LOOK)
            found.append(tuple(json.loads(said)))

        self._ask(look, wait)
        return found[0] if found else None

    def _ask(self, what: Callable[[Any], object], wait: float = 0.0) -> None:
        def ask() -> None:
            with suppress(*GONE):
                what(self._joined())

        asking = threading.Thread(target=ask, name="shardfold-open-run", daemon=True)
        asking.start()
        asking.join(2 * ANSWERS + wait)

    def _joined(self) -> Any:
        limit = timedelta(seconds=ANSWERS)
        return TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=limit)
