"""``shardfold run --elastic``: ranks of a script of transformers' Trainer, or of Lightning's, are killed, and its loop
goes on."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import shardfold as sf
from shardfold.errors import ConfigError, UsageError
from shardfold.launch.options import Options
from tests.support.clients import needs

ROOT = Path(__file__).parents[2]
TRANSFORMERS, LIGHTNING = (Path(__file__).with_name(f"elastic_{name}.py") for name in ("script", "lightning_script"))
STEPS, RANKS = 12, 3
TOLERANCE = 1e-6
"""Between losses in fp32 of about 4: sums in another order differ by a rounding, 2.4e-7, or two."""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="launchers leave notes for ranks in a memfd")


def trained(script: Path, folder: Path, stage: int, accumulate: int, *moments: str) -> dict[str, Any]:
    """What a run came to."""
    folder.mkdir()
    words = ["run", "--elastic", "--as-deepspeed", "--no_local_rank", "--standalone", f"--nproc-per-node={RANKS}"]
    words += [str(script), str(folder), f"{stage}", f"{accumulate}", f"{STEPS}", *moments]
    more = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, **more, "PYTHONPATH": paths}
    run = [sys.executable, "-m", "shardfold", *words]
    done = subprocess.run(run, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stderr.count("go on without it") + done.stderr.count("goes on without it") == len(moments), done.stderr
    return torch.load(folder / "found")


def told(found: dict[str, Any], name: str) -> dict[int, float]:
    return {each["step"]: each[name] for each in found["log"] if "loss" in each}


def samples(folder: Path) -> list[Counter[int]]:
    """Of each step that was taken, how often a forward of it has read each sample that counts."""
    lines = [json.loads(line) for path in folder.glob("read-*") for line in path.read_text().splitlines()]
    found: list[Counter[int]] = []
    for step in range(STEPS):
        mine = [each for each in lines if each[0] == step]
        last = max(each[1] for each in mine)
        found.append(Counter(i for _, epoch, ids, factor in mine if epoch == last and factor for i in ids))
    return found


def is_as_undisturbed(
    script: Path, folder: Path, stage: int, accumulate: int, most: int, beside: Sequence[int] = ()
) -> dict[str, dict[str, Any]]:
    """Whether a run of which two ranks of three are killed at drawn moments, at most so many milliseconds behind the
    beginning of a step, or ``beside`` steps, behind the end of these, comes to losses, rates and weights of one of
    which none is, and each step has the samples of that; what both came to."""
    quiet, draw = trained(script, folder / "quiet", stage, accumulate), random.Random(stage)
    order, later = draw.sample(range(RANKS), 2), [draw.choice([0, draw.randrange(1, most)]) for _ in range(2)]
    if beside:
        later = [-draw.randrange(1, most) for _ in range(2)]
    moments = [f"{r}:{step}:{ms}" for r, step, ms in zip(order, beside or (3, 8), later, strict=True)]
    found = trained(script, folder / "killed", stage, accumulate, *moments)
    losses = told(found, "loss")
    assert len(losses) == STEPS, moments
    for name in ("loss", "learning_rate"):
        expected, mine = told(quiet, name), told(found, name)
        assert max(abs(mine[step] - value) for step, value in expected.items()) < TOLERANCE, (moments, name)
    far = max(float((found["weights"][name] - value).abs().max()) for name, value in quiet["weights"].items())
    assert far < 1e-4, moments  # Adam makes more of a rounding where a gradient is next to nothing
    assert samples(folder / "killed") == samples(folder / "quiet"), moments
    return {"quiet": quiet, "killed": found}


@LINUX
@pytest.mark.soak
@pytest.mark.timeout(900)
@needs("accelerate", "transformers")
@pytest.mark.parametrize(("stage", "accumulate"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_ranks_of_the_trainer_are_killed_and_it_comes_to_the_same(stage: int, accumulate: int, tmp_path: Path) -> None:
    """Also the one that prints."""
    told_beside_steps(is_as_undisturbed(TRANSFORMERS, tmp_path, stage, accumulate, 60), tmp_path)


@LINUX
@pytest.mark.soak
@pytest.mark.timeout(900)
@needs("accelerate", "transformers")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_of_the_trainer_are_killed_in_an_evaluation_or_a_save(stage: int, tmp_path: Path) -> None:
    told_beside_steps(is_as_undisturbed(TRANSFORMERS, tmp_path, stage, 1, 150, beside=(4, 8)), tmp_path)


@LINUX
@pytest.mark.soak
@pytest.mark.timeout(900)
@needs("accelerate", "transformers")
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_the_trainer_are_killed_at_the_end(stage: int, tmp_path: Path) -> None:
    """Where the best checkpoint is about to be loaded, and the model to be written."""
    told_beside_steps(is_as_undisturbed(TRANSFORMERS, tmp_path, stage, 1, 2, beside=(98, 99)), tmp_path)
    folders = [tmp_path / name / "final" for name in ("quiet", "killed")]
    if stage == 3:  # without stage3_gather_16bit_weights_on_model_save a Trainer writes a checkpoint
        quiet, killed = (sorted(path.name for path in folder.glob("global_step*")) for folder in folders)
        assert quiet == killed and quiet
        sf.Checkpoint(folders[1] / killed[0])
        return
    quiet, killed = (load_file(folder / "model.safetensors") for folder in folders)
    assert max(float((killed[name] - value).abs().max()) for name, value in quiet.items()) < 1e-4


def told_beside_steps(found: dict[str, dict[str, Any]], folder: Path) -> None:
    """Evaluations are told of once, with what an undisturbed run has, and saves are whole."""
    held_out = [
        [(row["step"], row["eval_loss"]) for row in each["log"] if "eval_loss" in row] for each in found.values()
    ]
    for (step, mine), (then, expected) in zip(*held_out, strict=True):
        assert step == then and abs(mine - expected) < TOLERANCE
    assert [step for step, _ in held_out[0]] == [4, 8, 12]
    for name, step in product(found, (4, 8, 12)):
        place = folder / name / f"checkpoint-{step}"
        assert json.loads((place / "trainer_state.json").read_text())["global_step"] == step
        assert sf.Checkpoint(place / f"global_step{step}").index.step == step


@LINUX
@pytest.mark.soak
@pytest.mark.timeout(900)
@needs("lightning")
@pytest.mark.parametrize(("stage", "accumulate"), [(1, 1), (2, 2), (3, 1)])
def test_ranks_of_lightning_are_killed_and_it_comes_to_the_same(stage: int, accumulate: int, tmp_path: Path) -> None:
    """Also the one that prints; what is held out is shared out among the ranks that are left, and saves are whole."""
    found = is_as_undisturbed(LIGHTNING, tmp_path, stage, accumulate, 30)
    held_beside_steps(found, tmp_path)
    assert found["killed"]["ranks"] == 1


@LINUX
@pytest.mark.soak
@pytest.mark.timeout(900)
@needs("lightning")
@pytest.mark.parametrize(("stage", "beside"), [(1, (5, 8)), (3, (8, 10))])
def test_ranks_of_lightning_are_killed_in_a_validation_or_a_save(
    stage: int, beside: tuple[int, int], tmp_path: Path
) -> None:
    held_beside_steps(is_as_undisturbed(LIGHTNING, tmp_path, stage, 1, 60, beside=beside), tmp_path)


def held_beside_steps(found: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Validations give what they give in an undisturbed run, and saves are there."""
    held_out = [each["held_out"] for each in found.values()]
    assert len(held_out[0]) > 1
    assert max(abs(a - b) for a, b in zip(*held_out, strict=True)) < TOLERANCE
    saved = [sorted(path.name for path in (tmp_path / name / "saved").iterdir()) for name in found]
    assert saved[0] == saved[1] and len(saved[0]) == 2


def test_elastic_is_for_scripts_of_the_trainer() -> None:
    with pytest.raises(ConfigError, match="with --as-deepspeed: give that too"):
        Options(elastic=True)
    with pytest.raises(ConfigError, match="would begin the Trainer's loop at its first step"):
        Options(elastic=True, as_deepspeed=True, spares=1)
    assert Options(elastic=True, as_deepspeed=True).argv() == ["--as-deepspeed", "--elastic"]


def test_what_is_done_again_begins_with_what_callbacks_had() -> None:
    """Also the second time."""
    from shardfold.compat.deepspeed.elastic_loop import Attributes

    counts, control = SimpleNamespace(seen=[1], best=None), SimpleNamespace(stops=False)
    had = Attributes([counts, control, object()])
    for _ in range(2):
        counts.seen.append(2)
        counts.best, counts.more, control.stops = 3, 4, True
        had.put_back()
        assert vars(counts) == {"seen": [1], "best": None} and not control.stops


def test_what_cannot_go_on_is_refused() -> None:
    """Loops of others, axes of ranks, and an order of samples that other ranks do not know."""
    from shardfold.compat.deepspeed.elastic_core import ElasticCore, refuse_axes
    from shardfold.compat.deepspeed.elastic_trainer import readers

    core = object.__new__(ElasticCore)
    core._is_inside = False  # pyright: ignore[reportPrivateUsage]  # as behind its making
    with pytest.raises(UsageError, match="own with Accelerate, nobody knows what to do again"):
        core.take(torch.zeros(()), last=True)
    with pytest.raises(ConfigError, match="--elastic with ranks along axes \\(tensor 2\\)"):
        refuse_axes({"tensor": 2})
    refuse_axes(None)
    loader = DataLoader(TensorDataset(torch.zeros(4)), batch_size=2, shuffle=True)
    with pytest.raises(ConfigError, match="over NoneType: when a rank dies others read its samples"):
        readers(loader, 2)
