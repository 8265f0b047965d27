"""Checkpoints of what rests as codes hold these: any layout goes on with them to the bit, and who has none reads their
values."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import shardfold as sf
from shardfold.checkpoint.verify import verify
from shardfold.errors import CheckpointError
from shardfold.testing import Ranks
from tests.support.adapted import Adapted, batches

BASE = "nf4/64+double"
"""Coded once more, its values could be others in their last digit."""


PLAIN = "nf4/64"
"""Ranks divide a matrix at any block of it; scales in 8 bits have groups of 256 blocks."""


def _engine(layout: str, seed: int = 0) -> sf.Engine:
    torch.manual_seed(seed)
    return sf.Engine(Adapted(layers=2), optimizer=partial(torch.optim.AdamW, lr=1e-2), layout=layout)


def _step(engine: sf.Engine, batch: torch.Tensor) -> float:
    loss = engine(batch.chunk(engine.world_size)[engine.rank])
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _other(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def _write(folder: str, base: str = BASE) -> list[float]:
    """Losses behind the save; what is saved by two ranks."""
    engine, data = _engine(f"zero3+{base}"), batches(4)
    losses = [_step(engine, batch) for batch in data[:2]]
    engine.save(f"{folder}/all", wait=True)
    engine.save(f"{folder}/adapters", frozen="skip", wait=True)
    losses = [_step(engine, batch) for batch in data[2:]]
    engine.close()
    return losses


def _read(folder: str, losses: list[float]) -> list[str]:
    wrong, data = list[str](), batches(4)
    for layout, seed, name in (("ddp", 7, "all"), ("infinity", 0, "adapters"), ("hpz", 7, "all")):
        engine = _engine(f"{layout}+{BASE}", seed)
        engine.load(f"{folder}/{name}")
        state = engine.state_dict()
        engine.load_state_dict(state)
        wrong += [f"{layout}: {each} is another behind load_state_dict" for each in _other(state, engine.state_dict())]
        engine.module.get_submodule("blocks.0").register_module("more", torch.nn.Linear(3, 3))
        again = [_step(engine, batch) for batch in data[2:]]
        if any(abs(a - b) > 1e-6 for a, b in zip(losses, again, strict=True)):
            wrong.append(f"{layout}: losses are {again} and were {losses}")
        coded = {each: value for each, value in state.items() if ".base.weight" in each}
        wrong += [f"{layout}: {each} is another behind a change" for each in _other(coded, engine.state_dict())]
        plain = _engine("zero3", seed=7)
        plain.load(f"{folder}/all")
        wrong += [f"{layout}: {each} is another without codes" for each in _other(plain.state_dict(), state)]
        plain.close()
        engine.close()
    return wrong


def test_any_layout_goes_on_with_codes_and_others_read_their_values(ranks: Ranks, tmp_path: Path) -> None:
    losses = ranks.run(_write, str(tmp_path), world_size=2)
    for rank, wrong in enumerate(ranks.run(_read_on_two, str(tmp_path), losses, world_size=2)):
        assert wrong == [], rank


def _values(folder: str) -> list[str]:
    """A rank's range begins within a matrix: what it reads of the codes is what others read as values."""
    coded, plain = _engine(f"zero3+{PLAIN}", seed=7), _engine("zero3", seed=7)
    for engine in (coded, plain):
        engine.load(f"{folder}/all")
    wrong = _other(plain.state_dict(), coded.state_dict())
    coded.close()
    plain.close()
    return wrong


def test_each_of_three_ranks_reads_its_part_of_the_codes(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_write, str(tmp_path), PLAIN, world_size=2)
    assert ranks.run(_values, str(tmp_path), world_size=3) == [[]] * 3


def _read_on_two(folder: str, losses: list[list[float]]) -> list[str]:
    return _read(folder, losses[torch.distributed.get_rank()])


def test_a_checkpoint_is_as_small_as_its_codes_and_is_verified(tmp_path: Path) -> None:
    engine = _engine("zero3+nf4/64")
    engine.save(tmp_path / "small", wait=True)
    with sf.Checkpoint(tmp_path / "small") as checkpoint:
        name = "blocks.0.first.base.weight"
        assert torch.equal(checkpoint.parameter(name), engine.state_dict()[name])
        pieces = [piece for piece in checkpoint.index.pieces if piece.of == name]
        assert sum(piece.nbytes for piece in pieces) == 0.5625 * 64 * 128
        assert torch.equal(checkpoint.read(name, start=70, stop=4000), engine.state_dict()[name].view(-1)[70:4000])
    assert verify(tmp_path / "small").ok
    other = _engine("ddp+nf4/64", seed=3)
    engine.save(tmp_path / "adapters", frozen="skip", wait=True)
    with pytest.raises(CheckpointError, match="the engine has others"):
        other.load(tmp_path / "adapters")
    other.close()
    engine.close()
