"""What ``engine.save``, ``load`` and ``load_state_dict`` say of arguments that are none: one sentence, on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.errors import ConfigError, ModelError, ShardfoldError, UsageError
from shardfold.testing import Ranks

SGD = partial(torch.optim.SGD, lr=0.1)


class Odd:
    pass


def make(layout: str = "zero3") -> sf.Engine:
    torch.manual_seed(0)
    return sf.Engine(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), optimizer=SGD, layout=layout)


SAVE, LOAD = "engine.save(): ", "engine.load(): "
PATHS: dict[str, tuple[Any, str]] = {
    "None": (None, "the path is None: give the path of a checkpoint"),
    "a number": (3, "the path is 3: give the path of"),
    "bytes": (b"x", "the path is b'x'"),
    "a list": (["x"], "the path is ['x']"),
    "nothing": ("", "the path is empty"),
}
STATES: dict[str, tuple[dict[str, Any], str]] = {
    "a list": ({"state": [1]}, SAVE + "state= is [1]: give a dict"),
    "a number of each rank": ({"rank_state": 3}, SAVE + "rank_state= is 3: give a dict"),
    "names in an array": (
        {"state": {"o": np.array(["a"])}},
        "state['o'] is a ndarray of dtype <U1, which a checkpoint",
    ),
    "an object": ({"state": {"o": Odd()}}, "state['o'] is a Odd, which a checkpoint does not take"),
    "deep inside": ({"state": {"a": {"b.c": [1, (2, Odd())]}}}, "state['a']['b.c'][1][1] is a Odd"),
    "a key": ({"state": {"a": {Odd: 1}}}, f"the key <class '{__name__}.Odd'> of state['a'] is a type"),
    "of this rank": ({"rank_state": {"o": {"l": threading.Lock()}}}, "rank_state['o']['l'] is a lock"),
    "a sparse tensor": ({"state": {"o": [torch.eye(3).to_sparse()]}}, "state['o'][0] is a sparse tensor"),
    "a generator": (
        {"state": {"g": torch.Generator()}},
        "state['g'] is a torch.Generator, which a checkpoint does not",
    ),
    "of each rank": ({"rank_state": {"g": [torch.Generator()]}}, "rank_state['g'][0] is a torch.Generator"),
    "a tensor of nothing": ({"state": {"o": torch.empty(9, device="meta")}}, "state['o'] is a tensor on the meta"),
    "how many": ({"keep": 0}, "engine.save(keep=0)"),
}


def said(do: Callable[[], Any]) -> str:
    try:
        do()
    except ShardfoldError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrong_arguments(folder: str) -> dict[str, str]:
    engine, place = make(), Path(folder) / "step"
    told = {f"save {name}": said(lambda v=value: engine.save(v, wait=True)) for name, (value, _) in PATHS.items()}
    told |= {f"load {name}": said(lambda v=value: engine.load(v)) for name, (value, _) in PATHS.items()}
    told |= {name: said(lambda m=more: engine.save(place, wait=True, **m)) for name, (more, _) in STATES.items()}
    told["left"] = str(sorted(p.name for p in Path(folder).iterdir()))
    engine.save(place, wait=True, state={"o": 3})
    told["loads an int"] = said(lambda: engine.load(place, state={"o": 3}))  # pyright: ignore[reportArgumentType]
    told["loads a list"] = said(lambda: engine.load(place, state=[3]))  # pyright: ignore[reportArgumentType]
    told["renames by a list"] = said(lambda: engine.load(place, rename=["a"]))  # pyright: ignore[reportArgumentType]
    told["loads"] = str(engine.load(place).state)
    engine.close()
    return told


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_arguments_are_one_sentence_with_their_place(ranks: Ranks, world_size: int, tmp_path: Path):
    """The path, the state and its keys are named as the user has them, and nothing is left behind."""
    for told in ranks.run(wrong_arguments, str(tmp_path), world_size=world_size):
        for name, (_, words) in PATHS.items():
            assert told[f"save {name}"].startswith("ConfigError: " + SAVE + words)
            assert told[f"load {name}"].startswith("ConfigError: " + LOAD + words)
        for name, (_, words) in STATES.items():
            assert words in told[name] and "\n" not in told[name], (name, told[name])
        assert told["left"] == "[]"
        assert "state['o'] is 3, which has no load_state_dict()" in told["loads an int"]
        assert "engine.load(): state= is [3]" in told["loads a list"]
        assert "engine.load(rename=['a']): give a dict" in told["renames by a list"]
        assert told["loads"] == "{'o': 3}"


def wrong_on_one(folder: str) -> list[str]:
    """Rank 1 alone gives what is wrong; then all train on."""
    engine, place = make(), Path(folder) / "step"
    other = engine.rank == 1
    told = [
        said(lambda: engine.save(None if other else place, wait=True)),  # pyright: ignore[reportArgumentType]
        said(lambda: engine.save(place, keep=-1 if other else None, wait=True)),
        said(lambda: engine.save(place, rank_state=3 if other else None, wait=True)),  # pyright: ignore
        said(lambda: engine.load(3 if other else place)),  # pyright: ignore[reportArgumentType]
    ]
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    engine.save(place, wait=True)
    engine.close()
    return [*told, str(sorted(p.name for p in Path(folder).iterdir()))]


def test_what_one_rank_gives_wrong_all_refuse(ranks: Ranks, tmp_path: Path):
    """None waits for it; each says whose it was, and training and saving go on."""
    first, second = ranks.run(wrong_on_one, str(tmp_path), world_size=2)
    words = ["the path is None", "engine.save(keep=-1)", "rank_state= is 3", "the path is 3"]
    for there, here, word in zip(first, second, words, strict=False):
        assert word in here and "was refused on another rank" in there and "rank 1: " in there and word in there
    assert first[-1] == "['latest', 'step']"  # rank 0's look: behind its own close(), which gives back the folder


@pytest.mark.parametrize(
    "state, words",
    [
        (None, "the state dict is of type NoneType: give a dict of tensors by name"),
        (3, "the state dict is of type int"),
        ([torch.ones(2)], "the state dict is of type list"),
        ({"0.weight": 3}, "the state dict has '0.weight' of type int: give a tensor"),
        ({"0.weight": torch.zeros(4, 4), "1.weight": None}, "the state dict has '1.weight' of type NoneType"),
    ],
)
def test_a_state_dict_that_is_none_changes_nothing(state: Any, words: str):
    """Everything is looked at before anything is taken."""
    engine = make("ddp")
    before = engine.state_dict()
    with pytest.raises(ModelError) as raised:
        engine.load_state_dict(state, strict=False)
    assert words in str(raised.value)
    assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    engine.close()


def test_weights_and_losses_of_another_type_are_named():
    """Where a path or a tensor belongs."""
    with pytest.raises(ModelError, match=r"Init\(weights=\.\.\.\) is of type int: give a state dict, or the path"):
        sf.Engine(nn.Linear(2, 2), optimizer=SGD, init=sf.Init(weights=3))
    engine = make("ddp")
    for call in (engine.backward, engine.scale):
        with pytest.raises(UsageError, match="the loss is of type NoneType: give the tensor"):
            call(None)  # pyright: ignore[reportArgumentType]
    engine.close()


def test_an_unknown_rule_of_names_is_refused_where_it_is_read(tmp_path: Path):
    """Also where no engine is."""
    from shardfold.checkpoint import Writer, export_to

    writer = Writer(tmp_path / "step")
    writer.parameter("w", torch.ones(2))
    writer.commit()
    with pytest.raises(ConfigError, match="export_to\\(rename=3\\): give a dict of regular expressions"):
        export_to(tmp_path / "step", tmp_path / "out", rename=3)  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "out").exists()
