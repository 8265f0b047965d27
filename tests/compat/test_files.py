"""Files that DeepSpeed's tools write are there whole or not at all, also where every rank calls the tool at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardfold as sf
from shardfold.compat.deepspeed.checkpoint import ds_to_universal
from shardfold.compat.deepspeed.utils import zero_to_fp32
from shardfold.compat.deepspeed.whole_files import written_whole
from shardfold.errors import CheckpointError
from shardfold.testing import Ranks

TRIES = 25


def save(folder: str) -> None:
    torch.manual_seed(0)
    engine = sf.Engine(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), optimizer=torch.optim.AdamW)
    engine.save(Path(folder) / "tag")
    engine.close()


def convert(folder: str, safe: bool) -> None:
    """Writes the same files as the other ranks, and reads them: another rank may be writing them meanwhile."""
    wanted = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, "tag")
    for attempt in range(TRIES):
        target = Path(folder) / f"out-{attempt % 2}"
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, target, "50KB", safe, "tag")
        files = sorted(target.glob("model-*.safetensors" if safe else "pytorch_model-*.bin"))
        found = {k: v for file in files for k, v in (load_file(file) if safe else torch.load(file)).items()}
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("safe", [False, True])
def test_every_rank_converts_the_same_checkpoint_at_once(ranks: Ranks, tmp_path: Path, safe: bool):
    """Each reads whole files, however far the others are, and no draft is left."""
    ranks.run(save, str(tmp_path), world_size=1)
    ranks.run(convert, str(tmp_path), safe, world_size=3)
    assert not list(tmp_path.glob("out-*/.*"))


def universal(folder: str) -> list[Any]:
    """What a rank finds when the call returns; a folder that is there before it begins is refused."""
    found = []
    for attempt in range(TRIES):
        target = Path(folder) / f"universal-{attempt}"
        try:
            ds_to_universal.convert(Path(folder) / "tag", target)
        except CheckpointError as error:
            assert "is there already" in str(error)
        found.append(sorted(path.name for path in target.iterdir()))
    return found


def test_every_rank_makes_the_same_universal_checkpoint_at_once(ranks: Ranks, tmp_path: Path):
    """The folder has all of its files when a rank sees it."""
    ranks.run(save, str(tmp_path), world_size=1)
    whole = sorted(path.name for path in (tmp_path / "tag").iterdir())
    for found in ranks.run(universal, str(tmp_path), world_size=3):
        assert found == [whole] * TRIES
    assert not list(tmp_path.glob(".*"))
    latest = (tmp_path / ds_to_universal.LATEST_UNIVERSAL).read_text()  # of whichever rank wrote last
    assert (tmp_path / latest).is_dir()


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path: Path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(RuntimeError, match="disk"), written_whole(tmp_path / "file") as draft:
        draft.write_text("ne")
        assert draft.parent == tmp_path and draft.name != "file"
        raise RuntimeError("the disk is full")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "old"
