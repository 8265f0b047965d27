"""Where states on disk are: folders that users name, as text or values, on several drives, of each rank."""

from __future__ import annotations

import logging
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfold as sf
from shardfold.errors import ConfigError, LayoutError
from shardfold.plan.offload import offloaded
from shardfold.testing import Ranks
from shardfold.tiers.device import DeviceTier
from shardfold.tiers.disk import DiskTier
from shardfold.tiers.tiers import Tiers
from tests.support import models

ADAMW = partial(torch.optim.AdamW, lr=1e-2)

NAMED: list[tuple[str | dict[str, Any], Any]] = [
    ("disk,folder=/mnt/a", "/mnt/a"),
    ("disk:0.5,folder=~/a", "~/a"),
    ("optimizer=disk, grads=disk, folder=/mnt/a:/mnt/b", ("/mnt/a", "/mnt/b")),
    ({"optimizer": "disk", "folder": Path("/mnt/a")}, "/mnt/a"),
    ({"moments": "disk", "folder": ["/mnt/a", Path("/mnt/b")]}, ("/mnt/a", "/mnt/b")),
    ({"moments": "disk", "folder": None}, None),
    ("disk", None),
]


def test_a_folder_is_named_beside_what_rests_on_disk() -> None:
    """Of all states that do, and of no others; as text, as a path, or several for several drives."""
    for offload, folder in NAMED:
        cells = offloaded(sf.PRESETS["zero2"], offload).cells().values()
        assert {cell.folder for cell in cells if cell.tier == "disk"} == {folder}, offload
        assert {cell.folder for cell in cells if cell.tier != "disk"} <= {None}, offload
    filed = sf.PRESETS["zero2"].edit("moments", tier="disk", folder=Path("/mnt/a"))
    assert filed.moments.folder == "/mnt/a" and offloaded(filed, "disk").moments.folder == "/mnt/a"
    assert offloaded(filed, "host").moments.folder is None


REFUSED: list[tuple[Any, str]] = [
    ("host,folder=/mnt/a", "nothing rests on disk"),
    ({"optimizer": "disk", "folder": ""}, "folder='': it is the path of a folder, or several in a list"),
    ({"optimizer": "disk", "folder": []}, "folder=[]: it is the path of a folder"),
    ({"optimizer": "disk", "folder": 1}, "folder=1: it is the path of a folder"),
    ("disk:/mnt/a", "beside it, as in 'disk,folder=/mnt/nvme0'"),
    ("/mnt/a", "beside the tier, as in 'disk,folder=/mnt/nvme0'"),
    ("disk,grads=host", "write optimizer=disk"),
    ({"optimizer": "disk", "folders": "/mnt/a"}, "Did you mean 'folder'"),
]


def test_what_is_no_folder_is_refused_in_a_sentence() -> None:
    for offload, words in REFUSED:
        with pytest.raises(ConfigError) as error:
            offloaded(sf.PRESETS["zero2"], offload)
        assert words in str(error.value), offload
    for folder in ("", (), ["/mnt/a", ""], b"/mnt/a"):
        with pytest.raises(LayoutError, match="it is the path of a folder"):
            sf.PRESETS["zero2"].edit("moments", tier="disk", folder=folder)


def _trained(offload: Any) -> tuple[list[float], list[list[str]]]:
    """Losses, and the folders of the drives."""
    torch.manual_seed(0)
    engine = sf.Engine(models.Small(), optimizer=ADAMW, layout="zero2", offload=offload)
    losses: list[float] = []
    for batch in models.batches(2):
        loss = engine(*[each.chunk(engine.world_size)[engine.rank] for each in batch])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    tiers = [tier for tier in engine.sharded.tiers._made.values() if isinstance(tier, DiskTier)]
    assert all(drive.bytes_written for tier in tiers for drive in tier.drives)
    engine.close()
    return losses, [[drive.folder for drive in tier.drives] for tier in tiers]


def _in_folders(root: str) -> None:
    rank = dist.get_rank()
    os.environ["HOME"] = root
    wanted, _ = _trained(None)
    for offload, folders in [
        (f"disk,folder={root}/r{{local_rank}}", [f"{root}/r{rank}"]),
        ({"optimizer": "disk", "folder": [f"{root}/a", "~/b"]}, [f"{root}/a", f"{root}/b"]),
        ({"optimizer": "disk", "folder": f"{root}/r{rank}"}, [f"{root}/r{rank}"]),  # said otherwise on each rank
    ]:
        assert _trained(offload) == (wanted, [folders]), offload


def test_states_are_in_the_folders_that_are_named(ranks: Ranks, tmp_path: Path) -> None:
    """One of each rank, by the placeholder or named by each rank itself, and several, over which they are spread:
    losses are the same to the bit."""
    for name in ("a", "b", "r0", "r1"):
        (tmp_path / name).mkdir()
    ranks.run(_in_folders, str(tmp_path), world_size=2)


def test_a_folder_for_temporary_files_that_is_passed_over_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python takes another one in silence where ``TMPDIR`` is no folder: one warning names both."""
    told: list[list[str]] = []
    for asked, folder in ((tmp_path / "gone", None), (tmp_path, None), (tmp_path / "gone", str(tmp_path))):
        monkeypatch.setenv("TMPDIR", str(asked))
        monkeypatch.setattr(tempfile, "tempdir", None)
        caplog.clear()
        tiers = Tiers(DeviceTier(torch.device("cpu")))
        with caplog.at_level(logging.WARNING, "shardfold"):
            tiers.named("disk", folder)
        tiers.close()
        told.append([each.getMessage() for each in caplog.records if "TMPDIR" in each.getMessage()])
    assert len(told[0]) == 1 and str(tmp_path / "gone") in told[0][0] and told[1:] == [[], []]
