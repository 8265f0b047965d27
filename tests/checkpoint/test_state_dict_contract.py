"""What a module's own code makes of its state dict holds for an engine's: hooks, overrides, versions, extra state.

Expected values are plain PyTorch's, of the same module beside it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.checkpoint._export import export_to
from shardfold.checkpoint.imports import import_from
from shardfold.checkpoint.inspect import inspect
from shardfold.compat import deepspeed
from shardfold.errors import CheckpointError, ModelError
from shardfold.testing import Ranks

SGD = partial(torch.optim.SGD, lr=0.1)


class Halved(nn.Linear):
    """Its state dict has half of its weight since version 2."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_state_dict_post_hook(lambda m, d, p, _: d.__setitem__(p + "weight", d[p + "weight"] / 2))

    def _load_from_state_dict(self, d: Any, p: str, meta: Any, *rest: Any) -> None:
        if meta.get("version", 1) >= 2:
            d[p + "weight"] = d[p + "weight"] * 2
        super()._load_from_state_dict(d, p, meta, *rest)


class Packed(nn.Linear):
    """Its state dict has one tensor in place of two, and says what its weight sums up to."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = torch.cat([self.weight.detach().view(-1), self.bias.detach()])

    def _load_from_state_dict(self, d: Any, p: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(d[p + "packed"][:16].view(4, 4))
            self.bias.data.copy_(d[p + "packed"][16:])  # which PyTorch counts as no change


class Hooked(nn.LayerNorm):
    """Pre-hooks count in a buffer and rename; a hook behind loading doubles what was loaded, and looks at it."""

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("saves", torch.zeros(()))
        self.register_state_dict_pre_hook(lambda m, prefix, keep: m.saves.add_(1))
        self.register_load_state_dict_pre_hook(self._renamed)
        self.register_load_state_dict_post_hook(self._doubled)

    @staticmethod
    def _renamed(module: nn.Module, d: Any, prefix: str, *rest: Any) -> None:
        if prefix + "gamma" in d:
            d[prefix + "weight"] = d.pop(prefix + "gamma")

    @staticmethod
    def _doubled(module: Any, keys: Any) -> None:
        with torch.no_grad():
            module.bias.add_(module.weight)


class Counting(nn.Linear):
    """Extra state of numbers and a tensor, which is this rank's."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen, self.scales = 0, torch.zeros(20)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        self.scales += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "scales": self.scales, "of": ("a", None)}

    def set_extra_state(self, state: Any) -> None:
        assert state["of"] == ("a", None)
        self.seen, self.scales = state["seen"], state["scales"]


class Net(nn.Module):
    """Every kind of them, a tied weight and plain layers between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halved, self.packed, self.hooked, self.counting = Halved(), Packed(), Hooked(), Counting()
        self.norm, self.first, self.last = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.norm(self.counting(self.hooked(self.packed(self.halved(x)))))))


def live(module: nn.Module) -> dict[str, Tensor]:
    """What a module computes with, whatever its state dict says."""
    return {n: t.detach().clone() for n, t in (*module.named_parameters(), *module.named_buffers())}


def apart(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    assert list(mine) == list(theirs)
    return [name for name, value in theirs.items() if isinstance(value, Tensor) and not torch.equal(mine[name], value)]


def moved(module: nn.Module) -> nn.Module:
    """With other values than it was made with."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.add_(number + 1)
    return module


def both_ways(layout: str) -> None:
    engine, plain = sf.Engine(Net(), optimizer=SGD, layout=layout), Net()
    mine, theirs = engine.state_dict(), plain.state_dict()
    assert apart(mine, theirs) == [] and mine._metadata == theirs._metadata  # type: ignore[attr-defined]
    assert mine["last.weight"].data_ptr() == mine["first.weight"].data_ptr() and mine["hooked.saves"] == 1
    assert engine.module.hooked.saves == 1  # what a hook writes into a buffer is written
    other = moved(Net())
    other.load_state_dict(mine)
    plain.load_state_dict(theirs)
    assert apart(live(other), live(plain)) == []
    wanted = moved(Net())
    given = wanted.state_dict()
    versions = given._metadata
    given = {name.replace("hooked.weight", "hooked.gamma"): value for name, value in given.items()}
    given.pop("norm.num_batches_tracked")
    old = type(versions)({**versions, "norm": {"version": 1}})
    for target in (engine, plain):
        state = type(mine)(given)
        state._metadata = old  # type: ignore[attr-defined]
        target.load_state_dict(state)
    with engine.gathered():
        assert apart(live(engine.module), live(plain)) == []
    engine.backward(engine(torch.randn(4, 4)).sum())
    engine.step()
    engine.close()


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_plain_module_takes_an_engines_state_and_the_other_way_round(ranks: Ranks, layout: str) -> None:
    ranks.run(both_ways, layout, world_size=2)


def stays_without_a_load() -> None:
    """A state that does not fit changes nothing; strict=False takes what fits."""
    engine = sf.Engine(nn.Sequential(Counting(), nn.BatchNorm1d(4)), optimizer=SGD, layout="zero3")
    before = engine.state_dict()
    wrong = {name: torch.full_like(v, 7.0) if isinstance(v, Tensor) else v for name, v in before.items()}
    short = {name: value for name, value in wrong.items() if name not in ("0._extra_state", "0.bias")}
    with pytest.raises(ModelError, match=r"missing 0\._extra_state, 0\.bias; unexpected nothing; pass strict=False"):
        engine.load_state_dict(short)
    with pytest.raises(ModelError, match=r"gives '0.weight' the shape \(3,\), but the model's is \(4, 4\)"):
        engine.load_state_dict({**wrong, "0.weight": torch.ones(3)})
    assert apart(engine.state_dict(), before) == []
    engine.load_state_dict(short, strict=False)
    after = engine.state_dict()
    assert torch.equal(after["0.bias"], before["0.bias"]) and bool((after["0.weight"] == 7).all())
    engine.close()


def test_what_does_not_fit_changes_nothing(ranks: Ranks) -> None:
    ranks.run(stays_without_a_load, world_size=2)


class Reading(nn.Module):
    """A hook of the root reads a frozen part's weight."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.base.requires_grad_(False)
        self.register_state_dict_post_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


def refused_hooks() -> None:
    def read(module: Any, d: Any, *rest: Any) -> None:
        d["norm"] = module.base.weight.norm().item()

    def write(module: Any, *rest: Any) -> None:
        module.head.weight.data.zero_()
        with torch.no_grad():
            module.head.bias.zero_()

    engine = sf.Engine(Reading(read), optimizer=SGD, layout="zero3")
    state = engine.state_dict()
    assert state["norm"] == pytest.approx(state["base.weight"].norm().item())
    with pytest.raises(ModelError, match=r"a hook of the model's state dict failed .* frozen ones that were left out"):
        engine.state_dict(frozen="skip")
    engine.close()
    engine = sf.Engine(Reading(write), optimizer=SGD, layout="zero3")
    with pytest.raises(ModelError, match=r"a hook of the model's state dict wrote into 'head\.bias': it may read"):
        engine.state_dict()
    engine.close()


def test_hooks_that_need_or_write_what_they_cannot_are_refused(ranks: Ranks) -> None:
    ranks.run(refused_hooks, world_size=2)


# -- checkpoints


def saved_by_one_layout(folder: str) -> None:
    engine = sf.Engine(Net(), optimizer=SGD, layout="zero3")
    engine.backward(engine(torch.ones(3 + dist.get_rank(), 4)).sum())
    engine.step()
    saving = engine.save(folder)  # in the background: extra state goes on to change
    engine.module.counting.scales += 5
    saving.wait()
    wanted = live_of(engine)
    engine.close()
    engine = sf.Engine(moved(Net()), optimizer=SGD, layout="ddp")
    assert engine.load(folder).notes == []
    assert engine.module.counting.seen == 3  # rank 0's
    assert torch.equal(engine.module.counting.scales, torch.ones(20))
    assert apart(live_of(engine), wanted) == []
    engine.module.counting.seen = 0
    engine.load(folder, weights_only=True)
    assert engine.module.counting.seen == 3
    engine.close()


def live_of(engine: Any) -> dict[str, Tensor]:
    with engine.gathered():
        return live(engine.module)


def test_checkpoints_have_extra_state_and_values_as_the_model_has_them(ranks: Ranks, tmp_path: Path) -> None:
    """No hook runs on what is saved: values are the parameters' own, and so are those of a model that takes them."""
    folder = tmp_path / "a"
    ranks.run(saved_by_one_layout, str(folder), world_size=2)
    plain = sf.load_model(folder, moved(Net()))
    assert isinstance(plain.counting, Counting) and plain.counting.seen == 3
    assert torch.equal(plain.counting.scales, torch.ones(20))
    assert "counting._extra_state" in inspect(folder).run["extra state"]
    export_to(folder, tmp_path / "x.pt", "torch")
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    assert state["counting._extra_state"]["seen"] == 3 and state["counting._extra_state"]["of"] == ("a", None)
    assert torch.equal(state["counting._extra_state"]["scales"], torch.ones(20))
    assert torch.equal(state["halved.weight"], plain.halved.weight)
    import_from(tmp_path / "x.pt", tmp_path / "back")
    again = sf.load_model(tmp_path / "back", moved(Net()))
    assert isinstance(again.counting, Counting) and again.counting.seen == 3
    assert torch.equal(again.counting.scales, torch.ones(20)) and apart(live(again), live(plain)) == []


def test_an_export_says_what_it_has_no_place_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = sf.Engine(Counting(), optimizer=SGD)
    engine.save(tmp_path / "a", wait=True)
    engine.close()
    with caplog.at_level(logging.WARNING, "shardfold"):
        export_to(tmp_path / "a", tmp_path / "b", "hf")
    assert "has extra state of modules (_extra_state), which 'hf' files have no place for" in caplog.text


def test_extra_state_that_only_a_pickle_holds_is_not_saved(tmp_path: Path) -> None:
    class Strange(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": {1, 2}}

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError("nothing was saved")

    engine = sf.Engine(nn.Sequential(Strange(2, 2)), optimizer=SGD)
    with pytest.raises(
        CheckpointError, match=r"extra state\['0._extra_state'\]\['seen'\] is a set, which a checkpoint"
    ):
        engine.save(tmp_path / "a", wait=True)
    assert engine.state_dict()["0._extra_state"] == {"seen": {1, 2}}  # which is memory only
    engine.close()


def test_extra_state_is_found_missing_unexpected_and_renamed(tmp_path: Path) -> None:
    engine = sf.Engine(nn.Sequential(Counting(), nn.Linear(4, 4)), optimizer=SGD)
    engine.module[0].seen = 7
    engine.save(tmp_path / "a", wait=True)
    engine.close()
    for model, what in (
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "unexpected: 0._extra_state"),
        (nn.Sequential(nn.Linear(4, 4), Counting()), "missing: 1._extra_state; unexpected: 0._extra_state"),
    ):
        engine = sf.Engine(model, optimizer=SGD)
        with pytest.raises(CheckpointError, match=what):
            engine.load(tmp_path / "a")
        with pytest.raises(CheckpointError, match=what.replace("0.", "0.")):
            sf.load_model(tmp_path / "a", model)
        engine.load(tmp_path / "a", strict=False)
        engine.close()
    engine = sf.Engine(nn.ModuleDict({"x": Counting(), "y": nn.Linear(4, 4)}), optimizer=SGD)
    engine.load(tmp_path / "a", rename={r"^0\.": "x.", r"^1\.": "y."})
    assert engine.module["x"].seen == 7
    engine.close()


def test_checkpoints_of_before_have_no_extra_state(tmp_path: Path) -> None:
    """The module's own stays, and a note says so."""
    from shardfold.checkpoint.folders import INDEX
    from shardfold.checkpoint.index import Index

    engine = sf.Engine(Counting(), optimizer=SGD)
    engine.save(tmp_path / "a", wait=True)
    index = Index.from_bytes((tmp_path / "a" / INDEX).read_bytes(), "a")
    del index.run["extra"]
    (tmp_path / "a" / INDEX).write_bytes(index.to_bytes())
    engine.module.seen = 4
    assert engine.load(tmp_path / "a").notes == ["The checkpoint has no extra state of modules: _extra_state stay."]
    assert engine.module.seen == 4
    index.run["extra"] = [1]
    (tmp_path / "a" / INDEX).write_bytes(index.to_bytes())
    with pytest.raises(CheckpointError, match="is damaged: its extra state of modules is not an object"):
        engine.load(tmp_path / "a")
    engine.close()
    assert json.loads((tmp_path / "a" / INDEX).read_text())["run"]["extra"] == [1]


# -- stages


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = Counting(), Halved(), Counting()

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


def over_stages(folder: str) -> None:
    def made() -> Any:
        return sf.Engine(Stages(), optimizer=SGD, parallel=sf.Parallel(mesh={"pipeline": 2}, stages=["second"]))

    engine, plain = made(), Stages()
    mine, theirs = engine.state_dict(), plain.state_dict()
    assert apart(mine, {name: theirs[name] for name in mine}) == [] and mine.keys() == theirs.keys()
    assert mine._metadata == theirs._metadata  # type: ignore[attr-defined]
    given = moved(Stages())
    given.first.seen, given.third.seen = 5, 6
    engine.load_state_dict(given.state_dict())
    state = engine.state_dict()
    assert apart(state, {name: given.state_dict()[name] for name in state}) == []
    assert (state["first._extra_state"]["seen"], state["third._extra_state"]["seen"]) == (5, 6)
    engine.save(folder, wait=True)
    engine.close()
    engine = made()
    assert engine.load(folder).notes == []
    state = engine.state_dict()
    assert (state["first._extra_state"]["seen"], state["third._extra_state"]["seen"]) == (5, 6)
    engine.close()
    model = Stages()
    model.register_state_dict_post_hook(lambda m, d, *rest: d.__setitem__("sum", d["first.bias"] + d["third.bias"]))
    engine = sf.Engine(model, optimizer=SGD, parallel=sf.Parallel(mesh={"pipeline": 2}, stages=["second"]))
    with pytest.raises(ModelError, match=r"a hook of the model's state dict failed .*or those of other stages"):
        engine.state_dict()
    engine.close()


def test_every_stage_tells_of_its_modules(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(over_stages, str(tmp_path / "a"), world_size=2)


# -- DeepSpeed's interface


def by_deepspeeds_calls() -> None:
    model, plain = Net(), Net()
    config = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }  # fmt: skip
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    mine, theirs = engine.module_state_dict(prefix="a."), plain.state_dict(prefix="a.")
    assert apart(mine, theirs) == [] and mine._metadata == theirs._metadata
    given = moved(Net()).state_dict()
    plain.load_state_dict(given)
    engine.load_module_state_dict({"module": given})
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        assert apart(live(model), live(plain)) == []
    engine.destroy()


def test_deepspeeds_module_state_dict_is_the_modules_own(ranks: Ranks) -> None:
    ranks.run(by_deepspeeds_calls, world_size=2)
