"""A store that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardfold.checkpoint.messages import Messages
from shardfold.comm.answered import Answered
from shardfold.engine.vote import Vote
from shardfold.errors import CheckpointError, CollectiveError

SILENT = 10.0  # seconds; far longer than anybody here waits for an answer


class Behind:
    """A store behind a link: what it is asked while the link is cut is answered when that is whole again."""

    def __init__(self) -> None:
        self.whole, self.asked = threading.Event(), 0

    def add(self, key: str, number: int) -> int:
        self.asked += 1
        self.whole.wait(SILENT)
        if key == "none":
            raise KeyError(key)
        return number + 1

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.asked += 1
        self.whole.wait(SILENT)

    def set(self, key: str, value: str) -> None:
        self.whole.wait(SILENT)

    def clone(self) -> Behind:
        return self


@pytest.fixture
def behind() -> Iterator[Behind]:
    """A store that answers when the test is over."""
    store = Behind()
    yield store
    store.whole.set()
    for thread in threading.enumerate():
        if thread.name == "shardfold-ask":
            thread.join()


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


def test_who_waits_for_a_key_is_told_too(behind: Behind) -> None:
    """That a wait is over is an answer of the store, too."""
    with pytest.raises(dist.DistStoreError, match="has not answered within 0 s"):
        Answered(behind, 0.05).wait(["key"], timedelta(seconds=0.05))
    assert behind.asked == 1


def test_a_connection_of_its_own_has_the_same_limit(behind: Behind) -> None:
    made = Answered(behind, 0.05).clone()
    with pytest.raises(dist.DistStoreError, match="has not answered"):
        made.add("key", 1)


def test_a_vote_and_the_messages_of_a_save_end_in_words(behind: Behind) -> None:
    with pytest.raises(CollectiveError, match=r"whether outer step 1 is taken cannot be asked of the store"):
        Vote(Answered(behind, 0.05), 2, 60.0).held()
    messages = Messages(Answered(behind, 0.05), "save/1", 0)
    with pytest.raises(CheckpointError, match="it has not answered within 0 s"):
        messages.say("done", "yes")
