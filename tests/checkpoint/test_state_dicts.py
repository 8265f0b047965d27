"""State dicts under every layout, checkpoints without the frozen base, and values that are not finite."""

from __future__ import annotations

import io
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import CheckpointError, ConfigError, FreedParameterError, UsageError
from shardfold.testing import Ranks
from tests.support.keeping import LAYOUTS, Odd, Setting, contents, different, make, train

SPLIT = [name for name, table in sf.PRESETS.items() if table.comes_and_goes]


# -- state dicts -----------------------------------------------------------------------------------------------------


def _state_dicts(layout: str, precision: str) -> None:
    engine = make(Setting(layout, 2, precision))
    plain = Odd()
    train(engine, 2)
    state = engine.state_dict()
    assert list(state) == list(plain.state_dict())
    assert state["head.weight"] is state["embedding.weight"]
    assert state["norm.weight"].dtype == torch.float32 and state["fine"].dtype == torch.float64
    file = io.BytesIO()
    torch.save(state, file)
    size = sum(p.numel() * 4 for p in plain.parameters()) + 4 * plain.fine.numel()
    assert size < file.tell() < size + 600 * len(state)  # tied weights once; the rest is names
    plain.load_state_dict(state)

    few = engine.state_dict(frozen="skip")
    assert state.keys() - few.keys() == {"blocks.0.0.weight", "blocks.0.0.bias"} and few.keys() < state.keys()
    with pytest.raises(ConfigError, match="frozen='no'"):
        engine.state_dict(frozen="no")

    other = make(Setting("zero1", 2, precision), seed=1)
    other.load_state_dict(state)
    assert not different(contents(other)["weight"], contents(engine)["weight"])
    train(other, 1)
    other.load_state_dict(few, strict=False)
    assert not different(contents(other)["weight"], contents(engine)["weight"])
    other.close()

    # The module's own: what forward reads, where that is whole.
    if layout in SPLIT:
        with pytest.raises(FreedParameterError, match=r"wrap the access in `with engine\.gathered"):
            engine.module.state_dict()
        with pytest.raises(RuntimeError, match=r"wrap the access in `with engine\.gathered"):
            engine.module.load_state_dict(state)
    else:
        file = io.BytesIO()
        torch.save(engine.module.state_dict(), file)
        _is_rounded(torch.load(io.BytesIO(file.getvalue())), state)
    with engine.gathered():
        _is_rounded(engine.module.state_dict(), state)
    engine.close()


def _is_rounded(found: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    assert found.keys() == state.keys()
    for name, value in found.items():
        assert torch.equal(value, state[name].to(value.dtype)), name


@pytest.mark.sampled(18)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_dicts_are_whole_or_refused(ranks: Ranks, layout: str, precision: str) -> None:
    ranks.run(_state_dicts, layout, precision, world_size=2)


# -- without the frozen base -----------------------------------------------------------------------------------------


def adapted(seed: int = 0) -> nn.Module:
    """A Llama whose attention has LoRA (arXiv 2106.09685) from peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_attention_heads=4, num_key_value_heads=2, **sizes))
    torch.manual_seed(7)
    with warnings.catch_warnings():  # peft reads a property that transformers has renamed
        warnings.simplefilter("ignore")
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))  # pyright: ignore


def _tune(engine: sf.Engine, steps: int) -> list[float]:
    losses: list[float] = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(97, (4, 9), generator=draw).chunk(engine.world_size)[engine.rank]
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(loss.item()))
    return losses


def _adapters(folder: str, layout: str) -> None:
    new = partial(sf.Engine, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    engine = new(adapted(), layout=layout)
    _tune(engine, 3)
    engine.save(f"{folder}/all", wait=True)
    few = engine.save(f"{folder}/few", wait=True, frozen="skip")
    assert few is not None and few.report is not None
    kept = contents(engine)
    expected = _tune(engine, 2)
    engine.save(f"{folder}/later", wait=True, frozen="skip")  # the checksums are those of before
    engine.close()

    trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in engine.module.parameters()) - trained
    with sf.Checkpoint(f"{folder}/few") as checkpoint:
        kinds = {
            kind: sum(p.nbytes for p in checkpoint.index.pieces if p.kind == kind) for kind in ("element", "block")
        }
        assert kinds == {"element": 3 * 4 * trained, "block": 0}  # weights and two moments
        assert all((p.digest is None) == p.trainable for p in checkpoint.parameters.values())
        left_out = next(p.name for p in checkpoint.parameters.values() if not p.trainable)
        with pytest.raises(CheckpointError, match=r"was saved with frozen='skip' and has no values of"):
            checkpoint.read(left_out)
        with sf.Checkpoint(f"{folder}/later") as later:
            assert {n: p.digest for n, p in later.parameters.items()} == {
                n: p.digest for n, p in checkpoint.parameters.items()
            }
    with sf.Checkpoint(f"{folder}/all") as checkpoint:
        assert sum(p.nbytes for p in checkpoint.index.pieces if p.kind == "element") == 12 * trained + 4 * frozen

    for other in ("zero2", "zero3"):
        engine = new(adapted(), layout=other)
        engine.load(f"{folder}/few")
        assert not different(contents(engine), kept)
        losses = _tune(engine, 2)
        assert losses == expected if other == layout else losses == pytest.approx(expected, rel=1e-6)
        engine.close()

    engine = new(adapted(seed=1), layout="zero1")  # another base
    before = contents(engine)
    with pytest.raises(
        CheckpointError, match=r"without its frozen parameters, and the engine has others: .*q_proj\.base"
    ):
        engine.load(f"{folder}/few")
    assert not different(contents(engine), before) and not engine.sharded.run.broken
    report = engine.load(f"{folder}/few", strict=False)
    assert any("other values here" in note for note in report.notes)
    for name, value in contents(engine)["exp_avg"].items():
        assert torch.equal(value, kept["exp_avg"][name])
    _tune(engine, 1)
    engine.close()

    engine = new(adapted(), layout="zero3", precision="bf16")  # what is rounded cannot be compared
    report = engine.load(f"{folder}/few")
    assert any("Not compared" in note for note in report.notes)
    engine.save(f"{folder}/rounded", wait=True, frozen="skip")
    engine.close()
    engine = new(adapted(), layout="zero3")  # but is compared where it can be rounded
    assert not engine.load(f"{folder}/rounded").notes
    engine.close()


@pytest.mark.soak
@pytest.mark.parametrize("layout", [pytest.param("zero2", marks=pytest.mark.soak), "zero3"])
def test_adapters_are_saved_without_their_base_and_know_it(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    ranks.run(_adapters, str(tmp_path), layout, world_size=2)


def _nothing_trained(folder: str) -> None:
    engine = sf.Engine(nn.Linear(3, 3))
    with pytest.raises(UsageError, match="would leave out every parameter"):
        engine.save(folder, frozen="skip")
    with pytest.raises(ConfigError, match="frozen='maybe'"):
        engine.save(folder, frozen="maybe")
    engine.close()
    assert not Path(folder).exists()


def test_a_checkpoint_of_nothing_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_nothing_trained, str(tmp_path / "a"), world_size=1)


# -- what 16 bits cannot hold, and what no number is ------------------------------------------------------------------


class Normed(nn.Module):
    """Inputs of a size of thousands, so that running variances are beyond what fp16 can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=0.5)
        self.first = nn.Linear(6, 16)
        self.inner = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.inner(self.first(self.norm(x)))))


def _rows(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(24, 6, generator=draw) * 1000, torch.randint(3, (24,), generator=draw)


def _fit(engine: sf.Engine, steps: int) -> None:
    for step in range(steps):
        x, y = (t.chunk(engine.world_size)[engine.rank] for t in _rows(step))
        engine.backward(F.cross_entropy(engine(x).float(), y))
        engine.step()


def _variance(folder: str, layout: str) -> None:
    torch.manual_seed(0)
    engine = sf.Engine(Normed(), optimizer=torch.optim.AdamW, layout=layout, precision="fp16-autocast")
    _fit(engine, 10)
    engine.save(folder, wait=True, nonfinite="raise")
    state = engine.state_dict()
    assert state["norm.running_var"].dtype == torch.float32 and state["norm.running_var"].min() > 65504
    engine.close()
    x, _ = _rows(99)
    outputs: dict[str, Tensor] = {}
    for precision in ("fp16-autocast", "fp32"):
        torch.manual_seed(1)
        later = sf.Engine(Normed(), optimizer=torch.optim.AdamW, layout="zero1", precision=precision)
        later.load(folder)
        assert torch.equal(later.state_dict()["norm.running_var"], sf.Checkpoint(folder).buffer("norm.running_var"))
        later.module.eval()
        with torch.no_grad():
            outputs[precision] = later(x).float()
        later.close()
    assert outputs["fp32"].std() > 0.05
    # fp16 rounds weights and activations to 11 bits: 2^-11 of each of the 16 summands of a logit
    assert (outputs["fp16-autocast"] - outputs["fp32"]).abs().max() < 5e-3


@pytest.mark.parametrize("layout", ["zero3"])
def test_variances_beyond_fp16_are_kept(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    ranks.run(_variance, str(tmp_path / "a"), layout, world_size=2)


def _not_finite(folder: str) -> list[str]:
    engine = make(Setting("zero3", 2))
    train(engine, 1)
    engine.module.mean[3] = float("inf")  # pyright: ignore
    with engine.gathered("blocks.1.0.weight", write=True) as weight, torch.no_grad():
        weight[-1, -1] = float("nan")
    with pytest.raises(CheckpointError, match=r"inf or NaN in blocks\.1\.0\.weight, mean of step 1"):
        engine.save(f"{folder}/a", wait=True, nonfinite="raise")
    assert not Path(f"{folder}/a").exists()
    saving = engine.save(f"{folder}/a", wait=True)
    assert saving is not None and saving.report is not None
    assert saving.report.nonfinite == ("blocks.1.0.weight", "mean")
    engine.close()
    with sf.Checkpoint(f"{folder}/a") as checkpoint:
        return checkpoint.index.nonfinite


def test_what_is_not_finite_is_named_or_refused(ranks: Ranks, tmp_path: Path) -> None:
    for named in ranks.run(_not_finite, str(tmp_path), world_size=2):
        assert named == ["blocks.1.0.weight", "mean"]


def _saved_differently(folder: str) -> list[str]:
    engine = make(Setting("zero3", 2))
    choice = "skip" if engine.rank == 0 else "keep"
    said: list[str] = []
    for call in (lambda: engine.save(folder, frozen=choice), lambda: engine.state_dict(frozen=choice)):
        with pytest.raises(sf.ShardfoldError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_ranks_that_leave_out_different_things_are_told(ranks: Ranks, tmp_path: Path) -> None:
    """Before anything is gathered or written, so that none waits for the other."""
    for said in ranks.run(_saved_differently, str(tmp_path / "one"), world_size=2):
        assert "rank 0: engine.save(frozen='skip'); rank 1: engine.save(frozen='keep')" in said[0]
        assert len(said) == 2
    assert not (tmp_path / "one").exists()


def _written_in_place(layout: str, precision: str) -> None:
    """Values that are written into whole parameters, around the engine, and a step that changes none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = sf.Engine(model, optimizer=partial(torch.optim.SGD, lr=0.0), layout=layout, precision=precision)
    before = engine.state_dict()
    engine.module[0].load_state_dict({"weight": torch.full((4, 4), 3.0), "bias": torch.full((4,), 5.0)})  # type: ignore
    with torch.no_grad():
        engine.module[1].bias[2] = 7.0  # type: ignore
    engine.backward(engine(torch.ones(2, 4)).float().sum())
    engine.step()
    after = engine.state_dict()
    assert torch.equal(after["0.weight"], torch.full((4, 4), 3.0)) and torch.equal(
        after["0.bias"], torch.full((4,), 5.0)
    )
    wanted = before["1.bias"].clone()
    wanted[2] = 7.0
    assert torch.equal(after["1.bias"], wanted), "elements beside what was written keep the master's digits"
    assert torch.equal(after["1.weight"], before["1.weight"])
    shown = {name: p.detach().float() for name, p in engine.module.named_parameters()}
    assert all(
        torch.equal(shown[name], after[name].to(p.dtype).float()) for name, p in engine.module.named_parameters()
    )
    engine.close()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2"])
def test_what_is_written_into_whole_parameters_stays(ranks: Ranks, layout: str, precision: str) -> None:
    """As in plain PyTorch, also where a finer master lies beside them."""
    for size in (1, 2):
        ranks.run(_written_in_place, layout, precision, world_size=size)


def _refused_on_one_rank(layout: str) -> tuple[str, bool]:
    engine = sf.Engine(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), optimizer=torch.optim.SGD, layout=layout)
    before = engine.state_dict()
    state = {name: torch.full_like(value, 7.0) for name, value in before.items()}
    if engine.rank == 1:
        del state[next(iter(state))]
    said = "nothing"
    try:
        engine.load_state_dict(state)
    except sf.ShardfoldError as error:
        said = f"{type(error).__name__}: {error}"
    same = all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine.close()
    return said, same


@pytest.mark.parametrize("layout", ("ddp", "zero3"))
def test_a_state_dict_that_one_rank_refuses_all_refuse(ranks: Ranks, layout: str) -> None:
    """Nothing is changed on any rank, which would else train on with different weights."""
    for said, same in ranks.run(_refused_on_one_rank, layout, world_size=2):
        assert "missing" in said and same, said
