"""Folders in DeepSpeed's form are imported element by element, and the run goes on as if it had never left.

The folders are written here, as DeepSpeed 0.19 does, from a model that plain PyTorch trained.
``benchmarks/deepspeed_checkpoint.py`` has DeepSpeed itself write them.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.checkpoint import Checkpoint, import_from
from shardfold.errors import CheckpointError
from shardfold.numerics.scaling import LossScale, Scaler
from shardfold.testing import Ranks
from shardfold.tools import cli

VOCAB, WIDTH = 13, 5
MOMENTS = ("exp_avg", "exp_avg_sq")
SCHEDULE = partial(sf.optim.WarmupLR, warmup_num_steps=6, warmup_type="linear")
STEPS = 3  # before the checkpoint


class Net(nn.Module):
    """Sizes that no number of ranks divides, a tied head, a frozen table, two buffers."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.table = nn.Parameter(torch.randn(3, WIDTH), requires_grad=False)
        self.block = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((3, 1), 0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embedding(tokens[:, :-1]) + self.table * self.scale
        return F.cross_entropy(self.head(self.norm(x + self.block(x))).flatten(0, 1), tokens[:, 1:].flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 0.01},
    ]


def batch(step: int, rank: int = 0, ranks: int = 1) -> Tensor:
    rows = torch.randint(VOCAB, (4, 4), generator=torch.Generator().manual_seed(step))
    return rows.chunk(ranks)[rank]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, first: int, steps: int) -> list[float]:
    losses: list[float] = []
    for step in range(first, first + steps):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


class Run:
    """A run that plain PyTorch trained for some steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(groups(self.model), lr=0.02)
        self.schedule = SCHEDULE(self.optimizer)
        train(self.model, self.optimizer, self.schedule, 0, STEPS)

    def groups(self) -> list[dict[str, nn.Parameter]]:
        """The parameters of each group, by name."""
        name = {id(p): n for n, p in self.model.named_parameters()}
        return [{name[id(p)]: p for p in group["params"]} for group in self.optimizer.param_groups]

    def values(self, parameter: nn.Parameter, state: str) -> Tensor:
        return parameter.detach() if state == "weight" else self.optimizer.state[parameter][state]


# -- as DeepSpeed writes it


class TheirScaler:
    """Stands for DeepSpeed's loss scaler, of which only attributes are pickled."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.__dict__.update(said)


class TheirStage(int):
    """Stands for DeepSpeed's enum of stages, whose objects are pickled as a call."""

    def __reduce__(self) -> Any:
        return type(self), (int(self),)


@contextmanager
def installed() -> Iterator[None]:
    """Meanwhile both are found where DeepSpeed has its own; after it there is no such module."""
    homes = {TheirScaler: "deepspeed.runtime.fp16.loss_scaler", TheirStage: "deepspeed.runtime.zero.config"}
    with pytest.MonkeyPatch.context() as patch:
        for kind, home in homes.items():
            for end in [*(i for i, letter in enumerate(home) if letter == "."), len(home)]:
                patch.setitem(sys.modules, home[:end], ModuleType(home[:end]))
            patch.setattr(kind, "__module__", home)
            setattr(sys.modules[home], kind.__name__, kind)
        yield


def padded(values: Tensor, multiple: int) -> Tensor:
    return F.pad(values, (0, -values.numel() % multiple))


def flats_of(run: Run, stage: int, ranks: int, state: str, gap: int) -> list[list[Tensor]]:
    """By rank and group."""
    found: list[list[Tensor]] = [[] for _ in range(ranks)]
    for group in run.groups():
        values = [run.values(parameter, state).reshape(-1) for parameter in group.values()]
        if stage == 3:
            parts = [torch.cat(each) for each in zip(*(padded(v, ranks).chunk(ranks) for v in values), strict=True)]
        else:
            spaced = [padded(v, gap) for v in values[:-1]] + values[-1:]
            parts = list(padded(torch.cat(spaced), 2 * ranks).chunk(ranks))
        for rank, part in enumerate(parts):
            found[rank].append(part.clone())
    return found


def save(
    run: Run, root: Path, stage: int, ranks: int, *, form: str = "", gap: int = 1, narrow: bool = False,
    scaler: dict[str, Any] | None = None, client: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Writes the folder; ``form``: ``"bf16_optimizer"`` or ``"elastic"``, two other forms of stages 1 and 2."""
    folder = root / f"global_step{STEPS}"
    folder.mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    dtype = torch.bfloat16 if narrow else torch.float32
    model, named = run.model, run.groups()
    flats = {state: flats_of(run, stage, ranks, state, gap) for state in ("weight", *MOMENTS)}
    used = [sum(p.numel() + -p.numel() % gap for p in g.values()) - -[*g.values()][-1].numel() % gap for g in named]
    options = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
    said: dict[str, Any] = {"loss_scaler": TheirScaler(scaler or {"cur_scale": 1.0, "dynamic": False})}
    prefix = "bf16_" if narrow else ""
    for rank in range(ranks):
        weights = [nn.Parameter(flat) for flat in flats["weight"][rank]]
        states = [
            {"step": torch.tensor(float(STEPS)), **{name: flats[name][rank][g] for name in MOMENTS}} for g in (0, 1)
        ]
        inner = {
            "state": dict(enumerate(states)),
            "param_groups": [{**o, "params": [g]} for g, o in enumerate(options)],
        }
        if stage == 3:
            for number, flat in enumerate(weights):
                flat.ds_id = f"{number}_7"  # type: ignore[attr-defined]  # kept in the pickle, as DeepSpeed's are
            kept = {**said, "zero_stage": TheirStage(3), "partition_count": ranks, "optimizer_state_dict": inner}
            kept["fp32_flat_groups"] = weights
        else:
            lean = [  # without what pads the last ranks
                flat.detach()[: max(0, n - rank * flat.numel())] for flat, n in zip(weights, used, strict=True)
            ]
            kept = {**said, "zero_stage": TheirStage(stage), "partition_count": [ranks, ranks], "clip_grad": 0.5}
            kept |= {"single_partition_of_fp32_groups": lean, "base_optimizer_state": inner}
            if gap > 1:
                kept["param_alignment_paddings"] = [[-p.numel() % gap for p in [*g.values()][:-1]] + [0] for g in named]
            if form == "elastic":
                kept["base_optimizer_state"] = [
                    {n: s[n][: flat.numel()] for n in MOMENTS} for s, flat in zip(states, lean, strict=True)
                ]
                kept["base_optimizer_state_step"] = STEPS
            if form == "bf16_optimizer":
                del kept["zero_stage"], kept["loss_scaler"]
                kept["single_partition_of_fp32_groups"] = weights
        with installed():
            torch.save(
                {"optimizer_state_dict": kept, "ds_config": {}, "ds_version": "0.19.8"},
                folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
    module = {name: value.detach().clone() for name, value in model.state_dict().items()}
    module = {name: v.to(dtype) if v.is_floating_point() else v for name, v in module.items()}
    common: dict[str, Any] = {
        "buffer_names": ["calls", "scale"],
        "optimizer": None,
        "param_shapes": [{name: p.shape for name, p in group.items()} for group in named],
        "shared_params": {"head.weight": "embedding.weight"},
        "frozen_param_shapes": None, "frozen_param_fragments": None,
        "lr_scheduler": {"last_batch_iteration": STEPS - 1},
        "skipped_steps": 2, "global_steps": STEPS + 2, "global_samples": 4 * STEPS,
        "dp_world_size": ranks, "mp_world_size": 1,
        "ds_config": {
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}}, "bf16": {"enabled": narrow},
            "gradient_clipping": 0.5,
        },
        "ds_version": "0.19.8",
        **(client or {}),
    }  # fmt: skip
    if stage < 3:
        if stage == 2:
            common |= {"frozen_param_shapes": {"table": module["table"].shape}}
            common |= {"frozen_param_fragments": {"table": module["table"]}}
        torch.save({"module": module, **common}, folder / "mp_rank_00_model_states.pt")
        return root
    parts = padded(module["table"].reshape(-1), ranks).chunk(ranks)
    placeholders = {n: v if n in common["buffer_names"] else v.new_empty(0) for n, v in module.items()}
    common["frozen_param_shapes"] = {"table": module["table"].shape}
    for rank in range(ranks):
        common["frozen_param_fragments"] = {"table": parts[rank].clone()}
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        torch.save({"module": placeholders, **common}, path)
    return root


# -- every element


CASES = [
    *(pytest.param(stage, ranks, {}, id=f"zero{stage}-{ranks}") for stage in (1, 2, 3) for ranks in (1, 2, 3, 7)),
    *(pytest.param(stage, 2, {"narrow": True}, id=f"zero{stage}-bf16") for stage in (1, 2, 3)),
    pytest.param(2, 3, {"gap": 4}, id="zero2-aligned"),
    pytest.param(1, 2, {"form": "bf16_optimizer", "narrow": True}, id="bf16-optimizer"),
    pytest.param(2, 3, {"form": "elastic"}, id="elastic"),
]


@pytest.mark.sampled(18)
@pytest.mark.parametrize("stage, ranks, options", CASES)
def test_every_element_of_weights_and_moments(tmp_path: Path, stage: int, ranks: int, options: dict[str, Any]):
    """fp32 weights and both moments are bitwise those of the run, whatever the stage, the ranks and the padding."""
    run = Run()
    report = import_from(save(run, tmp_path / "ds", stage, ranks, **options), tmp_path / "new")
    assert report.source == "deepspeed" and report.optimizer
    with Checkpoint(tmp_path / "new") as checkpoint:
        for name, parameter in (each for group in run.groups() for each in group.items()):
            for state in ("weight", *MOMENTS):
                kept = checkpoint.read(name, state)
                assert kept.dtype == torch.float32
                assert torch.equal(kept.view(parameter.shape), run.values(parameter, state)), (name, state)
            assert checkpoint.once(name) == {"step": STEPS}
        dtype = torch.bfloat16 if options.get("narrow") else torch.float32
        assert torch.equal(checkpoint.parameter("table"), run.model.table.to(dtype))
        assert torch.equal(checkpoint.buffer("scale"), run.model.state_dict()["scale"].to(dtype))
        assert checkpoint.buffer("calls").item() == STEPS
        assert [name for name, p in checkpoint.parameters.items() if not p.trainable] == ["table"]
        assert checkpoint.parameters["embedding.weight"].also == ("head.weight",)
        assert list(checkpoint.parameters) == [name for name, _ in run.model.named_parameters()]


def test_the_rest_of_the_run(tmp_path: Path):
    """Options of groups, updates done, the schedule, the user's own state; and what the engine needs is said."""
    run = Run()
    client = {"epoch": 4, "history": [1.5, (2, None)], "order": torch.arange(20)}
    report = import_from(save(run, tmp_path / "ds", 2, 2, client=client), tmp_path / "new")
    with Checkpoint(tmp_path / "new") as checkpoint:
        (first, named), (second, others) = checkpoint.groups()
        assert named == list(run.groups()[0]) and others == list(run.groups()[1])
        assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
        assert [first["lr"], second["lr"]] == run.schedule.get_last_lr()
        assert not {"fused", "foreach", "capturable", "params"} & set(first)
        assert checkpoint.index.step == STEPS  # without the two that were skipped
        assert checkpoint.run()["schedule"]["last_epoch"] == run.schedule.last_epoch
        other = sf.optim.warmup_cosine(warmup=2, total=10)(run.optimizer)
        other.load_state_dict(checkpoint.run()["schedule"])
        assert other.last_epoch == STEPS
        assert checkpoint.run()["loss_scale"] is None
        state = checkpoint.run()["state"]
        assert state["epoch"] == 4 and state["history"] == [1.5, (2, None)] and state["global_samples"] == 12
        assert torch.equal(state["order"], torch.arange(20))
    assert report.notes == [
        "To go on in the same way the engine needs clip_norm=0.5; lr_schedule=partial(WarmupLR, warmup_num_steps=6)."
    ]


@pytest.mark.parametrize(
    "kind, params, ours", [("Adam", {}, "AdamW"), ("Adam", {"adam_w_mode": False}, "Adam"), ("AdamW", {}, "AdamW")]
)
def test_which_optimizer_it_was(tmp_path: Path, kind: str, params: dict[str, Any], ours: str):
    """DeepSpeed's Adam is AdamW unless told not to be; what PyTorch's do not do is said."""
    source = save(Run(), tmp_path / "ds", 2, 1, client={"ds_config": {"optimizer": {"type": kind, "params": params}}})
    path = source / f"global_step{STEPS}" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    base = "base_optimizer_state"
    changed(path, lambda said: said["optimizer_state_dict"][base]["param_groups"][1].update(bias_correction=False))
    report = import_from(source, tmp_path / "new")
    assert report.notes[0] == "The optimizer ran with bias_correction=False, which those of PyTorch do not have."
    assert f"the engine needs optimizer=torch.optim.{ours}; clip_norm=0.5" in report.notes[1]


def continued(path: Path, layout: str, steps: int) -> list[float]:
    model = Net()
    engine = sf.Engine(model, optimizer=torch.optim.AdamW(groups(model), lr=0.02), layout=layout, lr_schedule=SCHEDULE)
    notes = engine.load(path).notes
    assert notes[1:] == [], notes  # but for random numbers
    assert engine.steps == STEPS
    losses: list[float] = []
    for step in range(STEPS, STEPS + steps):
        loss = engine(batch(step, engine.rank, engine.world_size))
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(loss.detach()))
    assert model.calls.item() == STEPS + steps
    engine.close()
    return losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage, layout, world_size", [(2, "zero3", 2), (3, "zero1", 1), (3, "zero2", 4)])
def test_the_run_goes_on(ranks: Ranks, tmp_path: Path, stage: int, layout: str, world_size: int):
    """Losses under any layout and number of ranks are those of the run had it gone on in plain PyTorch."""
    run = Run()
    import_from(save(run, tmp_path / "ds", stage, 3), tmp_path / "new")
    expected = train(run.model, run.optimizer, run.schedule, STEPS, 4)
    (losses, *_) = ranks.run(continued, tmp_path / "new", layout, 4, world_size=world_size)
    assert losses == pytest.approx(expected, rel=1e-5)


# -- the loss scale


class TheirScale:
    """DeepSpeed's rule, as its documentation has it, with ``hysteresis`` 1."""

    def __init__(self, window: int) -> None:
        self.said: dict[str, Any] = {"cur_scale": 2.0**10, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0}
        self.said |= {"scale_window": window, "min_scale": 1, "delayed_shift": 1, "cur_hysteresis": 1, "dynamic": True}

    def update(self, overflowed: bool) -> float:
        said = self.said
        if overflowed:
            said["cur_scale"] = max(said["cur_scale"] / 2, 1)
            said["last_overflow_iter"] = said["cur_iter"]
        else:
            good = said["cur_iter"] - said["last_overflow_iter"] - 1
            if good > 0 and good % said["scale_window"] == 0:
                said["cur_scale"] *= 2
        said["cur_iter"] += 1
        return said["cur_scale"]


@pytest.mark.parametrize("overflows, steps", [((), 0), ((), 1), ((), 5), ((), 6), ((2,), 3), ((2,), 9), ((0, 8), 13)])
def test_the_loss_scale_grows_when_it_would_have(tmp_path: Path, overflows: tuple[int, ...], steps: int):
    """After the import it doubles at the same updates as DeepSpeed's."""
    theirs = TheirScale(window=5)
    for step in range(steps):
        theirs.update(step in overflows)
    path = import_from(save(Run(), tmp_path / "ds", 2, 2, scaler=theirs.said), tmp_path / "new").path
    ours = Scaler(LossScale())
    with Checkpoint(path) as checkpoint:
        ours.load_state_dict(checkpoint.run()["loss_scale"])
    assert ours.skipped == 2
    for _ in range(17):
        assert ours.scale == theirs.said["cur_scale"]
        theirs.update(False)
        ours.update(False)
    assert ours.scale > 2.0**10


def test_a_static_loss_scale_stays(tmp_path: Path):
    path = import_from(save(Run(), tmp_path / "ds", 2, 2, scaler={"cur_scale": 128.0}), tmp_path / "new").path
    ours = Scaler(LossScale())
    with Checkpoint(path) as checkpoint:
        ours.load_state_dict(checkpoint.run()["loss_scale"])
    for overflowed in (False, True, False):
        ours.update(overflowed)
    assert ours.scale == 128.0


# -- what is in the files


class Mischief:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_nothing_that_is_pickled_runs(tmp_path: Path):
    """Objects of the user's own are left out, and said to be; unpickling them does nothing."""
    marker = tmp_path / "marker"
    source = save(Run(), tmp_path / "ds", 2, 1, client={"mischief": Mischief(marker), "epoch": 3})
    report = import_from(source, tmp_path / "new")
    assert not marker.exists()
    assert report.notes[0] == "Left out of the user's state, being objects: mischief."
    with Checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint.run()["state"]["epoch"] == 3


@pytest.mark.parametrize("stage", [2, 3])
def test_extra_state_of_modules(tmp_path: Path, stage: int):
    """Plain values and tensors come along, under new names too; objects are left out and named; none is a parameter."""
    run = Run()
    source = save(run, tmp_path / "ds", stage, 2)
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    counted = Counter("aab")
    extra = {
        "block._extra_state": {
            "seen": 3,
            "raw": b"\xff\0",
            "none": b"",
            "scale": torch.ones(20),
            "of": np.float64(0.5),
        },
        "norm._extra_state": bytearray(b"abc"),
        "embedding._extra_state": torch.arange(30, dtype=torch.uint8),
        "block.0._extra_state": counted,
    }
    strange = {"block.1._extra_state": {"its": TheirScaler({})}, "norm.kind": "rms"}
    changed(source / f"global_step{STEPS}" / name, lambda said: said["module"].update({**extra, **strange}))
    report = import_from(source, tmp_path / "new", rename={"^block": "layers"})
    assert report.notes[0] == (
        "Left out of the model, being neither tensors nor plain extra state of modules: block.1._extra_state (dict), "
        "norm.kind (str)."
    )
    with Checkpoint(tmp_path / "new") as checkpoint:
        assert not [name for name in (*checkpoint.parameters, *checkpoint.buffers) if "extra" in name]
        kept = checkpoint.extra()
    first = kept.pop("layers._extra_state")
    assert torch.equal(first.pop("scale"), torch.ones(20))
    assert first == {"seen": 3, "raw": b"\xff\0", "none": b"", "of": 0.5}
    assert kept.pop("embedding._extra_state").tolist() == list(range(30))
    assert kept == {"norm._extra_state": b"abc", "layers.0._extra_state": dict(counted)}


def test_import_renames(tmp_path: Path):
    source = save(Run(), tmp_path / "ds", 2, 2)
    import_from(source, tmp_path / "new", rename={"^block": "layers"})
    with Checkpoint(tmp_path / "new") as checkpoint:
        assert "layers.0.weight" in checkpoint.parameters and "block.0.weight" not in checkpoint.parameters
        assert "layers.0.weight" in checkpoint.groups()[0][1]


def test_import_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The form is found out, and a folder of one step is as good as that of the run."""
    source = save(Run(), tmp_path / "ds", 3, 2)
    for number, path in enumerate((source, source / f"global_step{STEPS}")):
        with pytest.raises(SystemExit) as end:
            cli.main(["ckpt", "import", str(path), str(tmp_path / f"new/{number}")])
        assert not end.value.code
        assert "from deepspeed" in capsys.readouterr().out
        assert Checkpoint(tmp_path / f"new/{number}").index.step == STEPS


# -- what does not fit


def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    with installed():
        said = torch.load(path, weights_only=False)
        change(said)
        torch.save(said, path)


def removed(folder: Path) -> None:
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def cut_short(folder: Path) -> None:
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-300])


def of_more_ranks(folder: Path) -> None:
    changed(folder / "mp_rank_00_model_states.pt", lambda said: said.update(dp_world_size=3))


def of_other_weights(folder: Path) -> None:
    changed(folder / "mp_rank_00_model_states.pt", lambda said: said["module"]["block.0.weight"].mul_(1.1))


def of_other_shapes(folder: Path) -> None:
    changed(folder / "mp_rank_00_model_states.pt", lambda said: said["param_shapes"][0].popitem())


def twice(folder: Path) -> None:
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(folder / name, folder / f"bf16_{name}")


def tensor_parallel(folder: Path) -> None:
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(folder / name, folder / name.replace("mp_rank_00", "mp_rank_01"))


def with_experts(folder: Path) -> None:
    (folder / "layer_0_expert_0_mp_rank_00_model_states.pt").touch()


def without_zero(folder: Path) -> None:
    for path in folder.glob("*optim_states.pt"):
        path.unlink()


def without_model(folder: Path) -> None:
    (folder / "mp_rank_00_model_states.pt").unlink()


ERRORS = {
    removed: r"written by 2 ranks and has optimizer files of 1: those of 1 are missing\.",
    cut_short: r"rank_1_mp_rank_00_optim_states.pt is damaged, cut short or no file of torch.save \(",
    of_more_ranks: r"is of a run on 3 ranks and the optimizer's files are of one that cut its state for 2: ",
    of_other_weights: r"the fp32 weights of block.0.weight are not those that its model's file has in torch.float32: ",
    of_other_shapes: r"flat 0 has \[68, 67\] elements on the ranks, which is not how ZeRO 1 cuts its 2 parameters: ",
    twice: r"has two optimizer files of rank 0 .*: remove the one of the older run\.",
    tensor_parallel: r"is of a run with tensor or pipeline parallelism, which is not read\.",
    with_experts: r"is of a model with experts, which is not read\.",
    without_zero: r"has no \*_optim_states.pt: it is of a run without ZeRO, or not all of it is there; ",
    without_model: r"mp_rank_00_model_states.pt is missing\.",
}


@pytest.mark.parametrize("damage", ERRORS, ids=lambda damage: damage.__name__)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, damage: Callable[[Path], None]):
    """It says which file or parameter, and nothing is left at the target."""
    source = save(Run(), tmp_path / "ds", 1, 2)
    damage(source / f"global_step{STEPS}")
    with pytest.raises(CheckpointError, match=ERRORS[damage]) as error:
        import_from(source, tmp_path / "new/0", "deepspeed")
    assert len(re.findall(r"[.] [A-Z]", str(error.value))) == 0
    assert not [path for path in tmp_path.glob("new/*") if path.name != "latest"]


def test_loading_such_a_folder_names_the_command(tmp_path: Path):
    source = save(Run(), tmp_path / "ds", 2, 2)
    for path in (source, source / f"global_step{STEPS}"):
        with pytest.raises(CheckpointError, match=r"of DeepSpeed: `shardfold ckpt import .* NEW`"):
            Checkpoint(path)


def test_the_run_of_deepspeed_is_left_as_it_is(tmp_path: Path):
    """A checkpoint beside DeepSpeed's would take ``latest`` from it."""
    source = save(Run(), tmp_path / "ds", 2, 2)
    with pytest.raises(CheckpointError, match="whose 'latest' is DeepSpeed's: choose another folder"):
        import_from(source / f"global_step{STEPS}", source / "step-3")
    with pytest.raises(CheckpointError, match=r"is inside of .*, which is read: nothing was written"):
        import_from(source, source / "step-3")
    assert (source / "latest").read_text() == f"global_step{STEPS}"
