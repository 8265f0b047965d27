"""A parameter of stage 3 outside of a gather reads as DeepSpeed's does: it has no elements; writing is not lost."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.compat import deepspeed
from shardfold.compat.deepspeed import zero
from shardfold.errors import FreedParameterError
from shardfold.testing import Ranks
from tests.support.deepspeed_training import batch, build, config, loss_of

# What code of DeepSpeed's users reads, and the dtype that the empty tensor has.
READS: dict[str, tuple[Callable[[Any], Tensor], torch.dtype]] = {
    "p.data": (lambda p: p.data, torch.float32),
    "p.detach()": (lambda p: p.detach(), torch.float32),
    "p.clone()": (lambda p: p.clone(), torch.float32),
    "p.contiguous()": (lambda p: p.contiguous(), torch.float32),
    "p.float()": (lambda p: p.float(), torch.float32),
    "p.half()": (lambda p: p.half(), torch.float16),
    "p.bfloat16()": (lambda p: p.bfloat16(), torch.bfloat16),
    "p.cpu()": (lambda p: p.cpu(), torch.float32),
    "p.to(dtype)": (lambda p: p.to(torch.float64), torch.float64),
    "p.to(device)": (lambda p: p.to("cpu"), torch.float32),
    "p.type(dtype)": (lambda p: p.type(torch.float64), torch.float64),
    "p.data.float().cpu().clone()": (lambda p: p.data.float().cpu().clone(), torch.float32),
    "p.detach().numpy()": (lambda p: torch.from_numpy(p.detach().cpu().numpy()), torch.float32),
    "p.data * 2": (lambda p: p.data * 2, torch.float32),
    "pickled": (lambda p: _pickled(p.data), torch.float32),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "p.data.mul_(2)": lambda p: p.data.mul_(2),
    "p.data.fill_(0)": lambda p: p.data.fill_(0),
    "p.data.normal_()": lambda p: p.data.normal_(),
    "p.data.copy_(x)": lambda p: p.data.copy_(torch.zeros(p.ds_shape)),
    "p.data[:] = 0": lambda p: p.data.__setitem__(slice(None), 0),
    "p.detach().data.zero_()": lambda p: p.detach().data.zero_(),
    "torch.add(out=p.data)": lambda p: torch.add(torch.ones(0), 1, out=p.data),
    "p.data += 1": lambda p: p.data.__iadd__(1),
    "nn.init on p.data": lambda p: nn.init.zeros_(p.data),
    "p.data = x": lambda p: setattr(p, "data", torch.zeros(p.ds_shape)),
    "p + 1": lambda p: p + 1,
    "p.sum()": lambda p: p.sum(),
}


def _pickled(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


def _wrong(p: Any, shape: tuple[int, ...]) -> dict[str, str]:
    """What differs from DeepSpeed: nothing."""
    wrong: dict[str, str] = {}
    for name, (read, dtype) in READS.items():
        found = read(p)
        if not isinstance(found, Tensor) or tuple(found.shape) != (0,) or found.dtype != dtype or found.requires_grad:
            wrong[name] = str(found)
    if float(p.data.norm()) != 0 or bool(p.data.isnan().any()) or p.data.numel() or p.data.device != p.device:
        wrong["of p.data"] = "another answer"
    if not tuple(p.ds_shape) == tuple(p.shape) == shape or p.ds_numel != p.numel():
        wrong["shape"] = f"{p.ds_shape}, {p.shape}"
    for name, write in WRITES.items():
        try:
            write(p)
            wrong[name] = "was lost in silence"
        except FreedParameterError as error:
            if "only this rank's shard of it is in memory" not in str(error):
                wrong[name] = str(error)
    return wrong


def _read() -> dict[str, str]:
    with zero.Init(dtype=torch.float32):
        early: Any = nn.Linear(5, 3)
    wrong = {f"early {name}": said for name, said in _wrong(early.weight, (3, 5)).items()}
    model = build()
    engine = deepspeed.initialize(model=model, config=config(3, optimizer={"type": "SGD", "params": {"lr": 0.1}}))[0]
    wrong |= _wrong(model[0].weight, (8, 4))
    state = model.state_dict()
    if list(state) != [name for name, _ in build().named_parameters()] or state["0.weight"].numel():
        wrong["state_dict()"] = str(state)
    for module in (model, early):  # as clients do around an engine
        module.cpu().to("cpu").float().to(torch.device("cpu"))
        parameter = next(module.parameters())
        if parameter.numel() == 0 or parameter.data.numel():
            wrong[f"{type(module).__name__}.to()"] = "another parameter"
        try:
            module.half()
            wrong["module.half()"] = "was taken"
        except FreedParameterError:
            pass
    before = engine.module_state_dict()["0.weight"]
    engine.backward(loss_of(engine, batch(0, 0, engine.global_rank)))
    engine.step()
    after = engine.module_state_dict()["0.weight"]
    if before.shape != (8, 4) or torch.equal(before, after) or not after.isfinite().all():
        wrong["training"] = "did not go on"
    with zero.GatheredParameters(model[0].weight):
        if type(model[0].weight.data) is not Tensor or not torch.equal(model[0].weight.data, after):
            wrong["gathered"] = "another value"
    engine.destroy()
    return wrong | {f"destroyed {name}": said for name, said in _wrong(model[0].weight, (8, 4)).items()}


def test_reading_gives_no_elements_and_writing_raises(ranks: Ranks) -> None:
    """Under ``zero.Init``, in an engine and after ``destroy()``, on two ranks; shapes stay true, training goes on."""
    assert ranks.run(_read, world_size=2) == [{}, {}]


def _native() -> list[str]:
    engine = sf.Engine(build(), layout="zero3", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    said = []
    for name, (read, _) in READS.items():
        try:
            read(next(engine.module.parameters()))
            said.append(name)
        except FreedParameterError:
            pass
    engine.close()
    return said


def test_the_library_s_own_engine_keeps_its_sentence(ranks: Ranks) -> None:
    """Only parameters of the face are empty: elsewhere a read without a gather is a slip."""
    assert ranks.run(_native, world_size=2) == [[], []]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_without_stage_3_parameters_are_whole(stage: int, ranks: Ranks) -> None:
    """They are ordinary parameters."""
    assert ranks.run(_whole, stage, world_size=2) == [True, True]


def _whole(stage: int) -> bool:
    model: Any = build()
    engine = deepspeed.initialize(model=model, config=config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}))[
        0
    ]
    whole = model[0].weight.data.shape == (8, 4) and type(model[0].weight.data) is Tensor
    engine.destroy()
    return whole
