"""Waiting for keys of a store: until they are there, the time is over or the store is gone, and without a word."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shardfold.comm.polling import come


class Questions:
    """A store that is asked; of its own keys the last is set when it has been asked so often."""

    def __init__(self, often: int) -> None:
        self.often, self.asked = often, 0

    def check(self, keys: Sequence[str]) -> bool:
        assert keys == ["a", "b"]
        self.asked += 1
        if self.often == 0:
            raise DistStoreError("gone")
        return self.asked >= self.often


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9))


def test_waiting_in_vain_logs_nothing(store: TCPStore, capfd: pytest.CaptureFixture[str]) -> None:
    """No warning of the store's own; what is there is seen also where there is no time left."""
    store.set("a", "")
    assert not come(store, ["a", "b"], 0.15)
    store.set("b", "")
    assert come(store, ["a", "b"], 0.0)
    assert capfd.readouterr() == ("", "")


def test_all_keys_are_waited_for() -> None:
    """As many questions as it takes; a store that is gone ends the wait with its own error."""
    questions = Questions(7)
    assert come(questions, ["a", "b"], 60.0) and questions.asked == 7
    with pytest.raises(DistStoreError, match="gone"):
        come(Questions(0), ["a", "b"], 60.0)
