"""The recipe where ranks share layers: the same run as where they do not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from shardfold.tools.cli_options import argument
from shardfold.tools.recipes.lm import train
from shardfold.tools.recipes.train_config import TrainConfig, read_settings, resumed_settings
from shardfold.tools.run_attempts import RunAttempts


def _run(data: str, out: str, tensor: int, parallel: bool = False) -> tuple[float, bytes]:
    config = TrainConfig(
        d_model=16, layers=1, heads=2, context=16, data=Path(data), out=Path(out), tensor=tensor, steps=3, warmup=1,
        micro_batch=2, eval_every=0, eval_windows=5, sample=4, temperature=0.0,
        sequence_parallel=parallel,
    )  # fmt: skip
    result = train(config)
    return result.bits_per_byte, result.sample


@pytest.mark.soak
def test_ranks_that_share_layers(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks that share each layer train, evaluate and generate as one, with sequence parallelism too: first values,
    batches, held-out bits and text are those of one rank, in fp32."""
    text = tmp_path / "text"
    text.write_text("".join(f"{number} is less than {number + 1}.\n" for number in range(400)))
    one = ranks.run(_run, str(text), str(tmp_path / "one"), 1, world_size=1)[0]
    for parallel in (False, True):
        two = ranks.run(_run, str(text), str(tmp_path / f"two-{parallel}"), 2, parallel, world_size=2)[0]
        assert two[0] == pytest.approx(one[0], rel=1e-5)
        assert two[1] == one[1]


def test_what_sequence_parallelism_needs() -> None:
    """Ranks that share layers, and a context that they divide; the flag travels to the ranks as one."""
    with pytest.raises(ConfigError, match=r"of which there is 1 .*: give --tensor 2"):
        TrainConfig.load({"sequence_parallel": True})
    with pytest.raises(ConfigError, match=r"the context of 130 bytes into 2 parts, each of 2 once more, which do not"):
        TrainConfig.load({"sequence_parallel": True, "tensor": 2, "sequence": 2, "context": 130})
    flags = [argument("sequence_parallel", each) for each in (True, False)]
    assert flags == ["--sequence-parallel", "--no-sequence-parallel"]


def _resumed(data: str, folder: str) -> tuple[list[dict[str, float]], dict[str, object]]:
    """A run of two steps, and two more with other rates, from another folder."""
    os.chdir(data)
    shape = {"d_model": 16, "layers": 1, "heads": 2, "context": 16}
    common = {"warmup": 0, "eval_windows": 2, "sample": 0, "save_every": 1, "micro_batch": 2, "eval_every": 0}
    here = {"data": "text", "peak_flops": "machine.json"}
    train(TrainConfig.load({**shape, **common, **here, "steps": 2, "out": f"{folder}/a"}))
    os.chdir(folder)
    given = {"resume": "a", "steps": 4, "lr": 1e-5, "weight_decay": 0.0, "out": f"{folder}/b"}
    train(TrainConfig.load(resumed_settings(Path("a"), given)))
    lines = Path(folder, "b", "metrics.jsonl").read_text().splitlines()
    index = json.loads(Path(folder, "b", "checkpoints", "step-000004", "index.json").read_text())
    return [json.loads(line) for line in lines], index["optimizer"]["groups"][0]["options"]


def test_what_is_given_beside_resume_acts(ranks: Ranks, tmp_path: Path) -> None:
    """Rates are those of the schedule that is asked for from the first step on: half a cosine from 1 to 0.1. Files that
    the first run named are found from another folder: text, and the profile that utilization is counted by."""
    (tmp_path / "run").mkdir()
    (tmp_path / "text").write_text("".join(f"{number} is less than {number + 1}.\n" for number in range(400)))
    profile = {"name": "mine", "memory": 1e9, "flops": {"fp32": 1e9}, "bandwidth": 1e9}
    (tmp_path / "machine.json").write_text(json.dumps(profile))
    rows, options = ranks.run(_resumed, str(tmp_path), str(tmp_path / "run"), world_size=1)[0]
    third, fourth = 0.55, 0.1 + 0.9 * (1 - 2**-0.5) / 2
    assert [row["lr"] for row in rows] == pytest.approx([1e-5 * third, 1e-5 * fourth])
    block = 4 * 16**2 + 3 * 16 * 64 + 2 * 16  # 64 is 8/3 of the width, rounded up to a multiple of 32
    for row in rows:
        assert row["mfu"] == pytest.approx(6 * (block + 2 * 256 * 16 + 16) * row["tokens_per_s"] / 1e9)
    assert options["weight_decay"] == 0.0 and options["initial_lr"] == 1e-5


def test_what_follows_a_step_is_done_where_its_loss_was_not_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by those that had heard it before a rank died: the step counts, and has no line."""
    once, whole, at = RunAttempts.once, RunAttempts.whole, list[int]()

    def unheard(self: RunAttempts, do: Callable[[], Any]) -> Any:
        if self.engine.steps != 1:
            return once(self, do)
        with monkeypatch.context() as gone, suppress(ZeroDivisionError):
            gone.setattr(self.engine, "mean", lambda *_, **__: 1 / 0)
            once(self, do)

    def counted(self: RunAttempts, do: Callable[[], Any]) -> Any:
        at.append(self.engine.steps)
        return whole(self, do)

    monkeypatch.setattr(RunAttempts, "once", unheard)
    monkeypatch.setattr(RunAttempts, "whole", counted)
    (tmp_path / "text").write_text("0123456789" * 40)
    shape = {"d_model": 16, "layers": 1, "heads": 2, "context": 16, "micro_batch": 2, "eval_windows": 2, "sample": 0}
    more = {"steps": 4, "warmup": 0, "eval_every": 1, "data": tmp_path / "text", "out": tmp_path / "run"}
    train(TrainConfig.load({**shape, **more}))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3, 4]
    assert at[:8] == [1, 1, 2, 2, 3, 3, 4, 4], "an evaluation behind each step but the last, and who was asked to stop"


def test_a_copied_checkpoint_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "step-4").mkdir()
    with pytest.raises(ConfigError, match=r"has no config.json beside it, as a checkpoint.*give --size"):
        resumed_settings(tmp_path / "step-4", {})
    assert resumed_settings(tmp_path / "step-4", {"size": "tiny"}) == {"size": "tiny"}


def test_no_samples_are_refused_and_the_most_are_called_max(tmp_path: Path) -> None:
    for number in (0, "0", -1, "-1"):
        with pytest.raises(ConfigError, match=r"micro_batch is .*, but should be at least 1, or max"):
            TrainConfig.load({"micro_batch": number})
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(TrainConfig.load({"micro_batch": "max"}).model_dump(mode="json", exclude_none=True)))
    assert json.loads(kept.read_text())["micro_batch"] == "max"
    assert TrainConfig.load(read_settings(kept)).micro_batch == 0


def test_a_token_goes_through_its_own_experts_only() -> None:
    """Of 4 experts a token goes through 2: of 16 x 64 elements each, three times."""
    dense, mixed = (
        TrainConfig.load({"d_model": 16, "heads": 2, "layers": 3, "experts": n}).model_shape() for n in (0, 4)
    )
    assert dense.num_read == dense.num_parameters
    assert mixed.num_parameters - mixed.num_read == 3 * 2 * (3 * 16 * 64)


@pytest.mark.parametrize("given", ["0", "fast", "-1", "inf", "no-such.json"])
def test_what_a_device_could_do_is_a_number_or_a_file(given: str) -> None:
    with pytest.raises(ConfigError, match=rf"peak_flops is '{given}', which is neither FLOP/s"):
        TrainConfig.load({"peak_flops": given})
    assert TrainConfig.load({"peak_flops": "312e12"}).peak_flops == "312e12"
