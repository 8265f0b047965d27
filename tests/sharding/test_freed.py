"""A freed parameter answers what needs no memory, and raises one sentence that names it for everything else."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import FreedParameterError
from shardfold.testing import Ranks
from tests.support import models

pytestmark = pytest.mark.product

NAME = "blocks.1.up.weight"
SHAPE = (4 * models.WIDTH, models.WIDTH)
SGD = partial(torch.optim.SGD, lr=0.1)


def _save(p: Tensor) -> None:
    torch.save(p, io.BytesIO())


def _swap(p: Any) -> None:
    p.data = torch.zeros(SHAPE)


def _iadd(p: Any) -> None:
    with torch.no_grad():
        p += 1


def _setitem(p: Any) -> None:
    with torch.no_grad():
        p[0] = 1.0


def _functional(p: Tensor) -> Any:
    return torch.func.functional_call(nn.Linear(*reversed(SHAPE), bias=False), {"weight": p}, torch.zeros(SHAPE[1]))


def _iterate(p: Tensor) -> Any:
    return [row for row in p]


def _unpack(p: Tensor) -> Any:
    first, *_ = p
    return first


TOUCHES: dict[str, Callable[[Any], Any]] = {
    "p + 1": lambda p: p + 1,
    "1 - p": lambda p: 1 - p,
    "p @ x": lambda p: p @ torch.zeros(SHAPE[1]),
    "x @ p": lambda p: torch.zeros(SHAPE[0]) @ p,
    "p == p": lambda p: p == p,
    "-p": lambda p: -p,
    "p.sum()": lambda p: p.sum(),
    "p.data": lambda p: p.data,
    "p.data = x": _swap,
    "p.detach()": lambda p: p.detach(),
    "p.detach_()": lambda p: p.detach_(),
    "p.numpy()": lambda p: p.numpy(),
    "np.asarray(p)": lambda p: np.asarray(p),
    "np.add(p, 1)": lambda p: np.add(p, 1),
    "p.__array__()": lambda p: p.__array__(),
    "p.data_ptr()": lambda p: p.data_ptr(),
    "p.tolist()": lambda p: p.tolist(),
    "p.item()": lambda p: p.item(),
    "p[0]": lambda p: p[0],
    "p[0] = x": _setitem,
    "p[0, 0].item()": lambda p: p[0, 0].item(),
    "p[None]": lambda p: p[None],
    "p.add_(1)": lambda p: p.add_(1),
    "p += 1": _iadd,
    "p.copy_(x)": lambda p: p.copy_(torch.zeros(SHAPE)),
    "x.copy_(p)": lambda p: torch.zeros(SHAPE).copy_(p),
    "x.add_(p)": lambda p: torch.zeros(SHAPE).add_(p),
    "x[0] = p": lambda p: torch.zeros(2, *SHAPE).__setitem__(0, p),
    "p.clone()": lambda p: p.clone(),
    "p.to(fp64)": lambda p: p.to(torch.float64),
    "p.to(fp32)": lambda p: p.to(torch.float32),
    "p.cpu()": lambda p: p.cpu(),
    "p.half()": lambda p: p.half(),
    "p.contiguous()": lambda p: p.contiguous(),
    "p.view(-1)": lambda p: p.view(-1),
    "p.T": lambda p: p.T,
    "p.t()": lambda p: p.t(),
    "p.expand": lambda p: p.expand(2, *SHAPE),
    "p.untyped_storage()": lambda p: p.untyped_storage(),
    "p.storage()": lambda p: p.storage(),
    "p.set_(x)": lambda p: p.set_(torch.zeros(SHAPE)),
    "p.resize_(n)": lambda p: p.resize_(1),
    "p.share_memory_()": lambda p: p.share_memory_(),
    "p.pin_memory()": lambda p: p.pin_memory(),
    "iter(p)": _iterate,
    "unpack p": _unpack,
    "x in p": lambda p: 1.0 in p,
    "bool(p)": bool,
    "float(p)": float,
    "int(p)": int,
    "format(p)": lambda p: f"{p:.3f}",
    "torch.save(p)": _save,
    "pickle.dumps(p)": pickle.dumps,
    "copy.copy(p)": copy.copy,
    "copy.deepcopy(p)": copy.deepcopy,
    "nn.Parameter(p)": nn.Parameter,
    "nn.init.zeros_(p)": nn.init.zeros_,
    "nn.init.normal_(p)": nn.init.normal_,
    "nn.init.xavier_uniform_(p)": nn.init.xavier_uniform_,
    "nn.init.kaiming_normal_(p)": nn.init.kaiming_normal_,
    "nn.init.orthogonal_(p)": nn.init.orthogonal_,
    "F.linear(x, p)": lambda p: F.linear(torch.zeros(SHAPE[1]), p),
    "F.embedding(i, p)": lambda p: F.embedding(torch.zeros(1, dtype=torch.long), p),
    "torch.equal(p, x)": lambda p: torch.equal(p, torch.zeros(SHAPE)),
    "torch.equal(x, p)": lambda p: torch.equal(torch.zeros(SHAPE), p),
    "torch.allclose(x, p)": lambda p: torch.allclose(torch.zeros(SHAPE), p),
    "torch.cat([p, p])": lambda p: torch.cat([p, p]),
    "torch.stack([x, p])": lambda p: torch.stack([torch.zeros(SHAPE), p]),
    "torch.einsum": lambda p: torch.einsum("ab,b->a", p, torch.zeros(SHAPE[1])),
    "torch.linalg.norm(p)": torch.linalg.norm,
    "torch.from_dlpack(p)": torch.from_dlpack,
    "p.__dlpack__()": lambda p: p.__dlpack__(),
    "torch._foreach_add": lambda p: torch._foreach_add([torch.zeros(1), p], 1),
    "torch._foreach_mul_": lambda p: torch._foreach_mul_([p], 2.0),
    "torch._foreach_norm": lambda p: torch._foreach_norm([p]),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "functional_call": _functional,
    "SGD.step": lambda p: _optimizer_step(p),
    "torch.autograd.grad": lambda p: torch.autograd.grad((p * 1).sum(), p),
    "is_set_to": lambda p: p.is_set_to(p),
    "apply_": lambda p: p.apply_(abs),
    "p.type()": lambda p: p.type(torch.float64),
    "new_tensor": lambda p: p.new_tensor(p),
    "clip_grad_value": lambda p: torch.clamp(p, max=1.0),
    "nn.utils.vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]),
    "torch.func.vmap over a function of it": lambda p: torch.func.vmap(lambda x: p @ x)(torch.zeros(2, SHAPE[1])),
    "torch.func.grad of a function of it": lambda p: torch.func.grad(lambda x: (p @ x).sum())(torch.zeros(SHAPE[1])),
    "torch.vmap(F.linear)": lambda p: torch.vmap(F.linear, (0, None))(torch.zeros(2, SHAPE[1]), p * 1),
    "p.as_subclass": lambda p: p.as_subclass(Tensor),
    "p.unflatten": lambda p: p.unflatten(0, (4, -1)),
    "p.to_sparse()": lambda p: p.to_sparse(),
    "p._typed_storage()": lambda p: p._typed_storage(),
    "weight_norm": lambda p: torch._weight_norm(p, torch.ones(SHAPE[0], 1), 0),
}
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12):  # 2.11 hands tensors to the backend unasked
    TOUCHES["dist.broadcast(p)"] = lambda p: dist.broadcast(p, src=0)

ANSWERS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: tuple(p.shape) == SHAPE and p.size(0) == SHAPE[0],
    "numel": lambda p: p.numel() == SHAPE[0] * SHAPE[1] == p.nelement(),
    "dtype": lambda p: p.dtype == torch.float32 and p.is_floating_point() and not p.is_complex(),
    "device": lambda p: p.device.type == "cpu" and p.is_cpu and not p.is_cuda and not p.is_meta,
    "dim": lambda p: p.dim() == p.ndim == 2 and len(p) == SHAPE[0],
    "stride": lambda p: p.stride() == (SHAPE[1], 1) and p.is_contiguous(),
    "bytes": lambda p: p.nbytes == 4 * p.numel() and p.itemsize == p.element_size() == 4,
    "requires_grad": lambda p: p.requires_grad and p.is_leaf and p.grad_fn is None,
    "grad": lambda p: p.grad is None,
    "isinstance": lambda p: isinstance(p, nn.Parameter) and torch.is_tensor(p) and isinstance(p, Tensor),
    "hash": lambda p: {p: 1}[p] == 1 and id(p) == hash(p),
    "is": lambda p: p is not None and any(p is other for other in [p]),
    "repr": lambda p: NAME in repr(p) and "only this rank's shard" in repr(p),
    "str": lambda p: NAME in str(p) and NAME in f"{p}",
    "parameter of": lambda p: not isinstance(p, nn.parameter.UninitializedParameter),
    "layout": lambda p: p.layout == torch.strided and not p.is_sparse and not p.is_quantized,
    "hooks": lambda p: p.register_hook(abs).remove() is None,
    "torch functions": lambda p: torch.is_floating_point(p) and torch.numel(p) == p.numel(),
    "like": lambda p: torch.empty_like(p).shape == p.shape and torch.zeros_like(p, dtype=torch.float64).sum() == 0,
    "new": lambda p: p.new_zeros(3).sum() == 0 and p.new_empty(2).shape == (2,),
}


def _optimizer_step(p: Any) -> None:
    p.grad = torch.zeros(SHAPE)
    try:
        torch.optim.SGD([p], lr=0.1).step()
    finally:
        p.grad = None


def _touch(layout: str) -> tuple[dict[str, str], dict[str, str]]:
    torch.manual_seed(0)
    engine = sf.Engine(models.small(), optimizer=SGD, layout=layout)
    p: Any = engine.module.blocks[1].up.weight  # type: ignore[union-attr,index]
    raised, wrong = {}, {}
    for name, touch in TOUCHES.items():
        try:
            made = touch(p)
            raised[name] = f"nothing was raised: {type(made).__name__}"
        except FreedParameterError as error:
            raised[name] = str(error)
        except Exception as error:
            raised[name] = f"{type(error).__name__}: {error}"
    for name, answer in ANSWERS.items():
        try:
            if not answer(p):
                wrong[name] = "false"
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    try:
        p.grad = torch.zeros(3)
        wrong["grad of another shape"] = "was taken"
    except RuntimeError as error:
        if "shape" not in str(error) and "size" not in str(error):
            wrong["grad of another shape"] = str(error)
    # After all of this it is as it was.
    tokens, targets = models.batches(1)[0]
    engine.backward(engine(tokens, targets))
    engine.step()
    with engine.gathered(NAME) as whole:
        if whole is not p or not torch.isfinite(whole).all() or type(p) is not nn.Parameter:
            wrong["after"] = "another parameter"
    engine.close()
    return raised, wrong


@pytest.mark.parametrize("layout", ["zero3", "fsdp2", "hsdp", "hpz"])
def test_every_touch_of_a_freed_parameter_raises_one_sentence_with_its_name(ranks: Ranks, layout: str) -> None:
    """In processes of their own: reading freed memory would end them."""
    for raised, wrong in ranks.run(_touch, layout, world_size=2):
        silent = {
            name: said for name, said in raised.items()
            if f"touched {NAME!r} while only this rank's shard of it is in memory" not in said
            or f"with engine.gathered({NAME!r})" not in said
        }  # fmt: skip
        assert len(raised) >= 90  # as docs/promises.md says
        assert silent == {}
        assert wrong == {}


def _dropped() -> list[str]:
    engine = sf.Engine(models.Small(layers=2), optimizer=SGD, layout="zero3")
    tokens, targets = models.batches(1)[0]
    engine.backward(engine(tokens, targets))
    engine.step()
    parameters = {name: weakref.ref(p) for name, p in engine.module.named_parameters()}
    assert NAME in parameters
    engine.close()
    del engine
    gc.collect()
    return [name for name, parameter in parameters.items() if parameter() is not None]


def test_a_model_that_is_dropped_while_its_parameters_are_freed_is_collected(ranks: Ranks) -> None:
    assert ranks.run(_dropped, world_size=2) == [[], []]
