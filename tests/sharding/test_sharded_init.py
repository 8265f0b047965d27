"""Models whose parameters are split while they are built: no rank has them whole, and nothing else differs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import FreedParameterError, OrderError, UsageError
from shardfold.sharding import partitioned as early
from shardfold.sharding.freed import FreedParameter
from shardfold.sharding.partitioned import early_shard
from shardfold.sharding.sharded_init import shard_module
from shardfold.testing import Ranks
from tests.support import models
from tests.support.options import grouped

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Zoo(nn.Module):
    """Modules whose constructors do more than to make parameters; and one that writes into its parts'."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.embedding = nn.Embedding(11, 8, padding_idx=3)
        self.attention = nn.MultiheadAttention(8, 2)
        self.rnn = nn.LSTM(8, 4, num_layers=2)
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # copies the layer
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
        self.scale = nn.Parameter(torch.rand(()))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.table = nn.Parameter(torch.arange(6), requires_grad=False)
        self.head = nn.Linear(8, 11, bias=False)
        nn.init.constant_(self.head.weight, 0.5)
        self.apply(self.start)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.conv.bias.copy_(self.conv.weight.sum((1, 2, 3)))  # type: ignore[union-attr]

    def start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight)
            module.weight.data.mul_(2)


def _whole(model: nn.Module) -> dict[str, Tensor]:
    with sf.whole(model.parameters()):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _zoo() -> list[str]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    with sf.sharded_init():
        model = Zoo()
    sealed = [isinstance(p, FreedParameter) for p in model.parameters()]
    assert all(sealed)
    assert model.head.weight is model.embedding.weight
    for p in model.parameters():
        shard = early_shard(p)
        assert shard is not None and shard.values.numel() == -(-p.numel() // 2)
    values = _whole(model)
    torch.manual_seed(0)
    plain = dict(Zoo().named_parameters())
    assert list(plain) == list(values)
    return [name for name, value in values.items() if not torch.equal(value, plain[name])]


def test_values_are_rank_0s_to_the_bit_whatever_constructors_do(ranks: Ranks) -> None:
    """Convolutions, norms, attention, recurrent and copied layers, parts that a parent initializes, ties."""
    assert ranks.run(_zoo, world_size=2) == [[], []]


def _live() -> int:
    """Bytes of the storages of all tensors that there are."""
    sizes: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor) and thing.layout is torch.strided and not thing.is_meta:
                storage = thing.untyped_storage()
                sizes[storage._cdata] = storage.size()
    return sum(sizes.values())


class Measured(nn.Linear):
    """Looks how much memory tensors have when it has been made."""

    most = 0

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        Measured.most = max(Measured.most, _live())


def _peak() -> tuple[float, float, float]:
    gc.collect()
    before, width, layers = _live(), 64, 10
    each = (width * width + width) * 4
    with sf.sharded_init():
        model = nn.Sequential(*(Measured(width) for _ in range(layers)))
    building = Measured.most - before
    taking, gather = [0], early.gather

    def looked(parameters: list[nn.Parameter]) -> None:
        gather(parameters)
        taking[0] = max(taking[0], _live() - before)

    early.gather = looked
    try:
        engine = sf.Engine(model, layout="zero3", overlap=sf.Overlap(bucket=None))
    finally:
        early.gather = gather
    gc.collect()
    resting = _live() - before
    engine.close()
    return building / each, taking[0] / each, resting / each


@pytest.mark.soak
def test_no_rank_ever_has_the_whole_model(ranks: Ranks) -> None:
    """In layers, of 10, on 2 ranks: 5 rest; while building one is whole, and while an engine takes the model over, one
    and the flat that it goes to. Gloo may keep the buffers of its last collective a little longer."""
    for building, taking, resting in ranks.run(_peak, world_size=2):
        assert building < 6.1
        assert taking < 8.2
        assert resting < 6.1


def _trained(model: nn.Module, layout: str, **options: object) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    identities = [id(p) for p in model.parameters()]
    engine = sf.Engine(model, optimizer=ADAMW, **grouped(layout=layout, **options))  # type: ignore[arg-type]
    same = identities == [id(p) for p in model.parameters()] and sf.engine_of(next(model.parameters())) is engine
    first = engine.state_dict()
    for batch in models.batches(2):
        engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch)))
        engine.step()
    last = engine.state_dict()
    engine.close()
    return first, last, same and sf.engine_of(next(model.parameters())) is None


def _taken_over(layout: str) -> list[str]:
    torch.manual_seed(0)
    plain = models.tied()
    torch.manual_seed(torch.distributed.get_rank())
    with sf.sharded_init():
        model = models.tied()
    first, last, same = _trained(model, layout)
    assert same
    expected_first, expected_last, _ = _trained(plain, layout)
    wrong = [name for name in first if not torch.equal(first[name], expected_first[name])]
    return wrong + [name for name in last if not torch.equal(last[name], expected_last[name])]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3", "fsdp2"])
def test_an_engine_takes_the_model_over_and_trains_it_as_any_other(ranks: Ranks, layout: str) -> None:
    assert ranks.run(_taken_over, layout, world_size=2) == [[], []]


def _mixed() -> bool:
    torch.manual_seed(0)
    plain = models.small()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    with sf.sharded_init(dtype=torch.bfloat16):
        model = models.small()
    with sf.meta_init():
        model.head = nn.Linear(models.WIDTH, models.VOCAB)  # type: ignore[assignment]
    model.norm = plain.norm
    assert early_shard(model.embedding.weight) and model.embedding.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert model.head.weight.is_meta and early_shard(model.norm.weight) is None  # type: ignore[union-attr, arg-type]
    first, _, _ = _trained(model, "zero3", weights=state)
    return all(torch.equal(first[name].float(), value.to(first[name].dtype).float()) for name, value in state.items())


def test_early_ordinary_and_meta_parameters_make_one_model(ranks: Ranks) -> None:
    assert ranks.run(_mixed, world_size=2) == [True, True]


def _before_an_engine() -> None:
    rank = torch.distributed.get_rank()
    batch = next(iter(models.batches(1)))
    torch.manual_seed(1)
    plain = models.small()
    with sf.sharded_init():
        with sf.sharded_init():  # joins the outer one
            model = models.small()
        assert early_shard(next(model.parameters())) is not None
        own = nn.Linear(4, 2)
        own.weight.data.fill_(rank + 2.0)  # touched in the block: rank 0's when it ends
    with pytest.raises(FreedParameterError, match=r"'embedding\.weight' .*: give its model to an Engine, or wrap"):
        model(*batch)
    shown = model.state_dict()
    assert {name: (v.shape, v.dtype) for name, v in shown.items()} == {
        name: (v.shape, v.dtype) for name, v in plain.state_dict().items()
    }
    with pytest.raises(FreedParameterError, match="embedding"):
        shown["embedding.weight"].sum()
    with sf.whole(model.parameters(), source=0):
        if rank == 0:
            model.load_state_dict(plain.state_dict())
    with sf.whole(model.parameters()):
        assert torch.equal(model(*batch), plain(*batch))
    with sf.whole(own.weight):
        assert own.weight.eq(2).all()
    with sf.whole(own.weight, source=1):  # another shape
        own.weight.data = torch.full((3, 4), float(rank))
    assert own.weight.shape == (3, 4)
    with sf.whole([own.weight, None, own.weight, own.bias, plain.head.weight]):
        assert own.weight.eq(1).all()


def test_before_an_engine_whole_gathers_and_all_else_raises_one_sentence(ranks: Ranks) -> None:
    ranks.run(_before_an_engine, world_size=2)


def _alone() -> None:
    with sf.sharded_init():
        model = nn.Linear(4, 4)
    assert isinstance(model.weight, FreedParameter)
    with sf.whole(model.weight, source=0), torch.no_grad():
        model.weight.fill_(3)
    engine = sf.Engine(model)
    assert engine.state_dict()["weight"].eq(3).all()
    engine.close()


def test_one_rank_needs_nobody() -> None:
    _alone()


def _existing() -> bool:
    torch.manual_seed(0)
    model = models.tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shard_module(model)
    assert all(isinstance(p, FreedParameter) for p in model.parameters())
    return all(torch.equal(value, before[name]) for name, value in _whole(model).items())


def test_a_model_that_exists_can_be_split(ranks: Ranks) -> None:
    assert ranks.run(_existing, world_size=2) == [True, True]


def _mixed_owners(caught: list[logging.LogRecord]) -> None:
    rank = torch.distributed.get_rank()
    engines = [
        sf.Engine(models.small(), optimizer=ADAMW, layout=layout, precision="bf16") for layout in ("zero3", "fsdp2")
    ]
    with sf.sharded_init():
        late = models.small()
    weights = [e.module.head.weight for e in engines] + [late.head.weight]  # type: ignore[union-attr]
    with sf.whole(set(weights), source=1), torch.no_grad():
        for weight in weights:
            weight.fill_(rank + 0.5)
    with sf.whole(weights):
        assert all(weight.eq(1.5).all() for weight in weights)
    for engine in engines:
        with engine.gathered("head.weight", of="master") as master:
            assert master.eq(1.5).all()
    for weight in weights:
        with pytest.raises(UsageError, match="changed inside"), sf.whole(weight), torch.no_grad():
            weight.fill_(7)
    with sf.whole(weights, strict=False), torch.no_grad():
        weights[0].fill_(7)
        weights[1].data = torch.zeros_like(weights[1])
        weights[2].fill_(7)
    with sf.whole(weights):
        assert all(weight.eq(1.5).all() for weight in weights)
    for engine in engines:
        engine.close()


def test_whole_finds_who_holds_each_parameter(ranks: Ranks) -> None:
    """Engines of two layouts, and a model without one, in one block; another rank's values than 0's."""
    ranks.run(_mixed_owners, [], world_size=2)


def _disagreement(build: Callable[[int], object]) -> str:
    rank = torch.distributed.get_rank()
    try:
        build(rank)
    except OrderError as error:
        return str(error)
    return ""


def _other_modules(rank: int) -> None:
    with sf.sharded_init(patience=2.0):
        nn.Linear(4, 4 + rank)


def _other_touch(rank: int) -> None:
    with sf.sharded_init(patience=2.0):
        layer, _ = nn.Linear(4, 4), nn.Linear(4, 4)
        if rank:
            layer.weight.data.zero_()


def _gathered_alone(rank: int) -> None:
    with sf.sharded_init(patience=2.0):
        layer = nn.Linear(4, 4)
    if rank:
        with sf.whole(layer.weight):
            pass
    engine = sf.Engine(layer, runtime=sf.Runtime(patience=2.0))
    engine.close()


def _left_alone(rank: int) -> None:
    with sf.sharded_init(patience=2.0):
        layer = nn.Linear(4, 4)
    try:
        with sf.whole(layer.weight, source=0):
            assert rank == 0
    except AssertionError:
        raise OrderError("left by an exception of its own") from None


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (_other_modules, "construction of a Linear"),
        (_other_touch, "a gather of Linear.weight"),
        (_gathered_alone, "a gather of weight"),
        (_left_alone, "exception"),
    ],
)
def test_ranks_that_differ_raise_instead_of_waiting(ranks: Ranks, build: Callable[[int], object], said: str) -> None:
    for text in ranks.run(_disagreement, build, world_size=2):
        assert said in text


def _constructors_are_left_as_they_were() -> None:
    before = {kind: vars(kind).get("__init__") for kind in (nn.Linear, nn.Sequential, nn.MultiheadAttention)}
    with pytest.raises(ValueError, match="mine"), sf.sharded_init():

        class Defined(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2))

        assert isinstance(Defined().weight, FreedParameter)
        raise ValueError("mine")
    assert before == {kind: vars(kind).get("__init__") for kind in before}
    assert "__init_subclass__" not in vars(nn.Module) and not isinstance(Defined().weight, FreedParameter)


def test_an_exception_ends_the_block() -> None:
    _constructors_are_left_as_they_were()


@pytest.mark.soak
def test_engine_of_keeps_nothing_alive() -> None:
    engine = sf.Engine(models.small(), optimizer=ADAMW)
    weight = engine.module.head.weight  # type: ignore[union-attr]
    assert sf.engine_of(weight) is engine and sf.engine_of(nn.Parameter(torch.ones(1))) is None
    engine.module.extra = nn.Linear(2, 2)
    engine.module(*next(iter(models.batches(1))))
    assert sf.engine_of(engine.module.extra.weight) is engine  # type: ignore[union-attr]
    del engine
    gc.collect()
    assert sf.engine_of(weight) is None
