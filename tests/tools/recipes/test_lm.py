"""The recipe where ranks share layers: the same run as where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from shardfold.tools import cli
from shardfold.tools.recipes.config import TrainConfig
from shardfold.tools.recipes.lm import train


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
    with pytest.raises(ConfigError, match="of which there is 1: give --tensor 2"):
        TrainConfig.load({"sequence_parallel": True})
    with pytest.raises(ConfigError, match=r"the context of 130 bytes into 2 parts, each of 2 once more, which do not"):
        TrainConfig.load({"sequence_parallel": True, "tensor": 2, "sequence": 2, "context": 130})
    flags = [cli.argument("sequence_parallel", each) for each in (True, False)]
    assert flags == ["--sequence-parallel", "--no-sequence-parallel"]
