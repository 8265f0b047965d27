"""DeepSpeed's ``zero.Init``, ``GatheredParameters``, ``ds_*`` attributes and ``safe_*`` functions, as documented."""

from __future__ import annotations

import copy
import logging
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.compat.deepspeed import utils, zero
from shardfold.compat.deepspeed.initialize import initialize
from shardfold.compat.deepspeed.runtime.zero import partition_parameters as pp
from shardfold.compat.deepspeed.runtime.zero.utils import is_zero_param
from shardfold.compat.deepspeed.utils import tensor_fragment as fragment
from shardfold.compat.deepspeed.zero import estimates
from shardfold.compat.deepspeed.zero.attributes import install
from shardfold.errors import ConfigError, FreedParameterError, OrderError, UsageError
from shardfold.testing import Ranks, run_ranks
from tests.support import models
from tests.support.options import grouped

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
AVAILABLE, NOT_AVAILABLE = zero.ZeroParamStatus.AVAILABLE, zero.ZeroParamStatus.NOT_AVAILABLE
EARLY_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "none"}},
}


@pytest.fixture(autouse=True)
def _no_group_stays() -> Iterator[None]:
    """``zero.Init`` starts one for this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _engine(layout: str = "zero3", **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    engine = sf.Engine(models.tied(), optimizer=ADAMW, **grouped(layout=layout, **options))
    if layout == "zero3":
        zero.note_parameters(engine)
    return engine


def _backward(engine: sf.Engine) -> None:
    for batch in models.batches(1):
        engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch)))


def _head(model: nn.Module) -> Any:
    return model.head.weight


# -- Init -----------------------------------------------------------------------------------------------------------


def _init() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with zero.Init(enabled=False):
        plain = nn.Linear(5, 5)
    assert not hasattr(plain.weight, "ds_id") and not is_zero_param(plain.weight)
    with zero.Init():
        half = nn.Linear(5, 5)
    assert half.weight.dtype == (torch.half if torch.cuda.is_available() else torch.bfloat16)
    with zero.Init(config_dict_or_path=EARLY_CONFIG):
        with zero.Init(dtype=torch.float):
            inner = nn.Linear(5, 5)
        outer = nn.Linear(5, 5)
    assert inner.weight.dtype == outer.weight.dtype == torch.bfloat16
    torch.manual_seed(rank)
    with zero.Init(dtype=torch.float, data_parallel_group=dist.new_group(), remote_device="cpu", pin_memory=True):
        linear: Any = nn.Linear(5, 3)
    torch.manual_seed(0)
    same = nn.Linear(5, 3)
    weight = linear.weight
    assert isinstance(weight, nn.Parameter) and is_zero_param(weight)
    assert weight.ds_shape == weight.shape == (3, 5) and weight.ds_numel == 15 and weight.ds_status is NOT_AVAILABLE
    part = -(-15 // ranks)
    assert weight.partition_numel() == weight.ds_tensor.numel() == weight.ds_tensor.ds_numel == part
    assert weight.aligned_size() == part * ranks and weight.padding_size() == part * ranks - 15
    here = same.weight.detach().reshape(-1)[rank * part : (rank + 1) * part]
    assert torch.equal(weight.ds_tensor[: here.numel()], here) and weight.ds_tensor[here.numel() :].eq(0).all()
    assert weight.ds_id != linear.bias.ds_id and weight.ds_persist is False and not weight.ds_active_sub_modules
    assert weight.ds_param_type is zero.ZeroParamType.PARTITIONED and weight.ds_summary()["ds_shape"] == (3, 5)
    with pytest.raises(FreedParameterError, match="Engine"):
        linear(torch.ones(1, 5))
    before = same.weight.detach().clone()
    given: Any = zero.Init(module=same, dtype=torch.float)
    assert given is same and all(p.ds_status is NOT_AVAILABLE for p in given.parameters())
    with zero.GatheredParameters(given.parameters()):
        assert torch.equal(given.weight, before)
    weight.all_gather()
    assert weight.ds_status is AVAILABLE
    with torch.no_grad():
        weight.fill_(3)
    weight.partition(has_been_updated=True)
    assert weight.ds_status is NOT_AVAILABLE
    with zero.GatheredParameters(weight):
        assert weight.eq(3).all()


@pytest.mark.parametrize("ranks_there", [1, 2])
def test_init_splits_each_module_as_it_is_constructed(ranks: Ranks, ranks_there: int) -> None:
    ranks.run(_init, world_size=ranks_there)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": torch.int8}, "dtype"),
        ({"remote_device": "disk"}, "none, cpu, nvme"),
        ({"remote_device": "nvme"}, "nvme_path"),
        ({"data_parallel_group": 1, "sequence_data_parallel_group": 1}, "one of them"),
        ({"config_dict_or_path": {"bf16": {"enabld": True}}}, "enabld"),
    ],
)
def test_init_refuses_what_it_can_not_do(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        zero.Init(**options)


@pytest.mark.parametrize("launched", [False, True])
def test_init_starts_the_process_group(launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process that nothing tells of others, and of one whose launcher says that it is alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for name, value in {**told, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value) if launched else monkeypatch.delenv(name, raising=False)
    with zero.Init(enabled=False):
        assert not dist.is_initialized()
    with zero.Init(dtype=torch.float):
        layer: Any = nn.Linear(4, 3)
        assert dist.is_initialized() and dist.get_world_size() == 1
    assert layer.weight.ds_process_group is dist.group.WORLD
    engine = initialize(model=layer, config={"train_batch_size": 1, "zero_optimization": {"stage": 3}})[0]
    assert engine(torch.ones(4)).shape == (3,)
    engine.destroy()


def test_transformers_can_put_a_wrapper_of_its_own_in_place() -> None:
    original = pp.zero_wrapper_for_fp_tensor_constructor
    try:
        pp.zero_wrapper_for_fp_tensor_constructor = lambda fn, *args, **kwargs: original(fn, *args, **kwargs)
        with zero.Init(dtype=torch.half):
            assert torch.arange(3.0).dtype == torch.float32 and torch.arange is pp._orig_torch_arange
    finally:
        pp.zero_wrapper_for_fp_tensor_constructor = original
    assert original(torch.ones, torch.half)(2).dtype == torch.half and callable(pp.get_accelerator)


# -- GatheredParameters ---------------------------------------------------------------------------------------------


def _gathers(early: bool) -> None:
    rank = dist.get_rank()
    engine = None
    if early:
        with zero.Init(dtype=torch.float):
            model: Any = models.tied()
    else:
        engine = _engine(precision="bf16")
        model = engine.module
    weight, plain = _head(model), nn.Linear(2, 2)
    assert weight.ds_status is NOT_AVAILABLE
    for given in (weight, [weight, None, weight, plain.weight], model.parameters(), (p for p in [weight])):
        with zero.GatheredParameters(given):
            assert weight.ds_status is AVAILABLE and weight.detach().sum().isfinite()
        assert weight.ds_status is NOT_AVAILABLE
    for nothing in (plain.weight, [], None, "weight", [None]):
        with zero.GatheredParameters(nothing, modifier_rank=0):  # type: ignore[arg-type]
            assert weight.ds_status is NOT_AVAILABLE
    with zero.GatheredParameters(weight, enabled=False):
        assert weight.ds_status is NOT_AVAILABLE
    with zero.GatheredParameters(weight, modifier_rank=1):
        if rank == 1:
            weight.data.fill_(4)
        else:
            nn.init.zeros_(weight)
    with zero.GatheredParameters(model.parameters()):
        with zero.GatheredParameters(weight, modifier_rank=0):
            assert weight.eq(4).all()
            if rank == 0:
                weight.data.fill_(5)
        assert weight.ds_status is AVAILABLE and weight.eq(5).all()
        with torch.no_grad():
            weight.add_(1)  # not what modifier_rank=None is for: logged, and gone
            model.norm.bias.data = torch.full((models.WIDTH,), 9.0, dtype=model.norm.bias.dtype)
    with zero.GatheredParameters([weight, model.norm.bias]):
        assert weight.eq(5).all() and model.norm.bias.eq(0).all()
    with zero.GatheredParameters(weight, fwd_module=model.norm):
        assert [p for _, p in model.norm.ds_external_parameters()] == [weight]
    with pytest.raises(ConfigError, match="0 to 1"):
        zero.GatheredParameters(weight, modifier_rank=2)
    if engine is not None:
        with engine.gathered("embedding.weight", of="master") as master:
            assert master.eq(5).all()
        engine.close()
        assert not hasattr(weight, "ds_status")


@pytest.mark.parametrize("early", [True, False])
def test_gathered_parameters_takes_every_form_before_and_after_initialize(ranks: Ranks, early: bool) -> None:
    ranks.run(_gathers, early, world_size=2)


def _replaced() -> None:
    with zero.Init(dtype=torch.float):
        model: Any = models.tied()
    model.head = nn.Linear(models.WIDTH, 60, bias=False)
    with zero.GatheredParameters([model.embedding.weight, model.head.weight], modifier_rank=0):
        model.head.weight.data[:50] = model.embedding.weight.data
        model.embedding.weight = model.head.weight
        model.embedding.num_embeddings = 60
    engine = sf.Engine(model, optimizer=ADAMW)
    zero.note_parameters(engine)
    assert model.embedding.weight is model.head.weight and model.head.weight.ds_shape == (60, models.WIDTH)
    _backward(engine)
    assert engine.step().updated
    with zero.GatheredParameters(model.parameters()):
        alone = copy.deepcopy(model)
        pickle.dumps(model)
    assert not hasattr(alone.head.weight, "ds_id") and alone.head.weight.isfinite().all()
    engine.close()


def test_a_weight_may_be_replaced_by_another(ranks: Ranks) -> None:
    """As ``resize_token_embeddings`` of transformers does; copies of a gathered model are ordinary ones."""
    ranks.run(_replaced, world_size=2)


class _Borrows(nn.Module):
    """The second layer's input is multiplied by the first one's weight, as an example of DeepSpeed's does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.layers[0]
        x = first(x)
        with zero.GatheredParameters(first.weight, fwd_module=self):
            return (self.layers[1](x) @ first.weight).square().mean()


def _copied() -> None:
    engine = _engine()
    state = engine.module.state_dict()
    kept, alone = copy.deepcopy(state), copy.deepcopy(engine.module.head.weight.data)
    assert list(kept) == list(state) and alone.shape == (0,)
    for name, value in kept.items():
        assert type(value) is Tensor and value.shape == state[name].shape and value.dtype == state[name].dtype
        value.add_(1)  # an ordinary tensor of the user's
    twice = copy.deepcopy([alone, alone])
    assert twice[0] is twice[1]
    _backward(engine)
    engine.close()


def test_a_state_dict_without_values_can_be_copied(ranks: Ranks) -> None:
    """As early-stopping code keeps one; a copy is an ordinary tensor of no elements."""
    ranks.run(_copied, world_size=2)


class _Scaled(nn.Module):
    """A matrix, its bias and a scale of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(32, 2), nn.Parameter(torch.tensor(2.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def _small(offload: bool) -> None:
    zeros: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 2}
    if offload:
        zeros |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    plain, model = _Scaled(), _Scaled()
    settings = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "zero_optimization": zeros,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }  # fmt: skip
    engine = initialize(model=model, config=settings)[0]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x[2 * engine.global_rank :][:2]).square().mean())
        engine.step()
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert model.scale.item() == pytest.approx(plain.scale.item(), rel=1e-5)
        torch.testing.assert_close(model.layer.bias, plain.layer.bias)
        assert model.layer.bias.max() == model.layer.bias.data.max() and torch.equal(model.scale, +model.scale)
    assert model.layer.weight.data.shape == (0,) and model.layer.weight.ds_status == NOT_AVAILABLE
    assert model.scale.ds_status == AVAILABLE and model.scale.ds_persist and not model.layer.weight.ds_persist
    state = copy.deepcopy(model.state_dict())
    assert state["layer.weight"].shape == (0,) and torch.equal(state["layer.bias"], model.layer.bias)
    whole = engine.module_state_dict()
    torch.testing.assert_close(whole["layer.weight"], plain.layer.weight.data)
    with zero.GatheredParameters([model.scale, model.layer.weight], modifier_rank=0), torch.no_grad():
        model.scale.fill_(float(engine.global_rank) + 7.0)
    assert model.scale.item() == 7.0
    engine.destroy()


@pytest.mark.parametrize("offload", [False, True])
def test_small_parameters_are_read_outside(ranks: Ranks, offload: bool) -> None:
    """At stage 3 what has as many elements as the threshold, or fewer, is whole on every rank, is that of plain
    PyTorch, and is written like the others."""
    ranks.run(_small, offload, world_size=2)


def _borrows() -> bool:
    torch.manual_seed(0)
    plain, x = _Borrows(), torch.rand(3, 6)
    with zero.Init(dtype=torch.float):
        model = _Borrows()
    with zero.GatheredParameters(model.parameters(), modifier_rank=0):
        model.load_state_dict(plain.state_dict())
    engine = sf.Engine(model, optimizer=partial(torch.optim.SGD, lr=0.1))
    zero.note_parameters(engine)
    engine.backward(engine(x))
    engine.step()
    plain(x).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    state = engine.state_dict()
    engine.close()
    return all(torch.allclose(state[name], value, atol=1e-6) for name, value in plain.state_dict().items())


def test_a_forward_gathers_a_weight_of_another_layer(ranks: Ranks) -> None:
    assert ranks.run(_borrows, world_size=2) == [True, True]


def _nothing_split(layout: str) -> None:
    engine = _engine(layout)
    weight = _head(engine.module)
    assert not hasattr(weight, "ds_id")
    with zero.GatheredParameters(weight, modifier_rank=0):
        assert not engine.sharded.loans
    engine.close()


def test_attributes_of_an_ordinary_parameter_are_its_own() -> None:
    """Also where the face is in use: the files that DeepSpeed saved hold parameters with a ``ds_id``."""
    install()
    parameter: Any = nn.Parameter(torch.ones(3))
    assert not hasattr(parameter, "ds_id")
    parameter.ds_id = "0_7"
    again = pickle.loads(pickle.dumps(parameter))
    assert parameter.ds_id == again.ds_id == "0_7" and torch.equal(again, parameter)


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2"])
def test_without_stage_3_nothing_happens(ranks: Ranks, layout: str) -> None:
    ranks.run(_nothing_split, layout, world_size=2)


def _one_rank_only(early: bool) -> bool:
    if early:
        with zero.Init(dtype=torch.float):
            model = models.small()
    else:
        model = _engine(patience=2.0).module
    try:
        if dist.get_rank():
            with zero.GatheredParameters(model.parameters()):
                pass
        elif early:
            sf.Engine(model)
        else:
            model(*next(iter(models.batches(1))))
    except OrderError:
        return True
    return False


@pytest.mark.parametrize("early", [True, False])
def test_a_rank_that_gathers_alone_is_found_out(ranks: Ranks, early: bool) -> None:
    assert ranks.run(_one_rank_only, early, world_size=2) == [True, True]


# -- safe_get, safe_set -----------------------------------------------------------------------------------------------


def _own(whole: Tensor) -> Tensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = -(-whole.numel() // ranks)
    padded = torch.zeros(size * ranks)
    padded[: whole.numel()] = whole.reshape(-1)
    return padded[rank * size : (rank + 1) * size]


def _states(layout: str) -> None:
    engine = _engine(layout, precision="bf16")
    torch.manual_seed(0)
    plain = models.tied()
    parameters = dict(engine.module.named_parameters())
    for name, p in plain.named_parameters():
        master = fragment.safe_get_full_fp32_param(parameters[name])
        assert master is not None and master.dtype == torch.float32 and torch.equal(master, p)
        assert fragment.safe_get_full_grad(parameters[name]) is None
    _backward(engine)
    some = [parameters[name] for name in ("embedding.weight", "blocks.1.up.weight", "norm.bias")]
    for p in some:
        grad = fragment.safe_get_full_grad(p)
        assert grad is not None and grad.shape == p.shape and grad.dtype == torch.float32
        local = fragment.safe_get_local_grad(p)
        assert local is not None and torch.equal(local, _own(grad))
        fragment.safe_set_full_grad(p, grad * 2)
        assert torch.equal(fragment.safe_get_full_grad(p), grad * 2)  # type: ignore[arg-type]
        fragment.safe_set_local_grad(p, local)
        assert torch.equal(fragment.safe_get_full_grad(p), grad)  # type: ignore[arg-type]
    fragment.safe_update_full_grad_vectorized(list(parameters.values()), lambda grad, p: torch.ones_like(grad))
    engine.step()
    for p in some:
        for key in ("exp_avg", "exp_avg_sq"):
            state = fragment.safe_get_full_optimizer_state(p, key)
            assert state is not None
            assert state.allclose(torch.tensor(0.1 if key == "exp_avg" else 0.001))
            value = torch.rand(p.shape, generator=torch.Generator().manual_seed(1))
            fragment.safe_set_full_optimizer_state(p, value, key)
            assert torch.equal(fragment.safe_get_full_optimizer_state(p, key), value)  # type: ignore[arg-type]
            fragment.safe_set_local_optimizer_state(p, _own(value * 2), key)
            assert torch.equal(fragment.safe_get_local_optimizer_state(p, key), _own(value * 2))  # type: ignore[arg-type]
        fragment.safe_set_full_fp32_param(p, value)
        assert torch.equal(fragment.safe_get_local_fp32_param(p), _own(value))  # type: ignore[arg-type]
        fragment.safe_set_local_fp32_param(p, _own(value + 1))
        assert torch.equal(fragment.safe_get_full_fp32_param(p), value + 1)  # type: ignore[arg-type]
        with sf.whole(p):
            assert torch.equal(p, (value + 1).bfloat16())
    with pytest.raises(ConfigError, match="exp_avg"):
        fragment.safe_get_full_optimizer_state(p, "exp_av")
    with pytest.raises(ValueError, match="elements"):
        fragment.safe_set_full_fp32_param(p, torch.ones(1))
    free = nn.Parameter(torch.ones(2))
    free.sum().backward()
    assert fragment.safe_get_full_fp32_param(free) is None and fragment.safe_get_full_grad(free) is free.grad
    engine.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3"])
def test_states_can_be_read_and_written_under_every_stage(ranks: Ranks, layout: str) -> None:
    ranks.run(_states, layout, world_size=2)


def _frozen() -> None:
    torch.manual_seed(0)
    engine = sf.Engine(models.frozen(), optimizer=ADAMW, accumulate=2)
    zero.note_parameters(engine)
    fixed = engine.module.embedding.weight  # type: ignore[union-attr]
    _backward(engine)
    head = _head(engine.module)
    assert fragment.safe_get_full_grad(head).abs().sum() > 0  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(UsageError, match="last backward"):
        fragment.safe_set_full_grad(head, torch.zeros(head.shape))
    assert fragment.safe_get_full_grad(fixed) is None and fragment.safe_get_full_fp32_param(fixed) is None
    fragment.safe_set_full_fp32_param(fixed, torch.zeros(fixed.shape))
    with zero.GatheredParameters(fixed):
        assert fixed.abs().sum() > 0
    engine.close()


def test_frozen_parameters_and_gradients_that_are_not_there_yet(ranks: Ranks) -> None:
    ranks.run(_frozen, world_size=2)


# -- clients --------------------------------------------------------------------------------------------------------


@contextmanager
def _unwrapped(engine: Any) -> Iterator[None]:
    """What trl's ``unwrap_model_for_generation`` does to an engine."""
    offload = engine.optimizer.parameter_offload
    with zero.GatheredParameters(engine.module.parameters()):
        module = offload.module
        for _, p in [*module.named_parameters(), *module.ds_external_parameters()]:
            p.ds_active_sub_modules.clear()
        for handle in [*offload.forward_hooks, *offload.backward_hooks]:
            handle.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        yield
        if not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()
        offload._register_deepspeed_module(module)


def _generates() -> None:
    engine = _engine()
    batch = next(iter(models.batches(1)))
    _backward(engine)
    engine.step()
    with _unwrapped(engine), torch.no_grad():
        assert all(p.ds_status == pp.ZeroParamStatus.AVAILABLE for p in engine.module.parameters())  # type: ignore[union-attr, attr-defined]
        for _ in range(dist.get_rank() + 1):
            engine.module(*batch)
    _backward(engine)
    assert engine.step().updated and _head(engine.module).ds_status is NOT_AVAILABLE
    engine.close()


def test_trl_generates_with_a_gathered_model(ranks: Ranks) -> None:
    ranks.run(_generates, world_size=2)


def _compared() -> tuple[bool, ...]:
    with zero.Init(dtype=torch.float):
        made = [nn.Linear(5, 7, bias=False) for _ in range(3)] + [nn.Linear(7, 5, bias=False)]
    first, same, last, turned = (each.weight for each in made)
    with zero.GatheredParameters([first, same, last], modifier_rank=0):
        same.data.copy_(first)
        last.data.copy_(first)
        last.data[-1, -1] += 1  # which only the last rank has
    ways = (torch.equal(first, same), torch.equal(first, last), torch.equal(first, turned))
    with pytest.raises(FreedParameterError):
        torch.equal(first, torch.zeros(7, 5))
    return ways


def test_parameters_that_are_split_are_compared(ranks: Ranks) -> None:
    """By all of their values, on every rank with the same answer: transformers ties what a file has twice by it."""
    assert ranks.run(_compared, world_size=2) == [(True, False, False)] * 2


def _pretrained(path: str) -> None:
    """Transformers under an active ``HfDeepSpeedConfig``: each weight is read into the parts of ranks."""
    from shardfold import compat

    compat.install()
    if dist.get_rank() == 0:
        _save_pretrained(path)
    dist.barrier()
    _load_pretrained(path)


def _load_pretrained(path: str) -> None:
    import transformers
    from safetensors.torch import load_file
    from transformers.integrations import HfDeepSpeedConfig

    config = HfDeepSpeedConfig({**EARLY_CONFIG, "bf16": {"enabled": False}})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fresh: Any = transformers.AutoModelForCausalLM.from_config(model.config)
    stored = load_file(Path(path, "model.safetensors"))
    assert all(p.ds_status is NOT_AVAILABLE for p in [*model.parameters(), *fresh.parameters()])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with zero.GatheredParameters([*model.parameters(), *fresh.parameters()]):
        assert all(torch.equal(p, stored[name]) for name, p in model.named_parameters())
        assert fresh.model.embed_tokens.weight.std() < 0.05
    model.resize_token_embeddings(70, mean_resizing=False)
    engine = sf.Engine(model, optimizer=ADAMW)
    zero.note_parameters(engine)
    tokens = torch.arange(8)[None]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    assert engine.step().updated and model.lm_head.weight.ds_shape == (70, 16)
    engine.close()
    del config


def _save_pretrained(path: str) -> None:
    import transformers
    from safetensors.torch import save_file

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"])
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(path)
    values = dict(model.named_parameters())
    values["lm_head.weight"] = values["model.embed_tokens.weight"].clone()  # as many files have it, too
    save_file(values, Path(path, "model.safetensors"), {"format": "pt"})


@pytest.mark.soak
def test_transformers_loads_a_model_no_rank_has_whole(tmp_path: Path) -> None:
    """In processes of their own, as transformers looks for DeepSpeed when it is imported."""
    pytest.importorskip("accelerate")
    run_ranks(_pretrained, 2, str(tmp_path))


# -- the rest -------------------------------------------------------------------------------------------------------


def test_external_parameters_are_kept() -> None:
    module, weight = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    zero.register_external_parameter(module, weight)
    assert list(module.ds_external_parameters()) == [(id(weight), weight)]  # type: ignore[operator]
    assert [p for _, p in module.all_parameters()] == [module.weight, module.bias, weight]  # type: ignore[operator]
    zero.unregister_external_parameter(module, weight)
    assert not list(module.ds_external_parameters())  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="not a registered external parameter"):
        zero.unregister_external_parameter(module, weight)
    with pytest.raises(RuntimeError, match=r"not a torch\.nn\.Parameter"):
        zero.register_external_parameter(module, torch.ones(2))  # type: ignore[arg-type]


def test_leaf_modules_are_flagged_by_class_name_and_suffix() -> None:
    model = models.small()
    blocks = utils.set_z3_leaf_modules(model, [models.Block])
    assert blocks == list(model.blocks) == utils.get_z3_leaf_modules(model)  # type: ignore[arg-type]
    assert utils.z3_leaf_module(blocks[0]) and not utils.z3_leaf_module(model)
    assert utils.unset_z3_leaf_modules(model, ["Block"]) == blocks and not utils.get_z3_leaf_modules(model)
    assert utils.set_z3_leaf_modules_by_name(model, ["head", "hed"], raise_if_not_found=False)[1] == ["hed"]
    assert len(utils.set_z3_leaf_modules_by_suffix(model, ["norm"])[0]) == 4
    with pytest.raises(ValueError, match="no module of class Conv2d"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d])
    assert utils.set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []


class _Both(nn.Module):
    """Two layers that read what needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 7), nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x).tanh()


def _edited(stage: int) -> bool:
    config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    model = nn.Linear(4, 3)
    engine = initialize(model=model, optimizer=partial(torch.optim.SGD, lr=0.1), config=config)[0]
    with torch.no_grad():
        model.weight.fill_(0.25)
    found = utils.safe_get_full_fp32_param(model.weight)
    engine.destroy()
    return found is not None and found.dtype == torch.float32 and bool(found.eq(0.25).all())


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_written_into_a_parameter_of_16_bits_is_read_in_fp32(ranks: Ranks, stage: int) -> None:
    """At once, before any forward has carried it over."""
    assert all(ranks.run(_edited, stage, world_size=2))


def _leaf(stage: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(_Both(), nn.Linear(7, 3))
    model = copy.deepcopy(plain)
    fired: list[int] = []
    model[0].register_full_backward_hook(lambda *_: fired.append(1))
    utils.set_z3_leaf_modules(model, [_Both])
    more = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, **more}}
    engine = initialize(model=model, optimizer=partial(torch.optim.SGD, lr=0.1), config=config)[0]
    inputs = torch.randn(2, 4, 5)
    engine.backward(engine(inputs[dist.get_rank()]).square().mean())
    plain(inputs.flatten(0, 1)).square().mean().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(utils.safe_get_full_grad(mine), other.grad)
    assert fired == [1]
    engine.step()
    engine.destroy()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # PyTorch's own words about such a module
@pytest.mark.parametrize("stage", [0, 3])
def test_a_leaf_module_whose_inputs_need_no_gradient_trains(ranks: Ranks, stage: int) -> None:
    """Its gradients are PyTorch's over both ranks' rows, and its backward hook runs once."""
    ranks.run(_leaf, stage, world_size=2)


def _tiled() -> None:
    torch.manual_seed(0)
    whole, x = nn.Linear(7, 5), torch.rand(3, 7)
    with zero.Init(dtype=torch.float):
        tiled = zero.TiledLinear(7, 5, in_splits=3, out_splits=2, init_linear=whole)
    engine = sf.Engine(tiled)
    torch.testing.assert_close(engine(x), whole(x))
    engine.close()


def test_tiled_linear_is_a_linear(ranks: Ranks) -> None:
    ranks.run(_tiled, world_size=2)
    whole, x = nn.Linear(6, 5, bias=False), torch.rand(3, 6)
    apart = zero.TiledLinear(6, 5, bias=False, in_splits=2, input_is_already_split=True, combine_out_splits=False)
    apart.copy_params_from(whole)
    torch.testing.assert_close(apart(x.split(3, -1))[0], whole(x))
    with pytest.raises(RuntimeError, match="in_splits=7"):
        zero.TiledLinear(6, 5, in_splits=7)


def test_what_is_dropped_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with zero.Init(dtype=torch.float):
        layer = nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, "shardfold"), zero.GatheredParameters(layer.weight), torch.no_grad():
        layer.weight.zero_()
    assert "changed inside" in caplog.text


def test_estimates_are_deepspeeds(capsys: pytest.CaptureFixture[str]) -> None:
    """The table that DeepSpeed's documentation shows for T0 of 3B parameters on one GPU."""
    estimates.estimate_zero3_model_states_mem_needs_all_cold(2_783_959_040, 65_798_144)
    rows = [[float(cell.strip(" GB")) for cell in line.split("|")[:2]] for line in _table(capsys)]
    assert rows == [[70.0, 0.25], [70.0, 0.25], [62.23, 5.43], [62.23, 5.43], [0.37, 46.91], [15.56, 46.91]]
    estimates.estimate_zero2_model_states_mem_needs_all_live(nn.Linear(1000, 1000))
    assert len(_table(capsys)) == 2
    estimates.estimate_zero3_model_states_mem_needs_all_live(nn.Linear(1000, 1000), num_gpus_per_node=2)
    assert len(_table(capsys)) == 6


def _table(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "GB |" in line]
