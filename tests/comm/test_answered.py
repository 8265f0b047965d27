"""A store that does not answer."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from shardfold.comm.answered import Answered


class Behind:
    """A store behind a link: what it is asked while the link is cut is answered when that is whole again."""

    def __init__(self) -> None:
        self.whole, self.asked = threading.Event(), 0

    def add(self, key: str, number: int) -> int:
        self.asked += 1
        self.whole.wait()
        if key == "none":
            raise KeyError(key)
        return number + 1


def test_who_asks_in_vain_is_told_and_the_link_may_heal() -> None:
    """Meanwhile nothing else is asked; what is raised by an answer is raised here."""
    store = Behind()
    asked = Answered(store, 0.05)
    for _ in range(3):
        with pytest.raises(dist.DistStoreError, match="has not answered within 0 s"):
            asked.add("key", 1)
    assert store.asked == 1
    store.whole.set()
    for thread in threading.enumerate():
        if thread.name == "shardfold-ask":
            thread.join()
    asked.limit = 60.0
    assert asked.add("key", 1) == 2
    with pytest.raises(KeyError, match="none"):
        asked.add("none", 1)
