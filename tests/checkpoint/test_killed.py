"""A rank that is killed at any moment of a save: the latest checkpoint loads, and the other ranks say what happened.

In a test the moment is a call of the file system, chosen by a number; in the soak it is any time.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from shardfold.checkpoint import draft, messages
from shardfold.errors import CheckpointError, ShardfoldError
from shardfold.testing import Ranks, RanksFailed
from tests.support.saving import Disk, die, engine, expect, left_over, train, whole

RANKS = 3
SAID = 2.0


def save_and_die(root: str, victim: int, share: float, wait: bool, same: bool, swap: bool, port: int = 0) -> None:
    """Saves step 1, and again step 2, where rank ``victim`` dies after ``share`` of its calls of the file system.

    With a share of ``SAID`` it dies when it has said that its part is written, or as rank 0 before it says that all is.
    """
    folder = Path(root)
    rank = int(os.environ["RANK"])
    if port:
        _join(rank, port, serves=rank == 0)
    if not swap:
        draft._swap = lambda one, other: False
    trained = engine()
    train(trained)
    expect(trained, folder)
    with Disk(folder, lambda number, name: None).watched() as disk:
        trained.save(folder / "a", wait=True)
    moment = round(share * disk.calls)
    train(trained)
    expect(trained, folder)
    messages.BEAT, messages.SILENCE = 0.1, 2.0
    target = folder / ("a" if same else "b")

    def at(number: int, name: str) -> None:
        if rank == victim and number == moment:
            die()

    if rank == victim and share == SAID:
        messages.Messages.say = _say_and_die
    said: list[str] = []
    with Disk(folder, at).watched():
        try:
            saving = trained.save(target, wait=wait)
            said.append(str(saving.wait()))
            if rank == victim:  # all its calls are done
                die()
        except ShardfoldError as error:
            said.append(f"{type(error).__name__}: {error}")
    try:
        train(trained)
    except ShardfoldError as error:
        said.append(f"{type(error).__name__}: {error}")
    trained.close()
    (folder.parent / f"said-{rank}").write_text("\n".join(said))


def _say_and_die(self: messages.Messages, what: str, text: str) -> None:
    if what == "written":
        messages.ask(self._store, "set", f"{self._name}/{what}/{self._rank}", text)
    die()


def save_until_killed(root: str, port: int) -> None:
    """Trains and saves until a rank is gone."""
    folder = Path(root)
    rank = int(os.environ["RANK"])
    _join(rank, port, serves=False)
    messages.BEAT, messages.SILENCE = 0.1, 2.0
    trained, said = engine(), list[str]()
    try:
        for number in itertools.count():
            train(trained)
            expect(trained, folder)
            saving = trained.save(folder / f"s{number % 3}", wait=number % 2 == 0, keep=2)
    except ShardfoldError as error:
        said.append(f"{type(error).__name__}: {error}")
    try:
        saving.wait()
    except CheckpointError as error:
        said.append(str(error))
    trained.close()
    (folder.parent / f"said-{rank}").write_text("\n".join(said))


def _join(rank: int, port: int, *, serves: bool) -> None:
    """A group over a store that one of the ranks serves, or the test."""
    world = int(os.environ["WORLD_SIZE"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, world, is_master=serves)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def check(tmp_path: Path, root: Path, failed: RanksFailed, victim: int) -> None:
    """Nobody hung, every survivor said a sentence, the latest checkpoint is whole, and goes on elsewhere."""
    assert [(each.rank, "SIGKILL" in each.summary) for each in failed.failures] == [(victim, True)], str(failed)
    step = whole(root)
    for rank in set(range(RANKS)) - {victim}:
        said = (tmp_path / f"said-{rank}").read_text().splitlines()
        assert len(said) == 2 and said[1].startswith("CollectiveError: "), said
        if said[0].startswith("CheckpointError"):
            assert "was not written" in said[0] and f"rank {victim}" in said[0], said
            assert "not heard of" in said[0] or "the store through which ranks talk is gone" in said[0], said
        else:
            assert step == 2 or said[0].startswith("CollectiveError"), said
    goes_on(root, step)


def goes_on(root: Path, step: int) -> None:
    """Another run loads what is there and saves, which clears away what the killed one left."""
    one = engine()
    assert one.load(root).step == step
    train(one)
    expect(one, root)
    one.save(root / "c", wait=True)
    one.close()
    assert whole(root) == step + 1
    # Killed before it had said whose the folder is: that stays, with nothing in it, for a day.
    assert [name for name in left_over(root) if {p.name for p in (root / name).iterdir()} - {"owner.json"}] == []


def moments(count: int, seed: int) -> list[tuple[int, float, bool, bool, bool]]:
    choose = random.Random(seed)
    return [
        (number % RANKS, choose.random(), bool(number % 2), choose.random() < 0.5, choose.random() < 0.7)
        for number in range(count)
    ]


CHOSEN = [
    (0, 0.97, False, True, True), (0, 0.9, True, True, False),
    (0, SAID, False, True, True), (1, SAID, True, False, True),
    *moments(3, seed=1),
]  # fmt: skip


def killed(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: tuple, port: int = 0) -> None:
    monkeypatch.setattr("shardfold.testing.ranks.SETTLE", 60.0)  # to end by themselves is what is tested
    root = tmp_path / "run"
    root.mkdir()
    with pytest.raises(RanksFailed) as failed:
        ranks.run(save_and_die, str(root), *moment, port, world_size=RANKS, distributed=not port)
    check(tmp_path, root, failed.value, moment[0])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("moment", CHOSEN, ids=str)
def test_a_rank_is_killed_in_a_save(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: tuple
) -> None:
    """Whichever rank dies at whichever of its writes: what is there is whole, and the others end and say so."""
    killed(ranks, tmp_path, monkeypatch, moment)


@pytest.mark.soak
def test_rank_0_is_killed_and_the_store_with_it(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank 0 serves the key-value store, the others end as well, and say that it is gone."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    killed(ranks, tmp_path, monkeypatch, (0, 0.6, False, False, True), port)
    for rank in (1, 2):
        assert "the store through which ranks talk is gone" in (tmp_path / f"said-{rank}").read_text()


@pytest.mark.soak
@pytest.mark.parametrize("moment", moments(50, seed=2), ids=str)
def test_a_rank_is_killed_at_any_write(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: tuple
) -> None:
    """The same at 50 moments, of waiting saves and of those in the background."""
    killed(ranks, tmp_path, monkeypatch, moment)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(50))
def test_a_rank_is_killed_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Saves one after the other, and a signal from outside: whatever it hits, the latest checkpoint is whole."""
    monkeypatch.setattr("shardfold.testing.ranks.SETTLE", 60.0)
    choose = random.Random(seed)
    victim, delay = choose.randrange(RANKS), choose.uniform(0.0, 1.5)
    root = tmp_path / "run"
    root.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    failed: list[RanksFailed] = []

    def run() -> None:
        with pytest.raises(RanksFailed) as caught:
            pool.run(save_until_killed, str(root), store.port, world_size=RANKS, distributed=False)
        failed.append(caught.value)

    with Ranks(RANKS) as pool:
        thread = threading.Thread(target=run)
        thread.start()
        while not (root / "latest").exists():
            assert thread.is_alive()
            threading.Event().wait(0.01)
        threading.Event().wait(delay)
        os.kill(pool.pids[victim], signal.SIGKILL)
        thread.join()
    assert [(each.rank, "SIGKILL" in each.summary) for each in failed[0].failures] == [(victim, True)], str(failed)
    for rank in set(range(RANKS)) - {victim}:
        said = (tmp_path / f"said-{rank}").read_text()
        assert said.startswith(("CheckpointError: ", "CollectiveError: ")), said
    goes_on(root, whole(root))
