"""Checkpoints and state dicts of stages go on with any other number of them, and with none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfold as sf
from shardfold.errors import CheckpointError, ModelError
from shardfold.testing import Ranks
from tests.parallel.models import ADAM
from tests.pipeline.training import batches, compute, model_of, plain

PARTS = 4


def _goes_on(name: str, count: int, data: int, layout: str, path: str, *, load: bool) -> dict[str, Tensor]:
    mesh = {"pipeline": count, "intra": data} if count > 1 else {"intra": data}
    engine = sf.Engine(
        model_of(name), optimizer=ADAM, layout=layout, parallel=mesh, clip_norm=0.1, accumulate=PARTS // data
    )
    if load:
        report = engine.load(path)
        assert not report.missing and not report.unexpected
    steps = batches(PARTS, 4)
    for batch in steps[2:] if load else steps[:2]:
        engine.train_batch(tuple(t.chunk(data)[engine.data_rank] for t in batch), compute)
        engine.step()
    if not load:
        engine.save(path, wait=True)
        other = {"weight": torch.zeros(1)}
        with pytest.raises(ModelError, match="unexpected weight"):
            engine.load_state_dict({**engine.state_dict(), **other})
        with pytest.raises(CheckpointError):
            engine.load(path + "x")
    state = engine.state_dict()
    engine.close()
    return {key: value.clone() for key, value in state.items()}


CASES = [  # saved with so many stages, ranks of data and a layout; loaded with others
    ("gpt-tied", (2, 2, "zero2"), (3, 1, "zero3")),
    ("gpt-tied", (1, 1, "ddp"), (2, 2, "zero3")),
    ("t5", (3, 1, "zero1"), (1, 2, "zero2")),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "saved", "loaded"), CASES)
def test_a_run_goes_on_with_other_stages(ranks: Ranks, tmp_path: Path, name: str, saved: Any, loaded: Any) -> None:
    """Weights two steps behind the checkpoint are those of a run that never stopped."""
    path = str(tmp_path / "run")
    ranks.run(_goes_on, name, *saved, path, load=False, world_size=saved[0] * saved[1])
    _, _, _, whole = plain(name, PARTS, 4)
    for state in ranks.run(_goes_on, name, *loaded, path, load=True, world_size=loaded[0] * loaded[1]):
        assert state.keys() == whole.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, whole[key], rtol=1e-11, atol=1e-11, msg=key)


def _meta(path: str) -> None:
    with sf.meta_init():
        model = model_of("gpt-tied")
    engine = sf.Engine(
        model, layout="zero1", parallel=sf.Parallel(mesh={"pipeline": 2}, pipeline="gpipe"), init=sf.Init(weights=path)
    )
    whole = torch.load(path + ".pt")
    for key, value in engine.state_dict().items():
        assert torch.equal(value.double(), whole[key]), key
    loss = engine.eval_batch(batches(1)[0], compute, micro_batches=2)
    assert loss.isfinite()
    engine.close()
    with sf.meta_init():
        model = model_of("gpt-tied")
    engine = sf.Engine(model, optimizer=ADAM, layout="zero1", parallel={"pipeline": 2}, init=sf.Init(seed=3))
    first = engine.state_dict()
    assert torch.equal(first["embedding.weight"], first["head.weight"])
    with engine.gathered() as found:  # the values that stages share are equal from the start
        mine = {"embedding.weight", "head.weight"} & set(found)
        assert all(torch.equal(found[name].cpu(), first["embedding.weight"]) for name in mine)
    engine.close()


def test_only_a_stages_own_parameters_are_read_or_made(ranks: Ranks, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = model_of("gpt-tied").state_dict()
    torch.save(state, tmp_path / "w.safetensors.pt")
    save_file({k: v for k, v in state.items() if k != "head.weight"}, tmp_path / "w.safetensors")
    ranks.run(_meta, str(tmp_path / "w.safetensors"), world_size=2)
