"""Room for all states on disk: taken when an engine is made, refused on all ranks before anything runs."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from shardfold.tiers import _drive as drives
from shardfold.tiers._drive import Drive
from shardfold.tiers.disk import DiskTier
from tests.support import models

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def make(folder: str | tuple[str, ...] | None, model: nn.Module | None = None) -> sf.Engine:
    torch.manual_seed(0)
    cell = replace(sf.PRESETS["zero2"].moments, tier="disk", folder=folder)
    table = replace(sf.PRESETS["zero2"], moments=cell)
    return sf.Engine(model or models.Small(), optimizer=ADAMW, layout=table)


def step(engine: sf.Engine) -> None:
    engine.backward(engine(*[t.chunk(engine.world_size)[engine.rank] for t in models.batches(1)[0]]))
    engine.step()


def _taken(folder: str) -> tuple[int, int, int, list[int], int]:
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        extend = Drive._extend
        patched.setattr(Drive, "_extend", lambda self, size: (asked.append(size), extend(self, size))[1])
        engine = make(folder)
        tier = engine.sharded.tiers.named("disk", folder)
        assert isinstance(tier, DiskTier)
        (drive,) = tier.drives
        at_first = drive.size
        step(engine)
    blocks = os.fstat(drive.fileno()).st_blocks * 512
    rows = [row.held for row in engine.memory().rows if row.state == "moments"]
    found = (at_first, drive.size, blocks, asked, sum(rows))
    engine.close()
    return found


def test_room_is_taken_once_and_for_all(ranks: Ranks, tmp_path: Path) -> None:
    """When the engine is made: as many blocks as the table has bytes, of the file system's; nothing is asked for in
    training."""
    for first, last, blocks, asked, held in ranks.run(_taken, str(tmp_path), world_size=2):
        assert asked == [first] and first == last <= blocks, "once, before anything is allocated"
        assert held <= first < held + 64 * 4096 and held % 4 == 0


def _no_folder(folder: str) -> int:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{folder}/shardfold-disk-0")


FAULTS: list[tuple[Any, str, Any, str]] = [
    (Drive, "free_space", lambda self: 8191,
     "The ## bytes of states that rest on disk on each rank have no room there: {who}a file in {} needs ## bytes more "
     "than the 0 it has, and there are 8,191 free: No space left on device; make room there, or name another folder."),
    (drives, "_unnamed", _no_folder,
     "{who}no file can be made in {}: No such file or directory; name a folder that can be written to, for the ## "
     "bytes of states that rest on disk."),
]  # fmt: skip
"""What is wrong on one rank, and what is said of it."""


def _refused(folder: str, bad: int) -> tuple[list[str], bool, int]:
    model, said = models.Small(), []
    before = [p.clone() for p in model.parameters()]
    for where, name, wrong, _ in FAULTS:
        with pytest.MonkeyPatch.context() as patched:
            if torch.distributed.get_rank() == bad:
                patched.setattr(where, name, wrong)
            with pytest.raises(ConfigError) as error:
                make(folder, model)
        said.append(str(error.value))
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    engine = make(folder, model)
    step(engine)
    steps = engine.steps
    engine.close()
    return said, same, steps


@pytest.mark.parametrize("world", [1, 2])
def test_what_does_not_fit_on_one_rank_is_refused_on_all(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """In the same sentence: how much is needed, how much is free, on which rank, where, and what mends it. The model is
    as it was, and an engine of it can be made once that is mended."""
    for said, same, steps in ranks.run(_refused, str(tmp_path), world - 1, world_size=world):
        for words, (*_, why) in zip(said, FAULTS, strict=True):
            who = "rank 1: " if world == 2 else ""
            sentence = why.format(tmp_path, who=who)
            expected = re.escape(f"{sentence[0].upper()}{sentence[1:]}").replace(r"\#\#", "[0-9,]+")
            assert re.fullmatch(expected, words), words
        assert same and steps == 1


def _share(folder: str) -> str:
    try:
        make(folder).close()
    except ConfigError as error:
        return str(error)
    return ""


def _grown(folder: str, bad: int) -> tuple[list[str], int, list[int]]:
    model, said = models.Small(), []
    engine = make(folder, model)
    tier = engine.sharded.tiers.named("disk", folder)
    assert isinstance(tier, DiskTier)
    step(engine)
    room = [tier.drives[0].size]
    model.blocks.append(models.Block())
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patched:
            if torch.distributed.get_rank() == bad:
                patched.setattr(Drive, "free_space", lambda self: 8191)
            with pytest.raises(ConfigError) as error:
                step(engine)
        said.append(str(error.value))
    room.append(tier.drives[0].size)
    step(engine)
    step(engine)
    room.append(tier.drives[0].size)
    steps = engine.steps
    engine.close()
    return said, steps, room


def test_a_model_that_outgrows_the_disk_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    """A block that is added is refused on all ranks in one sentence, before anything is changed, however often;
    once there is room training goes on with it."""
    for said, steps, room in ranks.run(_grown, str(tmp_path), 1, world_size=2):
        for words in said:
            assert "bytes of states that rest on disk on each rank have no room there: rank 1: a file in" in words
            assert words.endswith("and there are 8,191 free: No space left on device; make room there, or name "
                                  "another folder."), words  # fmt: skip
        assert steps == 3 and len(said) == 2
        assert room[1] >= room[0] and room[2] > room[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk: needs root")
def test_ranks_that_share_a_drive_need_room_for_all(ranks: Ranks, tmp_path: Path) -> None:
    """A drive that has room for the states of one rank of two refuses both, and has all its room back."""
    needed = ranks.run(_taken, str(tmp_path), world_size=2)[0][0]
    mount = ["mount", "-t", "tmpfs", "-o", f"size={needed + 4096}", "none", str(tmp_path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        free = os.statvfs(tmp_path).f_bavail
        for words in ranks.run(_share, str(tmp_path), world_size=2):
            assert f"a file in {tmp_path} needs " in words and "No space left on device; make room there" in words
        assert os.statvfs(tmp_path).f_bavail == free
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("sizes", [[1], [3 * 8192 + 5, 7, 8192, 100_000], [100_000] * 3 + [4096] * 5])
def test_what_is_reserved_is_what_is_allocated(tmp_path: Path, sizes: list[int]) -> None:
    """On three drives, to the block, whatever the sizes: nothing is left over, and nothing asked for later."""
    places = [tmp_path / str(i) for i in range(3)]
    for place in places:
        place.mkdir()
    tier = DiskTier(torch.device("cpu"), [str(place) for place in places], chunk=8192, staging=1 << 16)
    tier.reserve(*sizes)
    room = [drive.size for drive in tier.drives]
    regions = [tier.allocate((size,), torch.uint8) for size in sizes]
    assert [drive.size for drive in tier.drives] == room
    tier.reserve(0)
    assert sum(stop - first for drive in tier.drives for first, stop in drive._free) == 0
    del regions
    tier.close()
