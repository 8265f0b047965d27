"""`shardfold explain`: of how many blocks its numbers are, and configs whose values a client fills in."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardfold.plan.explain import explain_preset, usual_blocks
from shardfold.tools import cli

ROOT = Path(__file__).parents[2]
NODE = {"inter": 1, "intra": 8}


def explained(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["explain", *arguments])
    return int(end.value.code or 0)


def temporary(text: str) -> int:
    (number,) = re.findall(r"^temporary bytes in a step.*:\s+([\d,]+)$", text, re.MULTILINE)
    return int(number.replace(",", ""))


@pytest.mark.parametrize(
    ("params", "blocks"), [(6.74e9, 32), (175e9, 96), (1e9, 17), (1, 2), (1e18, 1000)], ids=lambda number: f"{number:g}"
)
def test_a_model_has_as_many_blocks_as_decoders_of_its_size(params: float, blocks: int) -> None:
    """LLaMA of 6.74e9 has 32 blocks, GPT-3 of 175e9 has 96."""
    assert usual_blocks(int(params)) == blocks


def test_what_a_step_takes_is_of_the_blocks_that_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """In bf16 under zero3: the root and two blocks gathered, 2 bytes an element; gradients of the root and a block in
    fp32, and those of the block as autograd gives them, too. Of 32 blocks, and of 2, which are the whole model."""
    assert explained("zero3", "--params", "6.74e9") == 0
    said = capsys.readouterr().out
    assert said.startswith("6,740,000,000 parameters: 134,800,128 in the root, the others in 32 blocks (as many as")
    assert re.search(r"^block.0 \.\. block.31\s+206,412,496 ", said, re.MULTILINE)
    assert "the program, of 2 of the 32 blocks:\nforward:\n" in said and "block.2 " not in said
    assert temporary(said) == (2 + 4) * 134_800_128 + (2 + 2 + 4 + 2) * 206_412_496
    assert explained("zero3", "--params", "6.74e9", "--blocks", "2") == 0
    two = capsys.readouterr().out
    assert "the others in 2 blocks (as given)" in two and "the program, of" not in two
    assert temporary(two) == (2 + 4) * 134_800_000 + (2 + 2 + 4 + 2) * 3_302_600_000


def test_what_rests_and_is_sent_does_not_depend_on_blocks() -> None:
    """3 x 2 bytes an element are gathered and reduced by each of 8 ranks, 7 of 8 parts of them."""
    for blocks in (1, 5):
        text = explain_preset("zero3", mesh=NODE, precision="bf16", params=8_000_000, blocks=blocks)
        assert re.search(r"params\s+2,000,000$", text, re.MULTILINE)
        assert re.search(rf"gather  ALL_GATHER     intra\s+{2 * blocks + 2} calls\s+28,000,000$", text, re.MULTILINE)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_config_that_the_trainer_fills_in_is_explained(stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert explained("--config", str(ROOT / f"examples/ds_zero{stage}.json"), "--ranks", "4", "--blocks", "3") == 0
    said = capsys.readouterr().out
    assert f"layout zero{stage}" in said and "in 3 blocks (as given)" in said
    assert said.count("values of 'auto' are filled in by the client") == 1
    assert "bf16.enabled = false, gradient_clipping = 1.0, gradient_accumulation_steps = 1, " in said
    assert re.search(r"^gradient_clipping\s+1.0\s+auto$", said, re.MULTILINE)
    assert re.search(r"^train_batch_size\s+4\s+derived$", said, re.MULTILINE)


def test_autos_of_sections_and_of_arguments_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is given stays: here a batch, so that the micro-batch follows from it."""
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-7}},
        "scheduler": "auto",
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert explained("--config", str(path), "--ranks", "4") == 0
    said = capsys.readouterr().out
    for word in ("optimizer.params.lr left out", "scheduler left out", "train_micro_batch_size_per_gpu = 4"):
        assert word in said
    assert re.search(r"^optimizer.params\s+\{'eps': 1e-07\}", said, re.MULTILINE)
    path.write_text(json.dumps({**config, "amp": {"enabled": True}}), encoding="utf-8")
    assert explained("--config", str(path)) == 2


@pytest.mark.parametrize("given", [["zero2"], ["--precision", "bf16"], ["--offload", "host"]], ids=" ".join)
def test_what_a_config_says_itself_is_not_said_beside_it(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert explained(*given, "--config", str(ROOT / "examples/ds_zero3.json")) == 2
    assert f"{given[0]} would: leave that out, or --config." in capsys.readouterr().err
