"""Checkpoints of hosts that share no disk, one of which means harm: none reads for another what is not theirs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfold.checkpoint.elsewhere import Elsewhere
from shardfold.checkpoint.folders import INDEX
from shardfold.errors import CheckpointError
from shardfold.testing import Ranks
from tests.checkpoint.test_hostile import rewrite
from tests.checkpoint.test_hosts import WORLD, refused, write
from tests.support.saving import engine

pytestmark = pytest.mark.timeout(180)

STRANGE = ("../secret", "a-link", "a-pipe", "gone")


def asked(folder: str) -> dict[str, bytes | str]:
    """Rank 0 asks rank 1 for files whatever their names are."""
    trained = engine()
    elsewhere = Elsewhere(trained.mesh, 60.0, Path(folder), {name: [1] for name in ("own", *STRANGE)})
    got: dict[str, bytes | str] = {}
    for name in ("own", *STRANGE) if trained.rank == 0 else ():
        out = torch.zeros(6, dtype=torch.uint8)
        try:
            elsewhere.read(name, 0, out)
            got[name] = bytes(out.tolist())
        except CheckpointError as error:
            got[name] = str(error)
    trained.sharded.comm.agreement.exchange("asked", "")
    elsewhere.close()
    trained.close()
    return got


def test_another_host_answers_with_its_checkpoints_own_files_only(ranks: Ranks, tmp_path: Path) -> None:
    """A path, a link that leads out, a pipe: what one host would not read for itself it does not read for another."""
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "own").write_bytes(b"values")
    (folder / "a-link").symlink_to("../secret")
    os.mkfifo(folder / "a-pipe")
    got, _ = ranks.run(asked, str(folder), world_size=2)
    assert got.pop("own") == b"values"
    why = "it cannot be opened, or is not a regular file of the checkpoint's folder"
    assert got == {name: f"{name}: rank 1, whose host has it, cannot read it ({why})." for name in STRANGE}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["index", "link", "draft"])
def test_a_host_that_means_harm_is_refused_on_all(ranks: Ranks, tmp_path: Path, how: str) -> None:
    """The index of the second host names `../secret`; its file is a link to one; a draft of it has a pipe for an index.
    The other host, which would get the bytes, says so too."""
    ranks.run(write, str(tmp_path), "zero3", world_size=WORLD)
    root = tmp_path / "host1" / "run"
    name = "rank-00002-of-00004.safetensors"
    file, secret = root / "step-3" / name, root / "secret"
    file.rename(secret)
    if how == "index":
        for host in (0, 1):
            rewrite(tmp_path / f"host{host}" / "run" / "step-3", lambda said: renamed(said, name, "../secret"))
    elif how == "link":
        file.symlink_to("../secret")
    else:
        draft_of = root / ".step-3.writing-0123456789ab"
        draft_of.mkdir()
        os.mkfifo(draft_of / INDEX)
    words = {"index": "'../secret'", "link": "a link that leads out of the checkpoint", "draft": name}[how]
    said = ranks.run(refused, str(tmp_path), world_size=WORLD)
    assert all(words in each for each in said), said


def renamed(said: dict[str, Any], old: str, new: str) -> Any:
    return json.loads(json.dumps(said).replace(old, new))
