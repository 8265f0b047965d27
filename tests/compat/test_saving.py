"""``save_checkpoint`` and ``load_checkpoint`` over our checkpoints, and the fp32 weights that others read from them."""

from __future__ import annotations

import os
import pickle
import stat
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.compat.deepspeed.engine import DeepSpeedEngine
from shardfold.compat.deepspeed.initialize import initialize
from shardfold.compat.deepspeed.utils import zero_to_fp32
from shardfold.compat.finder import VERSION
from shardfold.errors import CheckpointError, ConfigError
from shardfold.testing import Ranks
from tests.checkpoint.test_deepspeed import STEPS as THEIR_STEPS
from tests.checkpoint.test_deepspeed import Net, Run
from tests.checkpoint.test_deepspeed import batch as their_batch
from tests.checkpoint.test_deepspeed import groups as their_groups
from tests.checkpoint.test_deepspeed import save as save_as_theirs
from tests.checkpoint.test_deepspeed import train as train_theirs
from tests.support.deepspeed_training import ROWS, adamw, batch, build, config, loss_of, near, weights

OWN = (
    "global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size", "ds_version", "ds_config",
    "buffer_names",
)  # fmt: skip
FIRST, MORE = 3, 2  # steps before and behind the checkpoint
BATCH = 2 * ROWS
SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_num_steps": 10, "warmup_min_lr": 0.002, "warmup_max_lr": 0.02, "warmup_type": "linear"},
}
CLIENT: dict[str, Any] = {
    "epoch": 4, "order": torch.arange(20), "pair": (1, None), "args": Namespace(name="run", sizes=[1, 2]),
}  # fmt: skip


def settings(stage: int, **more: Any) -> dict[str, Any]:
    """The same global batch on any number of ranks."""
    both = config(stage, optimizer=adamw(), scheduler=SCHEDULE, **more)
    del both["train_micro_batch_size_per_gpu"]
    return {**both, "train_batch_size": BATCH}


def start(stage: int, model: nn.Module | None = None, **more: Any) -> DeepSpeedEngine:
    return initialize(model=model or build(), config=settings(stage, **more))[0]


def train(engine: DeepSpeedEngine, first: int, steps: int) -> list[float]:
    rows = BATCH // engine.world_size
    losses: list[float] = []
    for step in range(first, first + steps):
        whole = torch.cat([batch(step, 0, rank) for rank in range(2)])
        loss = loss_of(engine, whole[engine.global_rank * rows : (engine.global_rank + 1) * rows])
        engine.backward(loss)
        engine.step()
        losses.append(engine._core.mean(loss.detach()))
    return losses


def users(client: dict[str, Any] | None, steps: int, samples: int) -> dict[str, Any]:
    """What the user kept, behind what DeepSpeed's interface adds."""
    assert client is not None
    own = {name: client[name] for name in OWN}
    assert (own["global_steps"], own["global_samples"], own["skipped_steps"]) == (steps, samples, 0)
    assert own["ds_version"] == VERSION and own["buffer_names"] == []
    assert own["ds_config"]["optimizer"] == adamw() and own["mp_world_size"] == 1
    return {name: value for name, value in client.items() if name not in OWN}


def kept(engine: DeepSpeedEngine) -> tuple[Any, ...]:
    return engine.global_steps, engine.global_samples, engine.skipped_steps, engine.get_lr(), engine.was_step_applied()


# -- across stages and numbers of ranks


def write(folder: str, stage: int) -> tuple[list[float], list[float], tuple[Any, ...]]:
    engine = start(stage)
    assert engine.load_checkpoint(folder) == (None, None)
    losses = train(engine, 0, FIRST)
    assert engine.save_checkpoint(folder, client_state=CLIENT) is True
    state = kept(engine)
    more = train(engine, FIRST, MORE)
    engine.destroy()
    return losses, more, state


def go_on(folder: str, stage: int) -> tuple[list[float], tuple[Any, ...]]:
    engine = start(stage)
    path, client = engine.load_checkpoint(folder)
    assert path == f"{folder}/global_step{FIRST}" and client is not None
    client = users(client, FIRST, FIRST * BATCH)
    assert torch.equal(client.pop("order"), CLIENT["order"]) and client == {
        key: value for key, value in CLIENT.items() if key != "order"
    }
    assert engine.loaded_checkpoint_dp_world_size == 2
    state = kept(engine)
    losses = train(engine, FIRST, MORE)
    engine.destroy()
    return losses, state


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_of_any_stage_loads_at_any_other(ranks: Ranks, tmp_path: Path, stage: int):
    """On two ranks and on one: losses, counters, rates and the client's own state are those of the run that wrote."""
    _, more, state = ranks.run(write, str(tmp_path), stage, world_size=2)[0]
    assert (tmp_path / "latest").read_text().strip() == f"global_step{FIRST}"
    assert {path.name for path in tmp_path.iterdir()} == {"latest", f"global_step{FIRST}", "zero_to_fp32.py"}
    for other, world_size in ((3 - stage, 2), ((stage + 1) % 4, 1)):
        losses, found = ranks.run(go_on, str(tmp_path), other, world_size=world_size)[0]
        near(losses, more)
        assert found[:3] == state[:3] == (FIRST, FIRST * BATCH, 0) and found[3] == pytest.approx(state[3])


def inside_a_step(folder: str, stage: int) -> None:
    def step(engine: DeepSpeedEngine, first: int) -> list[Tensor]:
        for number in range(2):
            engine.backward(loss_of(engine, batch(first + number, 0, engine.global_rank)))
            engine.step()
        return weights(engine)

    engine = initialize(model=build(), config=config(stage, accumulate=2, optimizer=adamw()))[0]
    engine.save_checkpoint(folder)
    wanted = step(engine, 0)
    engine.load_checkpoint(folder)
    engine.backward(loss_of(engine, batch(7, 0, engine.global_rank)))
    engine.step()  # of the first micro-batch
    engine.load_checkpoint(folder)
    assert engine.micro_steps == 2 and not engine.is_gradient_accumulation_boundary()
    assert all(torch.equal(a, b) for a, b in zip(step(engine, 0), wanted, strict=True))
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_loaded_inside_a_step_begins_one(ranks: Ranks, tmp_path: Path, stage: int):
    """Its gradients are dropped, and its micro-batches with them."""
    ranks.run(inside_a_step, str(tmp_path), stage, world_size=2)


# -- what is loaded


def parts(folder: str) -> None:
    engine = start(2)
    train(engine, 0, FIRST)
    engine.save_checkpoint(folder, tag="a", client_state={"x": 1})
    saved, rate = weights(engine), engine.get_lr()
    train(engine, FIRST, MORE)
    engine.save_checkpoint(folder, "b", {}, False)
    assert (Path(folder) / "latest").read_text().strip() == "a"
    last = weights(engine)
    ahead = train(engine, FIRST + MORE, 1)

    def at(wanted: list[Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(weights(engine), wanted, strict=True))

    random = torch.get_rng_state()
    path, client = engine.load_checkpoint(folder)  # in place, of a live engine
    assert path == f"{folder}/a" and client is not None and client["x"] == 1 and at(saved) and engine.get_lr() == rate
    assert engine.global_steps == FIRST and torch.equal(torch.get_rng_state(), random)
    steps = FIRST + MORE
    assert users(engine.load_checkpoint(folder, tag="b")[1], steps, steps * BATCH) == {} and at(last)
    near(train(engine, FIRST + MORE, 1), ahead)

    moments = [kept["exp_avg"].clone() for kept in engine.optimizer.state.values()]  # type: ignore[union-attr]
    engine.load_checkpoint(folder, load_module_only=True)
    assert at(saved) and engine.global_steps == FIRST + MORE + 1
    engine.load_checkpoint(folder, "b", load_optimizer_states=False)
    assert at(last) and engine.global_steps == FIRST + MORE
    now = [kept["exp_avg"] for kept in engine.optimizer.state.values()]  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(now, moments, strict=True))
    before = engine.lr_scheduler.state_dict()
    engine.load_checkpoint(folder, "a", load_lr_scheduler_states=False)
    assert engine.lr_scheduler.state_dict() == before and engine.global_steps == FIRST

    seen: list[str] = []

    def custom(src: dict[str, Tensor], dst: nn.Module) -> None:
        seen.extend(src)
        dst.load_state_dict({name: torch.ones_like(value) for name, value in src.items()})

    engine.load_checkpoint(folder, "b", custom_load_fn=custom)
    assert seen == list(engine.module.state_dict()) and at([torch.ones_like(w) for w in last])
    engine.destroy()

    wider = nn.Sequential(*build().children(), nn.Linear(3, 3))
    engine = start(3, wider)
    with pytest.raises(CheckpointError, match=r"missing.*5\.(bias|weight)"):
        engine.load_checkpoint(folder)
    engine.load_checkpoint(folder, load_module_strict=False, load_module_only=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), saved, strict=False))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*nothing"):
        engine.load_checkpoint(folder, tag="nothing")
    engine.load_module_state_dict({"module": {name: w * 0 for name, w in engine.module_state_dict().items()}})
    assert all(not w.any() for w in weights(engine))
    engine.destroy()

    inference = initialize(model=build(), config=config(3))[0]
    assert inference.load_checkpoint(folder)[0] == f"{folder}/a"
    assert all(torch.equal(a, b) for a, b in zip(weights(inference), saved, strict=True))
    inference.destroy()


@pytest.mark.soak
def test_what_is_loaded_can_be_chosen(ranks: Ranks, tmp_path: Path):
    """The model only, without the optimizer or the schedule, by a function of the user's, what fits; in place."""
    ranks.run(parts, str(tmp_path), world_size=2)


def tags(folder: str) -> None:
    for mode, kind in (("Fail", AssertionError), ("Warn", None), ("Ignore", None)):
        engine = start(1, checkpoint={"tag_validation": mode})
        train(engine, 0, 1)
        tag = f"{mode}{engine.global_rank}"
        if kind is not None:
            with pytest.raises(kind, match="not consistent across all ranks: Fail0, Fail1"):
                engine.save_checkpoint(folder, tag)
        else:
            engine.save_checkpoint(folder, tag)
            assert (Path(folder) / f"{mode}0").is_dir()
        for call in (lambda e=engine: e.save_checkpoint(""), lambda e=engine: e.save_checkpoint(folder, "a/b")):
            with pytest.raises(ConfigError):
                call()
        with pytest.raises(CheckpointError, match="ranks would load different tags: 'Warn0', 'Warn1'"):
            engine.load_checkpoint(folder, f"Warn{engine.global_rank}")
        engine.destroy()
    assert not (Path(folder) / "Fail0").exists()


def test_tags_that_differ_between_ranks(ranks: Ranks, tmp_path: Path):
    """Refused, or told and made one, as the config says."""
    ranks.run(tags, str(tmp_path), world_size=2)


# -- whole models


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.head, self.tied = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x)) + self.tied(x)


FROZEN = ["base.weight", "base.bias"]
TRAINED = ["head.weight", "head.bias", "tied.weight"]


def whole(folder: str, stage: int) -> dict[str, Tensor] | None:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    engine = start(stage, Frozen(), bf16={"enabled": True}, zero_optimization=zero)
    train(engine, 0, 1)
    state = engine.module_state_dict()
    assert sorted(state) == sorted([*FROZEN, *TRAINED, "scale"])
    assert all(value.dtype == torch.bfloat16 and value.numel() for value in state.values())
    assert "base.bias" not in engine.module_state_dict(exclude_frozen_parameters=True)
    assert engine.zero_gather_16bit_weights_on_model_save() is True
    if stage == 3:
        found = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        assert (found is None) is (engine.global_rank == 1)
        assert found is None or sorted(found) == sorted([*TRAINED, "scale"])
    else:
        with pytest.raises(ValueError, match="needs ZeRO stage 3"):
            engine._zero3_consolidated_16bit_state_dict()
    assert engine.save_16bit_model(f"{folder}/new") is True
    assert engine.save_fp16_model(folder, "other.bin") is True
    read = torch.load(f"{folder}/new/pytorch_model.bin")
    assert list(read) == list(torch.load(f"{folder}/other.bin")) and read["head.weight"] is not None
    assert all(torch.equal(read[name], value) for name, value in state.items())
    engine.save_checkpoint(folder, "all")
    engine.save_checkpoint(folder, "trained", exclude_frozen_parameters=True)
    full = engine._core.state_dict()
    engine.destroy()
    return full if engine.global_rank == 0 else None


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_models_and_their_fp32_weights(ranks: Ranks, tmp_path: Path, stage: int):
    """16-bit weights as one file; fp32 ones by DeepSpeed's tools, with ties, buffers and without what is frozen."""
    full = ranks.run(whole, str(tmp_path), stage, world_size=2)[0]
    assert full is not None
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="all")
    assert set(state) == set(full) and state["tied.weight"] is state["head.weight"]
    assert all(value.dtype == torch.float32 for value in state.values())
    assert all(torch.equal(value, full[name].float()) for name, value in state.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in state.values())  # masters
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "all", lazy_mode=True)
    assert lazy["head.weight"].shape == (3, 4) and torch.equal(lazy["head.weight"].contiguous(), state["head.weight"])
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Frozen(), str(tmp_path), "all")
    assert all(torch.equal(value, full[name].to(value.dtype)) for name, value in model.state_dict().items())

    only = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert sorted(only) == sorted([*TRAINED, "scale"])
    with pytest.raises(CheckpointError, match="exclude_frozen_parameters=True"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)

    script = tmp_path / "zero_to_fp32.py"
    assert script.stat().st_mode & stat.S_IXUSR and "zero_to_fp32 import main" in script.read_text()
    zero_to_fp32.main([str(tmp_path), str(tmp_path / "one"), "--tag", "all"])
    assert set(torch.load(tmp_path / "one" / "pytorch_model.bin")) == set(full)
    several = ["-t", "all", "--max_shard_size", "70B", "--safe_serialization"]
    zero_to_fp32.main([str(tmp_path), str(tmp_path / "many"), *several])
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    assert len(list((tmp_path / "many").glob("model-0000?-of-00003.safetensors"))) == 3
    with pytest.raises(ConfigError, match="'5 bits'"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "x", "5 bits", tag="all")
    with pytest.raises(FileNotFoundError, match="doesn't exist"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "absent")
    with pytest.raises(ValueError, match="Unable to find 'latest' file"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "one")

    optimizer = torch.load(zero_to_fp32.get_optim_files(tmp_path / "all")[0])
    assert optimizer["optimizer_state_dict"]["zero_stage"] == stage
    said = torch.load(zero_to_fp32.get_model_state_file(tmp_path / "all", stage))
    assert said["global_steps"] == 1 and said["dp_world_size"] == 2


def not_gathered(folder: str) -> None:
    engine = start(3)
    assert engine.zero_gather_16bit_weights_on_model_save() is False
    assert engine.save_16bit_model(folder) is False
    engine.destroy()


def test_the_16bit_model_of_stage_3_is_written_only_if_asked_for(ranks: Ranks, tmp_path: Path):
    ranks.run(not_gathered, str(tmp_path), world_size=2)
    assert not list(tmp_path.iterdir())


# -- others' checkpoints


def resume_theirs(folder: str, stage: int) -> tuple[list[float], tuple[Any, ...], dict[str, Any]]:
    model = Net()
    optimizer = torch.optim.AdamW(their_groups(model), lr=0.02)
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_type": "linear"}}
    both = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "gradient_clipping": 0, "scheduler": section}
    engine = initialize(model=model, optimizer=optimizer, config=both)[0]
    path, client = engine.load_checkpoint(folder)
    assert path == f"{folder}/global_step{THEIR_STEPS}" and client is not None
    state = (engine.global_steps, engine.skipped_steps, engine.global_samples)
    losses: list[float] = []
    for step in range(THEIR_STEPS, THEIR_STEPS + 2):
        loss = engine(their_batch(step, engine.global_rank, engine.world_size))
        engine.backward(loss)
        engine.step()
        losses.append(engine._core.mean(loss.detach()))
    engine.save_checkpoint(folder)
    engine.destroy()
    return losses, state, client


@pytest.mark.sampled(3)
@pytest.mark.parametrize("written, stage, world_size", [(1, 3, 2), (2, 0, 1), (3, 2, 2)])
def test_a_folder_that_deepspeed_wrote(ranks: Ranks, tmp_path: Path, written: int, stage: int, world_size: int):
    """The run goes on as it would have in plain PyTorch, and then keeps its checkpoints beside DeepSpeed's."""
    run, root = Run(), tmp_path / "run"
    save_as_theirs(run, root, written, 3, client={"epoch": 4})
    theirs = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(root)
    assert torch.equal(theirs["head.weight"], run.model.head.weight) and torch.equal(theirs["table"], run.model.table)
    folder = root / f"global_step{THEIR_STEPS}"
    assert len(zero_to_fp32.get_optim_files(folder)) == 3
    assert Path(zero_to_fp32.get_model_state_file(folder, written)).parent == folder
    losses, state, client = ranks.run(resume_theirs, str(root), stage, world_size=world_size)[0]
    near(losses, train_theirs(run.model, run.optimizer, run.schedule, THEIR_STEPS, 2))
    assert state == (THEIR_STEPS + 2, 2, 4 * THEIR_STEPS) and client["epoch"] == 4
    assert (root / "latest").read_text().strip() == f"global_step{THEIR_STEPS + 4}"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def full_precision(folder: str, groups: int) -> bool:
    """Whether rank 0, alone, reads the weights into the module that all ranks still train."""
    model = build()
    parameters: Any = list(model.parameters())
    if groups == 2:
        parameters = [{"params": parameters[:3], "weight_decay": 0.1}, {"params": parameters[3:]}]
    given = config(2, optimizer=adamw(), bf16={"enabled": True}) | {"zero_optimization": {"stage": 3}}
    engine = initialize(model=model, model_parameters=parameters, config=given)[0]
    engine.backward(loss_of(engine, batch(0, 0, engine.global_rank).bfloat16()))
    engine.step()
    engine.save_checkpoint(folder, tag="t")
    before = [p.detach().clone() for p in model.parameters()]
    if engine.global_rank == 0:
        zero_to_fp32.load_state_dict_from_zero_checkpoint(model, folder, tag="t")
    same = all(
        torch.allclose(a.float(), b.float(), rtol=2**-7) for a, b in zip(before, model.parameters(), strict=True)
    )
    engine._core.sharded.gate.meet("the test")
    engine.destroy()
    return same


@pytest.mark.parametrize(("world_size", "groups"), [(3, 2), pytest.param(4, 1, marks=pytest.mark.soak)])
def test_weights_in_fp32_are_read_into_a_model_of_stage_3(
    ranks: Ranks, tmp_path: Path, world_size: int, groups: int
) -> None:
    """Of one and two groups, on numbers of ranks that do not divide the parameters, all of which are small."""
    assert all(ranks.run(full_precision, str(tmp_path), groups, world_size=world_size))


def from_ours(folder: str) -> None:
    engine = sf.Engine(build(), optimizer=torch.optim.AdamW, layout="zero3")
    engine.backward(loss_of(engine, batch(0, 0, 0)))
    engine.step()
    engine.save(f"{folder}/mine", state={"epoch": 7}, wait=True)
    saved = engine.state_dict()
    engine.close()
    other = start(1)
    found, client = other.load_checkpoint(folder)
    assert client == {"epoch": 7, "global_steps": 1, "skipped_steps": 0}
    assert found == f"{folder}/mine" and other.global_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(weights(other), saved.values(), strict=True))
    with pytest.raises(Exception, match="cannot be copied or pickled"):
        pickle.dumps(other)
    other.destroy()


def test_a_checkpoint_that_our_engine_saved(ranks: Ranks, tmp_path: Path):
    ranks.run(from_ours, str(tmp_path), world_size=1)


def node_local(folder: str, stage: int, other: int) -> tuple[list[float], list[float], list[str], dict[str, Any]]:
    """Each rank is a node with a disk of its own; the run goes on at another stage."""
    mine = Path(folder, f"node{os.environ['RANK']}")
    torch.manual_seed(0)
    engine = start(stage, checkpoint={"use_node_local_storage": True})
    train(engine, 0, FIRST)
    engine.save_checkpoint(mine, "t", client_state={"epoch": 4})
    losses = train(engine, FIRST, MORE)
    engine.destroy()
    again = start(other, checkpoint={"use_node_local_storage": True})
    _, client = again.load_checkpoint(mine)
    resumed = train(again, FIRST, MORE)
    again.destroy()
    assert client is not None
    return losses, resumed, sorted(path.name for path in (mine / "t").iterdir()), client


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stage", "other"), [(3, 3), (2, 1)])
def test_nodes_keep_their_own_parts(ranks: Ranks, tmp_path: Path, stage: int, other: int) -> None:
    """With `use_node_local_storage` a node has the index and what its ranks wrote, and the run goes on from all."""
    for rank, (losses, resumed, files, client) in enumerate(
        ranks.run(node_local, str(tmp_path), stage, other, world_size=2)
    ):
        assert files == ["index.json", f"rank-0000{rank}-of-00002.safetensors"]
        assert users(client, FIRST, FIRST * BATCH) == {"epoch": 4}
        near(resumed, losses)
        assert (tmp_path / f"node{rank}" / "latest").read_text() == "t"
