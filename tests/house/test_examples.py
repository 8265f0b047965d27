"""The examples run as their first lines say, and learn."""

from __future__ import annotations

import io
import json
import re
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from shardfold.testing import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
ALONE = [sys.executable]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*command: str) -> str:
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+ +loss (\S+)", output, re.MULTILINE)]


@pytest.mark.soak
def test_the_plain_loop_learns_the_same_alone_and_on_two_ranks() -> None:
    alone = run(*ALONE, str(EXAMPLES / "plain_loop.py"))
    two = run(*TWO, str(EXAMPLES / "plain_loop.py"))
    assert len(losses(alone)) == 9 and losses(alone)[-1] < 0.6 * losses(alone)[0]
    assert losses(two) == pytest.approx(losses(alone), rel=2e-3)
    assert "zero3 on 2 rank(s)" in two and "REDUCE_SCATTER" in two and "moments" in two


@pytest.mark.soak
def test_the_transformers_example_learns_its_sentence() -> None:
    pytest.importorskip("transformers")
    output = run(*TWO, str(EXAMPLES / "transformers_meta.py"))
    assert "model.layers.3" in output and "written: 'A table says" in output
    assert losses(output)[-1] < 0.2 * losses(output)[0]


SHORT = {
    "gpt_from_scratch.ipynb": r"step  60  loss (\S+)",
    "vision_transformer.py": r"(\d+)% of new pictures",
    "gan.py": r"points are (\S+) from the circle",
    "lora.py": r"step  40  loss (\S+)",
    "ppo.py": r"round  30  reward (\S+)",
    "own_parts.py": r"step  60  loss (\S+)",
    "checkpoint_surgery.py": r"head: \((\d+), 32\)",
    "generate.py": r"tokens: (\d+)",
}
GOOD = {"gpt_from_scratch.ipynb": (0, 3.6),
        "vision_transformer.py": (35, 100), "gan.py": (0, 0.5), "lora.py": (0, 5.2), "ppo.py": (0.8, 1),
        "own_parts.py": (0, 6), "checkpoint_surgery.py": (12, 12), "generate.py": (12, 12)}  # fmt: skip
"""What an example says at its end, and between which numbers that is: well beside what it begins with."""


def _run_here(script: str) -> str:
    with redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
        # Of libraries that examples use, about their next versions.
        warnings.filterwarnings("ignore", category=FutureWarning, module="peft|transformers")
        if script.endswith(".ipynb"):
            _run_cells(EXAMPLES / script)
        else:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return out.getvalue()


def _run_cells(notebook: Path) -> None:
    """The code of a notebook, cell by cell, in one space of names; cells have been run in order when it was saved."""
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    space: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number + 1}", "exec"), space)


ONE_PROCESS = ("gpt_from_scratch.ipynb", "checkpoint_surgery.py")  # they save into a temporary folder of their own
CASES = [
    pytest.param(script, world_size, marks=[pytest.mark.soak] * (world_size > 1))
    for script in SHORT
    for world_size in ((1,) if script in ONE_PROCESS else (1, 2))
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("script, world_size", CASES)
def test_a_short_example_comes_to_what_it_says(ranks: Ranks, script: str, world_size: int) -> None:
    """In a rank of the pool, where torch is imported already."""
    for package in ("transformers", "peft") if script in ("lora.py", "generate.py") else ():
        pytest.importorskip(package)
    said = ranks.run(_run_here, script, world_size=world_size, timeout=240)[0]
    found = re.search(SHORT[script], said)
    low, high = GOOD[script]
    assert found is not None and low <= float(found[1]) <= high, said


AS_DEEPSPEED = [*ALONE, "-m", "shardfold", "run", "--as-deepspeed", "--no_local_rank", "--nproc-per-node", "2"]
SCRIPTS = ("accelerate_loop.py", "transformers_trainer.py")
SMALL = ["--steps", "4", "--width", "32", "--layers", "2"]


def run_as_deepspeed(script: str, stage: int, folder: Path, *more: str) -> str:
    which = ["--stage", str(stage)] if script == "accelerate_loop.py" else []
    which = which or ["--deepspeed", str(EXAMPLES / f"ds_zero{stage}.json")]
    return run(*AS_DEEPSPEED, str(EXAMPLES / script), *SMALL, "--output", str(folder), *which, *more)


@pytest.mark.soak
@pytest.mark.parametrize("script", [pytest.param(SCRIPTS[0], marks=pytest.mark.soak), *SCRIPTS[1:]])
def test_scripts_that_name_deepspeed_only_run_here(script: str, tmp_path: Path) -> None:
    """They train, save, evaluate, write the model and generate."""
    for package in ("accelerate", "transformers"):
        pytest.importorskip(package)
    output = run_as_deepspeed(script, 3, tmp_path)
    assert len(losses(output)) == 4 and losses(output)[-1] < losses(output)[0]
    assert "held out" in output and "written 'def test_" in output and (tmp_path / "model/model.safetensors").exists()


@pytest.mark.soak
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_that_name_deepspeed_only_go_on_where_they_saved(script: str, stage: int, tmp_path: Path) -> None:
    whole = run_as_deepspeed(script, stage, tmp_path)
    if script == "accelerate_loop.py":
        saved = ["--resume", str(tmp_path / "step-2")]
    else:
        saved = ["--resume"]
        (tmp_path / "checkpoint-4").rename(tmp_path / "last")
    assert losses(run_as_deepspeed(script, stage, tmp_path, *saved))[-2:] == losses(whole)[-2:]
