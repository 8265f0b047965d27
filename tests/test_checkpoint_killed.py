"""A rank that is killed at any moment of a save: the latest checkpoint loads, and the other ranks say what happened.

In a test the moment is a call of the file system, chosen by a number; in the soak it is any time.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch.distributed as dist

from saving import Disk, die, engine, expect, left_over, train, whole
from shardfold.checkpoint import folders, messages
from shardfold.errors import ShardfoldError
from shardfold.testing import Ranks, RanksFailed

RANKS = 3


def save_and_die(root: str, victim: int, share: float, wait: bool, same: bool, swap: bool, port: int = 0) -> None:
    """Saves step 1, and again step 2, where rank ``victim`` dies after ``share`` of its calls of the file system."""
    folder = Path(root)
    rank = int(os.environ["RANK"])
    if port:
        _join(rank, port)
    if not swap:
        folders._exchange = lambda one, other: False
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


def _join(rank: int, port: int) -> None:
    """The group over a store that rank 0 serves."""
    world = int(os.environ["WORLD_SIZE"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def check(tmp_path: Path, root: Path, failed: RanksFailed, victim: int) -> None:
    """Nobody hung, every survivor said a sentence, the latest checkpoint is whole, and goes on elsewhere."""
    assert [(each.rank, "SIGKILL" in each.summary) for each in failed.failures] == [(victim, True)], str(failed)
    step = whole(root)
    for rank in set(range(RANKS)) - {victim}:
        said = (tmp_path / f"said-{rank}").read_text().splitlines()
        assert len(said) == 2 and said[1].startswith("CollectiveError: "), said
        if said[0].startswith("CheckpointError"):
            assert "was not written" in said[0] and f"rank {victim}" in said[0] and "not heard of" in said[0], said
        else:
            assert step == 2 or said[0].startswith("CollectiveError"), said
    one = engine()
    assert one.load(root).step == step
    train(one)
    expect(one, root)
    one.save(root / "c", wait=True)
    one.close()
    assert whole(root) == step + 1
    assert left_over(root) == []


def moments(count: int, seed: int) -> list[tuple[int, float, bool, bool, bool]]:
    choose = random.Random(seed)
    return [
        (number % RANKS, choose.random(), bool(number % 2), choose.random() < 0.5, choose.random() < 0.7)
        for number in range(count)
    ]


CHOSEN = [(0, 0.97, False, True, True), (0, 0.9, True, True, False), *moments(4, seed=1)]


def killed(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: tuple, port: int = 0) -> None:
    monkeypatch.setattr("shardfold.testing.ranks.SETTLE", 60.0)  # to end by themselves is what is tested
    root = tmp_path / "run"
    root.mkdir()
    with pytest.raises(RanksFailed) as failed:
        ranks.run(save_and_die, str(root), *moment, port, world_size=RANKS, distributed=not port)
    check(tmp_path, root, failed.value, moment[0])


@pytest.mark.parametrize("moment", CHOSEN, ids=str)
def test_a_rank_is_killed_in_a_save(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: tuple
) -> None:
    """Whichever rank dies at whichever of its writes: what is there is whole, and the others end and say so."""
    killed(ranks, tmp_path, monkeypatch, moment)
