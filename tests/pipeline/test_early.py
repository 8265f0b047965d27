"""Models whose stages are built under ``sharded_init()`` or read from files: a rank has its stage's parameters only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.errors import FreedParameterError
from shardfold.sharding.freed import FreedParameter
from shardfold.testing import Ranks
from tests.pipeline.training import batches, compute, model_of, trains


def _early(name: str, count: int, layout: str, order: str, micro: int) -> None:
    with sf.sharded_init():
        model = model_of(name)
        if torch.distributed.get_rank():  # rank 0's values are everyone's
            nn.init.zeros_(next(model.parameters()))
    before = dict(model.named_parameters())
    trains(name, count, layout, order, micro, model=model)
    own = {name for name, p in before.items() if not isinstance(p, FreedParameter) or not _elsewhere(p)}
    assert 0 < len(own) < len(before)


def _elsewhere(parameter: nn.Parameter) -> bool:
    with pytest.raises(FreedParameterError) as raised:
        parameter.sum()
    return "another stage of the pipeline has it" in str(raised.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "count", "data", "layout", "order"),
    [("gpt-tied", 2, 2, "zero3", "1f1b"), ("skipping", 2, 1, "zero1", "zbv"),
     *(pytest.param("gpt-tied", 2, 2, layout, "zb-h1", marks=pytest.mark.soak) for layout in ("ddp", "zero2"))],
)  # fmt: skip
def test_a_model_that_is_split_while_it_is_built_trains(
    ranks: Ranks, name: str, count: int, data: int, layout: str, order: str
) -> None:
    """As plain PyTorch to 1e-12; what other stages have is gone, and says so."""
    ranks.run(_early, name, count, layout, order, 2, world_size=count * data)


def _reads(folder: str) -> None:
    with sf.meta_init():
        model = model_of("gpt")
    before = dict(model.named_parameters())
    rank = torch.distributed.get_rank()
    engine = sf.Engine(
        model,
        layout="zero3",
        parallel=sf.Parallel(mesh={"pipeline": 2}, stages=["blocks.1"]),
        init=sf.Init(weights=f"{folder}/{rank}"),
    )
    whole, own = model_of("gpt").state_dict(), set(dict(engine.module.named_parameters()))
    assert all(before[name].is_meta == (name not in own) for name in before)
    state = engine.state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in state.items()) and len(state) == len(whole)
    assert engine.eval_batch(batches(1)[0], compute, micro_batches=2).isfinite()
    engine.close()


def test_a_rank_reads_files_of_its_stage_only(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank has the index of all files, and one of the two that this names."""
    from safetensors.torch import save_file

    state = model_of("gpt").state_dict()
    first = {name for name in state if name.startswith(("embedding", "blocks.0"))}
    index = {"weight_map": {name: f"{int(name not in first)}.safetensors" for name in state}}
    for rank in range(2):
        folder = tmp_path / f"{rank}"
        folder.mkdir()
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file({n: v for n, v in state.items() if (n not in first) == rank}, folder / f"{rank}.safetensors")
    ranks.run(_reads, str(tmp_path), world_size=2)
