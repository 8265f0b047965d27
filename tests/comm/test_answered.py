"""A store that does not answer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore

import shardfold as sf
from shardfold.checkpoint.messages import Messages
from shardfold.checkpoint.standing_thread import StandingThread
from shardfold.comm import launcher_notes
from shardfold.comm._second_line import SecondLine
from shardfold.comm.answered import Answered, StoreLine, ask_no_more
from shardfold.comm.epoch_watch import EpochWatch
from shardfold.comm.launcher_notes import BROKEN, FILE
from shardfold.comm.mesh import DataMesh
from shardfold.engine._vote import Vote
from shardfold.errors import CheckpointError, CollectiveError
from shardfold.testing import RanksFailed, run_ranks

SILENT = 10.0  # seconds; far longer than anybody here waits for an answer


class Behind:
    """A store behind a link: what it is asked while the link is cut is answered when that is whole again."""

    def __init__(self) -> None:
        self.whole, self.asked, self.refuses = threading.Event(), 0, False

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
        if self.refuses:
            self.whole.wait(SILENT)
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


def test_an_answer_has_its_time_once_more_where_the_store_is_heard_of_in_another_way() -> None:
    """Behind a link that was cut a new connection comes through before what TCP sends again; once more, and not
    without end. Who has given the store up gives no sign of life there, however late a connection comes through."""
    store, signs, late = Behind(), list[str](), threading.Event()
    threading.Timer(1.2, store.whole.set).start()
    assert Answered(store, 1.0, StoreLine(SecondLine(lambda: partial(signs.append, "here")), 0.05)).add("key", 1) == 2
    assert set(signs) == {"here"}
    signs.clear()
    store.whole.clear()
    with pytest.raises(dist.DistStoreError, match="has not answered"):
        Answered(store, 0.1, StoreLine(SecondLine(lambda: lambda: None), 0.02)).add("key", 1)

    def reach() -> Callable[[], None]:
        late.wait()
        return partial(signs.append, "too late")

    second = SecondLine(reach)
    with pytest.raises(dist.DistStoreError, match="has not answered"):
        Answered(store, 0.1, StoreLine(second, 0.02)).add("key", 1)
    late.set()
    assert second._trying is not None
    second._trying.join()
    assert not signs
    store.whole.set()


def test_the_store_is_asked_at_the_exit_of_an_interpreter_that_starts_no_thread_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As from Python 3.12 on: what a rank that ends asks and tells there is not lost."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    store = Behind()
    store.whole.set()
    monkeypatch.setattr(threading.Thread, "start", start)
    assert Answered(store, 60.0, StoreLine()).add("key", 1) == 2


def test_who_waits_for_a_key_is_told_too(behind: Behind) -> None:
    """That a wait is over is an answer of the store, too."""
    with pytest.raises(dist.DistStoreError, match="has not answered within 0 s"):
        Answered(behind, 0.05).wait(["key"], timedelta(seconds=0.05))
    assert behind.asked == 1


def test_a_connection_of_its_own_has_the_same_limit(behind: Behind) -> None:
    made = Answered(behind, 0.05).clone()
    with pytest.raises(dist.DistStoreError, match="has not answered"):
        made.add("key", 1)


def test_a_store_whose_process_is_gone_is_not_tried_for_long() -> None:
    """While torch tries to reach it, nobody would wait for its answer either."""
    serves = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    asks = TCPStore("127.0.0.1", serves.port, is_master=False, timeout=timedelta(seconds=2))
    asked = Answered(PrefixStore("of/ours", asks), 60.0, StoreLine())
    asked.clone().set("a", "b")
    assert asked.get("a") == b"b"
    del serves
    with pytest.raises(dist.DistStoreError, match=r"nobody listens at 127\.0\.0\.1:\d+"):
        asked.clone()


def test_a_vote_and_the_messages_of_a_save_end_in_words(behind: Behind) -> None:
    with pytest.raises(CollectiveError, match=r"whether outer step 1 is taken cannot be asked of the store"):
        Vote(Answered(behind, 0.05), 2, 60.0).taken()
    messages = Messages(Answered(behind, 0.05), "save/1", 0, threading.Event(), StandingThread("pulse"))
    with pytest.raises(CheckpointError, match="it has not answered within 0 s"):
        messages.say("done", "yes")
    behind.refuses, pulse = True, StandingThread("pulse")
    messages = Messages(Answered(behind, 60.0, StoreLine()), "save/2", 0, threading.Event(), pulse)
    messages.wait_at_most(0.05)
    messages.begin()
    with pytest.raises(CheckpointError, match="takes no connection"):  # long before a collective's time is over
        messages.say("done", "yes")
    behind.whole.set()
    messages.end()
    pulse.end(60.0)


def _lost(how: str) -> None:
    """Rank 0, which has the store, is gone or silent when rank 1 makes groups with it."""
    rank, process = dist.get_rank(), [os.getpid(), 0]
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    process[1] = store.port if store is not None else 0
    dist.broadcast_object_list(process)
    if store is None:
        store = TCPStore("127.0.0.1", process[1], is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    make = DataMesh._make_groups

    def ends(mesh: DataMesh) -> None:
        store.wait(["comes"])
        if how == "silent":
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(3)

    def comes(mesh: DataMesh) -> None:
        store.set("comes", "")
        make(mesh)

    DataMesh._make_groups = ends if rank == 0 else comes  # pyright: ignore
    try:
        sf.Engine(nn.Linear(4, 4), optimizer=partial(torch.optim.SGD, lr=0.1), runtime=sf.Runtime(timeout=3.0))
    finally:
        if how == "silent":
            os.kill(process[0], signal.SIGCONT)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["gone", "silent"])
def test_a_group_that_cannot_be_made_ends_in_words(how: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_lost, 2, how, timeout=60.0)
    said = {each.rank: each.summary for each in failed.value.failures}
    assert "exited with code 3" in said[0]
    assert "rank 1: a process group of rank 0, 1 was not made within 3 s" in said[1]


def test_a_line_does_not_wait_for_what_is_asked_over_another(behind: Behind) -> None:
    with pytest.raises(dist.DistStoreError):
        Answered(behind, 0.01).add("key", 1)
    other = Behind()
    other.whole.set()
    assert Answered(other, SILENT, StoreLine()).add("key", 1) == 2


def test_who_waits_for_an_answer_waits_no_longer_once_nobody_is_to(behind: Behind) -> None:
    failed: list[Exception] = []

    def ask() -> None:
        try:
            Answered(behind, 600.0).add("key", 1)
        except dist.DistStoreError as error:
            failed.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    while asking.is_alive():
        if behind.asked:
            ask_no_more()
        asking.join(0.01)
    assert failed


def test_what_is_under_way_ends_when_the_launcher_knows_that_somebody_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, in the epoch that is watched, and not where this rank has noticed by itself."""
    (tmp_path / "notes").write_bytes(bytes(BROKEN + 20))
    monkeypatch.setenv(FILE, str(tmp_path / "notes"))
    monkeypatch.setattr(launcher_notes, "_file", [])
    watch, ended = EpochWatch(), threading.Semaphore(0)
    try:
        watch.watch(0, lambda: ended.release())
        assert not ended.acquire(timeout=0.1)
        launcher_notes._write(b"%020d" % 1, BROKEN)
        assert ended.acquire(timeout=60) and not ended.acquire(timeout=0.1)
        watch.watch(1, lambda: ended.release())
        watch.rest()
        launcher_notes._write(b"%020d" % 2, BROKEN)
        assert not ended.acquire(timeout=0.1)
    finally:
        watch.close()
