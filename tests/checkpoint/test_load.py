"""Any checkpoint loads on any layout and number of ranks, element for element; and what else a load does and leaves."""

from __future__ import annotations

import logging
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.checkpoint import save
from shardfold.errors import CheckpointError, ShardfoldError, UsageError
from shardfold.testing import Ranks
from tests.support import saving
from tests.support.changing import add_low_rank, half_frozen, unfreeze
from tests.support.keeping import SETTINGS, Odd, Setting, adamw, contents, covering, different, make, run_matrix, train
from tests.support.resuming import Case, Plain

ZERO3 = Setting("zero3", 2)


def test_what_one_layout_saves_every_other_loads(ranks: Ranks, tmp_path: Path) -> None:
    """The first of the cover, each pair the one with the most values that are new together; the soak has all."""
    pairs = covering(SETTINGS)
    run_matrix(ranks, tmp_path, pairs[: len(pairs) // 20])


@pytest.mark.soak
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_all_pairs(ranks: Ranks, tmp_path: Path, saved: int, count: int) -> None:
    precision = ("fp32", "bf16", "fp16")[(saved + count) % 3]
    every = [setting for setting in SETTINGS if setting.precision == precision]
    run_matrix(ranks, tmp_path, [(a, b) for a in every for b in every if (a.ranks, b.ranks) == (saved, count)])


# -- read without an engine ------------------------------------------------------------------------------------------


def _read(folder: str, setting: Setting) -> None:
    engine = make(setting)
    average = sf.Average(engine, 0.9)
    train(engine, 2)
    engine.save(folder, wait=True, latest=False, state={"epoch": 3}, rank_state={"rank": engine.rank})
    kept, averaged = contents(engine), average.state_dict()
    engine.close()
    with sf.Checkpoint(folder) as checkpoint:
        found = {name: checkpoint.parameter(name) for name in kept["weight"] if name not in ("seen", "mean")}
        if engine.rank == 0:  # whose buffers are saved
            found |= {name: checkpoint.buffer(name) for name in checkpoint.buffers}
        assert not different(found, kept["weight"])
        assert checkpoint.parameters["embedding.weight"].also == ("head.weight",)
        assert list(checkpoint.buffers) == ["seen", "mean"]  # ``scratch`` is not persistent
        for name, step in kept["steps"].items():
            assert checkpoint.once(name) == {"step": step}
            for state in ("exp_avg", "exp_avg_sq"):
                expected = kept[state][name].reshape(-1)
                assert torch.equal(checkpoint.read(name, state), expected)
                a, b = len(expected) // 3, len(expected) // 2
                assert torch.equal(checkpoint.read(name, state, a, b), expected[a:b])
            assert torch.equal(checkpoint.read(name, "average"), averaged[f"module.{name}"].reshape(-1).float())
        assert kept["steps"]["norm.weight"] == 2 and kept["steps"]["unused.weight"] == 0
        assert checkpoint.states("blocks.0.0.weight") == ["weight"]  # frozen
        assert checkpoint.run()["state"] == {"epoch": 3}
        assert [checkpoint.rank(r)["state"] for r in range(setting.ranks)] == [
            {"rank": r} for r in range(setting.ranks)
        ]
        weights = [p for p in checkpoint.index.pieces if p.kind == "element" and p.state == "weight"]
        assert sum(p.numel for p in weights) == sum(p.numel for p in checkpoint.parameters.values())  # tied ones once


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", [Setting("hsdp", 4), Setting("hpz", 3, "bf16")], ids=lambda s: s.name)
def test_everything_is_read_without_an_engine(ranks: Ranks, tmp_path: Path, setting: Setting) -> None:
    ranks.run(_read, str(tmp_path / "a"), setting, world_size=setting.ranks)


# -- other precisions and optimizers ---------------------------------------------------------------------------------


def _precisions(folder: str) -> None:
    for saved, loaded in (("fp32", "bf16-pure"), ("bf16-pure", "fp32"), ("bf16", "bf16-pure"), ("fp32", "fp16")):
        for kind in (_adam, _adagrad):
            before = make(ZERO3._replace(precision=saved), Plain, optimizer=kind)
            train(before, 2)
            path = f"{folder}/{saved}-{loaded}-{kind.__name__}"
            before.save(path, wait=True, latest=False)
            old = contents(before)
            before.close()
            after = make(Setting("zero1", 2, loaded), Plain, seed=1, optimizer=kind)
            after.load(path)
            new = contents(after)
            for state in ("weight", "sum") if kind is _adagrad else ("weight", "master", "exp_avg", "exp_avg_sq"):
                assert old[state].keys() == new[state].keys()
                for name, value in old[state].items():
                    target = new[state][name]
                    expected = torch.bfloat16 if loaded == "bf16-pure" else torch.float32
                    assert target.dtype == expected, (state, name, target.dtype)
                    assert torch.equal(target, value.to(target.dtype)), (saved, loaded, state, name)
            train(after, 2)  # no dtypes are mixed
            after.close()


_adam = torch.optim.AdamW
_adagrad = torch.optim.Adagrad


@pytest.mark.soak
def test_another_precision_takes_the_same_values_rounded_to_its_dtypes(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_precisions, str(tmp_path), world_size=2)


def _parts(folder: str) -> None:
    rules = {"head": "fp32", "blocks.0": "bf16-pure", "*": "bf16"}
    kept: dict[str, Any] = {}
    for number, (layout, precision) in enumerate([("zero3", rules), ("zero1", rules), ("fsdp2", "fp32")]):
        torch.manual_seed(number)
        engine = sf.Engine(Plain(), optimizer=torch.optim.AdamW, layout=layout, precision=precision)
        train(engine, 2 - number)
        if number == 0:
            engine.save(folder, wait=True)
            kept = contents(engine)
            assert kept["master"]["blocks.0.0.weight"].dtype == torch.bfloat16
        else:
            engine.load(folder)
            found = contents(engine)
            for state in ("weight", "master", "exp_avg", "exp_avg_sq"):
                for name, value in found[state].items():
                    assert value.dtype == (kept[state][name].dtype if precision is rules else torch.float32)
                    assert torch.equal(value, kept[state][name].to(value.dtype)), (layout, state, name)
            train(engine, 1)
        engine.close()


def test_a_model_whose_parts_have_their_own_precision(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_parts, str(tmp_path / "a"), world_size=2)


def _eight_bits(folder: str) -> None:
    narrow = Case(Plain, "AdamW8bit").engine(ZERO3)
    train(narrow, 3)
    narrow.save(f"{folder}/narrow", wait=True, latest=False)
    codes = contents(narrow)
    narrow.close()
    wide = Case(Plain, "adamw").engine(Setting("zero1", 2), seed=1)
    report = wide.load(f"{folder}/narrow", strict=False)  # the groups are others
    assert "Group 0" in "".join(report.notes)
    values = contents(wide)
    assert not different(
        {k: values[k] for k in ("exp_avg", "exp_avg_sq")}, {k: codes[k] for k in ("exp_avg", "exp_avg_sq")}
    )
    assert set(values["steps"].values()) == {0, 3}
    train(wide, 2)
    wide.save(f"{folder}/wide", wait=True, latest=False)
    values = contents(wide)
    wide.close()
    again = Case(Plain, "AdamW8bit").engine(ZERO3, seed=1)
    again.load(f"{folder}/wide", strict=False)
    for name, value in contents(again)["exp_avg"].items():
        largest = values["exp_avg"][name].abs().max()
        assert (value - values["exp_avg"][name]).abs().max() <= largest / 20, name
        assert bool(value.any()) == bool(values["exp_avg"][name].any()), name
    train(again, 1)
    again.close()


@pytest.mark.soak
def test_moments_in_8_bits_become_wide_ones_and_back(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_eight_bits, str(tmp_path), world_size=2)


# -- what a load leaves ----------------------------------------------------------------------------------------------


def _nothing_of_before(folder: str, optimizer: str) -> None:
    """A checkpoint from before the first step, into an engine that has trained: its states are of no run any more."""
    first = Case(Odd, optimizer).engine(ZERO3)
    sf.Average(first, 0.5)
    first.save(f"{folder}/first", wait=True)
    train(first, 1)
    first.save(f"{folder}/second", wait=True)
    train(first, 3)
    expected = contents(first), first.sharded.run.averages[0].state_dict()
    first.load(f"{folder}/first")
    assert first.steps == 0
    train(first, 4)
    assert not different((contents(first), first.sharded.run.averages[0].state_dict()), expected)
    first.load(f"{folder}/second")
    first.load(f"{folder}/second")  # twice is once
    train(first, 3)
    assert not different((contents(first), first.sharded.run.averages[0].state_dict()), expected)
    first.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", ["adamw", "Adagrad", "LAMB"])
def test_nothing_is_left_of_the_run_before(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    ranks.run(_nothing_of_before, str(tmp_path), optimizer, world_size=2)


def _averages(folder: str) -> None:
    without = make(ZERO3)
    train(without, 2)
    without.save(f"{folder}/none", wait=True, latest=False)
    without.close()
    engine = make(Setting("zero1", 2), seed=1)
    average = sf.Average(engine, 0.5)
    train(engine, 2)
    notes = engine.load(f"{folder}/none").notes
    assert any("0 averages" in note for note in notes), notes
    assert average.updates == 0
    found = average.state_dict()
    for name, value in engine.state_dict().items():
        assert torch.equal(
            found[f"module.{name}"].double(), value.float().double() if value.is_floating_point() else value
        )
    engine.close()


def test_an_average_that_was_not_saved_begins_with_what_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_averages, str(tmp_path), world_size=2)


def _same_again(folder: str) -> None:
    for optimizer in ("adamw", "amsgrad", "AdamW8bit", "Muon"):
        build = Plain if optimizer in ("AdamW8bit", "Muon") else Odd
        engine = Case(build, optimizer).engine(ZERO3)
        train(engine, 2)
        engine.save(f"{folder}/{optimizer}/one", wait=True)
        engine.close()
        engine = Case(build, optimizer).engine(Setting("ddp", 2), seed=1)
        engine.load(f"{folder}/{optimizer}/one")
        engine.save(f"{folder}/{optimizer}/two", wait=True)
        engine.close()
        one, two = sf.Checkpoint(f"{folder}/{optimizer}/one"), sf.Checkpoint(f"{folder}/{optimizer}/two")
        for field in ("step", "parameters", "buffers", "once", "run", "ranks"):
            assert getattr(one.index, field) == getattr(two.index, field), field
        assert one.groups() == two.groups()
        for name in one.parameters:
            assert one.states(name) == two.states(name)
            states = {s for n, s in one._by_state if n == name}  # also the codes and scales of 8 bits
            assert all(torch.equal(one.read(name, s), two.read(name, s)) for s in states if not s.endswith("_scales"))
            assert not different(one.once(name), two.once(name))
        one.close()
        two.close()


@pytest.mark.soak
def test_loaded_and_saved_is_the_same_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_same_again, str(tmp_path), world_size=2)


def _after_forward(folder: str, layout: str) -> None:
    engine = make(Setting(layout, 2))
    train(engine, 1)
    engine.save(folder, wait=True)
    batch = torch.arange(10).view(2, 5), torch.arange(10).view(2, 5)
    with torch.no_grad():
        engine.module.eval()
        expected = engine(*batch)
        engine.module.train()
    train(engine, 2)
    loss = engine(*batch)  # whatever it keeps gathered until its backward
    engine.load(folder)
    with torch.no_grad():
        engine.module.eval()
        assert torch.equal(engine(*batch), expected)
    with pytest.raises((RuntimeError, ShardfoldError)):
        loss.backward()  # its weights are gone, so it must not pretend
    engine.reset()
    engine.module.train()
    train(engine, 1)
    engine.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["zero1", "zero3", "hpz"])
def test_the_next_forward_reads_what_was_loaded(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    ranks.run(_after_forward, str(tmp_path / "a"), layout, world_size=2)


def _while_saving(folder: str) -> None:
    """The file of rank 0 is held back until somebody waits for the save."""
    engine = sf.Engine(nn.Linear(4, 4), optimizer=partial(torch.optim.SGD, lr=0.1), layout="zero2")
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.step()
    waited, write, finish = threading.Event(), save.write_file, engine.saver.finish

    def held(*args: Any) -> Any:
        waited.wait()
        return write(*args)

    def waits() -> None:
        waited.set()
        finish()

    save.write_file = held
    try:
        saving = engine.save(f"{folder}/a")
        engine.saver.finish = waits
        assert engine.load(f"{folder}/a").step == 1
        assert saving is not None and saving.done
    finally:
        save.write_file, engine.saver.finish = write, finish
        waited.set()
    engine.close()


def test_a_save_of_this_engine_is_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    """A load of what the engine still saves finds it."""
    ranks.run(_while_saving, str(tmp_path), world_size=2)


# -- structures that changed -----------------------------------------------------------------------------------------


def _unfrozen(folder: str) -> None:
    """Unfrozen during training: saved, loaded elsewhere into a model that was unfrozen too, trained on."""
    from tests.support.changing import OPTIMIZERS
    from tests.support.changing import train as run

    def begun(layout: str) -> sf.Engine:
        torch.manual_seed(0)
        return sf.Engine(half_frozen(), optimizer=OPTIMIZERS["AdamW"], layout=layout)

    engine = begun("zero3")
    run(engine, 2)
    engine.save(f"{folder}/frozen", wait=True)
    unfreeze(engine.module)
    run(engine, 3, seed=1)
    engine.save(f"{folder}/unfrozen", wait=True)
    kept = contents(engine)
    run(engine, 3, seed=2)
    expected = contents(engine)
    engine.close()

    other = begun("zero3")
    unfreeze(other.module)
    other.load(f"{folder}/unfrozen")
    assert not different(contents(other), kept)
    run(other, 3, seed=2)
    assert not different(contents(other), expected)
    other.close()

    late = begun("zero1")
    notes = late.load(f"{folder}/unfrozen").notes
    assert any("frozen here" in note and "embedding.weight" in note for note in notes), notes
    notes = late.load(f"{folder}/frozen").notes
    assert not any("frozen here" in note for note in notes), notes
    unfreeze(late.module)
    notes = late.load(f"{folder}/frozen").notes
    assert any("Not trained when saved" in note and "embedding.weight" in note for note in notes), notes
    run(late, 3, seed=1)
    steps = contents(late)["steps"]
    assert steps["embedding.weight"] == 3 and steps["head.weight"] == 5
    assert abs(late.steps - 5) == 0
    late.close()


@pytest.mark.soak
def test_unfreezing_survives_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_unfrozen, str(tmp_path), world_size=2)


def _adapters(folder: str) -> None:
    from tests.support.changing import OPTIMIZERS, Growing
    from tests.support.changing import train as run

    torch.manual_seed(0)
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"], layout="zero3")
    run(engine, 2)
    engine.save(f"{folder}/plain", wait=True)
    kept = contents(engine)
    add_low_rank(engine.module)
    run(engine, 2)
    engine.save(f"{folder}/wrapped", wait=True)
    wrapped = contents(engine)
    # A checkpoint from before the change, by its new names: what was added keeps its values.
    with pytest.raises(CheckpointError, match=r"missing: .*blocks\.0\.up\.base\.weight"):
        engine.load(f"{folder}/plain")
    renames = {r"^(blocks\.\d+\.(up|down))\.": r"\1.base.", r"^head\.": "head.base."}
    with pytest.raises(CheckpointError, match=r"missing: .*head\.down\.weight, head\.up\.weight; rename="):
        engine.load(f"{folder}/plain", rename=renames)
    report = engine.load(f"{folder}/plain", rename=renames, strict=False)
    assert len(report.missing) == 2 * 7 and not report.unexpected
    found = contents(engine)
    assert torch.equal(found["weight"]["blocks.0.up.base.weight"], kept["weight"]["blocks.0.up.weight"])
    assert torch.equal(found["exp_avg"]["head.base.weight"], kept["exp_avg"]["head.weight"])
    assert torch.equal(found["weight"]["head.up.weight"], wrapped["weight"]["head.up.weight"])
    engine.load(f"{folder}/wrapped")
    assert not different(contents(engine), wrapped)
    engine.close()


@pytest.mark.soak
def test_adapters_that_came_since_keep_their_values(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_adapters, str(tmp_path), world_size=2)


def _meta(folder: str) -> None:
    engine = make(ZERO3)
    train(engine, 2)
    engine.save(folder, wait=True)
    kept = contents(engine)
    engine.close()
    with sf.meta_init():
        model = Odd()
    later = sf.Engine(model, optimizer=adamw(model), layout="zero2", init=sf.Init(seed=5))
    later.load(folder)
    assert not different(contents(later), kept)
    later.close()


def test_a_model_built_without_memory_takes_it(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_meta, str(tmp_path / "a"), world_size=2)


# -- refusals --------------------------------------------------------------------------------------------------------


class Other(Plain):
    """Of ``Plain``: one name fewer, one more, one of another shape, one of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(5, 4)
        self.blocks[1][0] = nn.Linear(13, 29, bias=False)
        self.extra = nn.Linear(2, 2)


def _refused(engine: sf.Engine, path: str, **options: Any) -> str:
    """The message of a load that changes nothing."""
    before = contents(engine) if engine.optimizer is not None else engine.state_dict()
    with pytest.raises(ShardfoldError) as caught:
        engine.load(path, **options)
    after = contents(engine) if engine.optimizer is not None else engine.state_dict()
    assert not different(after, before) and not engine.sharded.run.broken
    return str(caught.value)


def _refusals(folder: str) -> None:
    engine = Case(Plain).engine(ZERO3)
    train(engine, 2)
    engine.save(f"{folder}/a", wait=True, state={"sampler": 1})
    train(engine, 1)
    writer = sf.Engine(Plain(), optimizer=torch.optim.AdamW, layout="zero3")
    train(writer, 1)
    writer.save(f"{folder}/one", wait=True)
    writer.close()

    said = _refused(Case(Other).engine(Setting("zero1", 2)), f"{folder}/a")
    assert "missing: extra.bias, extra.weight;" in said and "unexpected: blocks.1.0.bias;" in said
    assert "unused.weight is 3x5 in the checkpoint and 4x5 in the model" in said and "unused.bias is 3 " in said
    assert "nothing was changed" in said.lower()

    for name, words in {
        "SGD": "was written with AdamW and the engine has SGD: it has no 'momentum_buffer' of",
        "Lion": "Lion has no use for 'exp_avg_sq'",
        "Adagrad": "has no state of Adagrad of",
        "amsgrad": "and the engine has AdamW(amsgrad=True): it has no 'max_exp_avg_sq' of",
        "Adafactor": "Adafactor has no use for 'exp_avg'; Adafactor has no use for 'exp_avg_sq'",
    }.items():
        other = Case(Plain, name).engine(ZERO3, seed=1)
        train(other, 1)
        said = _refused(other, f"{folder}/a" if name == "amsgrad" else f"{folder}/one")  # of the same groups
        assert words in said and "weights_only=True" in said, said
        kept = other.load(f"{folder}/a", weights_only=True)
        assert any("optimizer" in note and "stay" in note for note in kept.notes) and other.steps == 1
        train(other, 1)
        other.close()

    said = _refused(Case(Plain, "LAMB").engine(ZERO3), f"{folder}/a")
    assert "in other groups (group 0 of the engine has parameters of groups 0 and 1 there)" in said
    for arguments, words in (
        ({"rename": {"(": ""}}, "is not a pattern"),
        ({"rename": lambda name: name.replace("blocks.0", "blocks.1")}, "the same name"),
        ({"rename": {"^head": "tail"}}, "missing: head.bias, head.weight; unexpected: head.bias, head.weight"),
        ({"state": {"loader": nn.Identity()}}, "no state of loader; it has sampler"),
        # On one rank only: the others are told.
        ({"state": {"loader": nn.ReLU()} if engine.rank else {}}, "rank 1: " + f"{folder}/a has no state of loader"),
        ({"rename": _raises if engine.rank else None}, "rank 1: KeyError: 'a mistake'"),
    ):
        said = _refused(engine, f"{folder}/a", **arguments)
        assert words in said, said
    engine.close()


def _raises(name: str) -> str:
    raise KeyError("a mistake")


@pytest.mark.soak
def test_what_does_not_fit_is_refused_on_all_ranks_and_nothing_changed(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_refusals, str(tmp_path), world_size=2)


def _no_optimizer(folder: str) -> None:
    torch.manual_seed(0)
    frozen = sf.Engine(Plain(), layout="zero3")
    frozen.save(f"{folder}/frozen", wait=True, latest=False)
    expected = frozen.state_dict()
    trained = Case(Plain).engine(Setting("zero2", 2), seed=1)
    assert "no state of an optimizer: load it with weights_only=True" in _refused(trained, f"{folder}/frozen")
    trained.load(f"{folder}/frozen", weights_only=True)
    assert not different(trained.state_dict(), expected)
    train(trained, 1)
    trained.save(f"{folder}/trained", wait=True, latest=False)
    assert frozen.load(f"{folder}/trained").step == 1
    assert not different(frozen.state_dict(), trained.state_dict())
    for engine in (frozen, trained):
        engine.close()


def test_engines_without_an_optimizer_save_and_load(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_no_optimizer, str(tmp_path), world_size=2)


def _damaged(folder: str) -> None:
    engine = make(ZERO3)
    train(engine, 2)
    engine.save(f"{folder}/good/a", wait=True)
    kept = contents(engine)
    file = Path(f"{folder}/bad/a/rank-00001-of-00002.safetensors")
    if engine.rank == 0:
        shutil.copytree(f"{folder}/good/a", f"{folder}/bad/a")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    engine.max_over_ranks([0.0])
    mine = f"{folder}/{'bad' if engine.rank else 'good'}/a"  # as where hosts have copies of their own
    with pytest.raises(CheckpointError, match=r"rank 1: .* is damaged: bytes .* load another checkpoint"):
        engine.load(mine)
    engine.backward(engine(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)))
    for call in (engine.step, lambda: engine.save(f"{folder}/no")):
        with pytest.raises(UsageError, match="failed half-way: load a checkpoint before going on"):
            call()
    engine.load(f"{folder}/good/a", weights_only=True)
    engine.backward(engine(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)))
    with pytest.raises(UsageError, match="failed half-way"):  # weights are right again, moments may not be
        engine.step()
    engine.load(f"{folder}/good/a")
    assert not different(contents(engine), kept)
    train(engine, 1)
    with pytest.raises(CheckpointError, match=r"ranks do not find the same checkpoint .* rank 1: .*no checkpoint"):
        engine.load(f"{folder}/good/a" if engine.rank == 0 else f"{folder}/none/a")
    train(engine, 1)
    engine.close()


def test_what_one_rank_can_not_read_all_ranks_refuse(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_damaged, str(tmp_path), world_size=2)


def in_fp16(root: str) -> tuple[list[str], list[str]]:
    """Saves in bf16 and in fp32, loads in fp16 and in bf16; what is logged, and what the reports note."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("shardfold").addHandler(handler)
    for precision in ("bf16", "fp32"):
        engine = saving.engine(precision=precision)
        saving.train(engine)
        engine.save(f"{root}/{precision}", wait=True, latest=False)
        engine.close()
    notes: list[str] = []
    for precision, saved in (("fp16", "bf16"), ("fp16", "fp32"), ("bf16", "bf16"), ("fp32", "bf16")):
        engine = saving.engine(precision=precision)
        notes.append(" ".join(engine.load(f"{root}/{saved}").notes))
        engine.close()
    logging.getLogger("shardfold").removeHandler(handler)
    return logged, notes


def test_a_run_in_bf16_that_goes_on_in_fp16_is_warned_of(ranks: Ranks, tmp_path: Path) -> None:
    """Once, by rank 0, with what to do; no other change of precision is."""
    for rank, (logged, notes) in enumerate(ranks.run(in_fp16, str(tmp_path), world_size=2)):
        assert len(logged) == (rank == 0) and all("go on with precision='bf16'" in text for text in logged)
        assert ["trained in bf16 and goes on in fp16" in note for note in notes] == [True, False, False, False]


def test_weights_only_leaves_the_optimizer_as_it_is(tmp_path: Path) -> None:
    """Parameters are the checkpoint's; moments and counts stay those of the engine, also where it has the same kind of
    optimizer, so that all of its state would fit."""
    writer, reader = Case(Plain).engine(ZERO3, seed=0), Case(Plain).engine(ZERO3, seed=1)
    train(writer, 2)
    writer.save(tmp_path / "a", wait=True)
    train(reader, 1)
    with reader.gathered(of="exp_avg") as moments:
        before = {name: value.clone() for name, value in moments.items()}
    reader.load(tmp_path / "a", weights_only=True)
    with reader.gathered(of="exp_avg") as moments:
        assert all(torch.equal(value, before[name]) for name, value in moments.items())
    wanted = writer.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in reader.state_dict().items())
    assert reader.steps == 1
    writer.close()
    reader.close()


def test_a_longer_schedule_acts_from_the_first_step(tmp_path: Path) -> None:
    """One of functions of the step is that of the run that goes on; one of numbers is the checkpoint's, and a note says
    so."""

    def rates(total: int, steps: int, root: Path | None = None, save: bool = False, **numbers: int) -> list[float]:
        make = partial(sf.optim.WarmupDecayLR, warmup_num_steps=2, **numbers) if numbers else None
        engine = saving.engine("ddp", lr_schedule=make or sf.optim.warmup_cosine(warmup=1, total=total))
        if root is not None and not save:
            noted.extend(engine.load(root).notes)
        found = [engine.lr_schedule.get_last_lr()[0]]
        for _ in range(steps):
            saving.train(engine)
            found.append(engine.optimizer.param_groups[0]["lr"])
        if root is not None and save:
            engine.save(root / "step", wait=True)
        engine.close()
        return found

    noted: list[str] = []
    rates(3, 3, tmp_path / "a", save=True)
    assert rates(6, 2, tmp_path / "a") == rates(6, 5)[3:]
    assert not any("schedule" in note for note in noted)
    rates(0, 2, tmp_path / "b", save=True, total_num_steps=3)
    rates(0, 1, tmp_path / "b", total_num_steps=9)
    assert any("goes on with the checkpoint's total_num_steps=3 (not 9)" in note for note in noted)
