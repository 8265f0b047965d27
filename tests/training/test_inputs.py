"""Parameters, buffers, inputs and outputs of unusual shapes and kinds: as in plain PyTorch, or one sentence."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ModelError
from shardfold.sharding.tree import cast_floats
from shardfold.testing import Ranks, same_training

pytestmark = pytest.mark.product

WIDTH = 16
LAYOUTS = list(sf.PRESETS)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def mesh_for(layout: str) -> dict[str, int] | None:
    return {"inter": 2, "intra": 1} if layout in ("hsdp", "hpz") else None


def batches(steps: int = 4) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(8, WIDTH, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(steps)]


class Model(nn.Module):
    block: Callable[[], nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(type(self).block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)


# -- parameters -------------------------------------------------------------------------------------------------------


class OddBlock(nn.Module):
    """Parameters of no elements, of no dims, transposed, channels last; a list, a dict and a frozen scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.none = nn.Parameter(torch.empty(0))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor(0.25), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t() * 0.1)
        self.conv = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.strided = nn.Parameter(torch.randn(4, 2 * WIDTH)[:, ::2])
        self.listed = nn.ParameterList([torch.randn(WIDTH) * 0.1 for _ in range(2)])
        self.named = nn.ParameterDict({"a": torch.ones(1)})

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(x @ self.transposed.t()).view(-1, 1, 8, 4)
        image = self.conv(wide.contiguous(memory_format=torch.channels_last)).mean(1).flatten(1)
        x = x + self.scale * image[:, :WIDTH] + self.shift + self.strided.mean(0)
        x = x + self.listed[0] * self.listed[1] * self.named["a"]
        return torch.cat([x, x @ self.nothing.t(), self.none.expand(x.shape[0], 0)], dim=1)


class Odd(Model):
    block = OddBlock


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_0d_and_noncontiguous_parameters_train_as_in_plain_pytorch(ranks: Ranks, layout: str) -> None:
    for optimizer in (SGD, ADAMW):
        same_training(
            Odd, batches(), layout=layout, world_size=2, parallel=mesh_for(layout), optimizer=optimizer, steps=4,
            parameter_tol=1e-5, clip_norm=1.0, ranks=ranks,
        )  # fmt: skip


class Empty(nn.Module):
    """A unit of which all parameters are empty, and a model whose root has none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(0, 0) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.cat([x, block(x[:, :0])], dim=1)
        return F.cross_entropy(self.head(x), y)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_of_nothing_but_empty_parameters_train_as_in_plain_pytorch(ranks: Ranks, layout: str) -> None:
    same_training(
        Empty, batches(), layout=layout, world_size=2, parallel=mesh_for(layout), optimizer=SGD, steps=3,
        parameter_tol=1e-5, ranks=ranks,
    )  # fmt: skip


def test_a_parameter_that_is_expanded_is_refused_by_name() -> None:
    model = nn.Linear(4, 4)
    model.bias = nn.Parameter(torch.zeros(1).expand(4))
    with pytest.raises(ModelError, match=r"'bias' is an expanded tensor, so its elements share memory.*clone"):
        sf.Engine(model, optimizer=SGD)


def test_a_parameter_that_is_not_initialized_yet_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    with pytest.raises(ModelError, match=r"'0\.weight' has no shape yet.* run the model once"):
        sf.Engine(model, optimizer=SGD)
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(ModelError, match=r"run the model once"):
        sf.Engine(lazy)


def test_two_parameters_with_one_memory_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight.data = model[0].weight.data  # no tie for autograd or an optimizer
    with pytest.raises(ModelError, match=r"'0\.weight' and '1\.weight' share memory .* assign the parameter itself"):
        sf.Engine(model, optimizer=SGD)
    whole = torch.zeros(2, 8)
    apart = nn.ParameterList([whole[0], whole[1, :4], whole[1, 4:]])  # neighbours in one storage are fine
    sf.Engine(apart, optimizer=SGD).close()
    interleaved = nn.ParameterList([whole[:, ::2], whole[:, 1::2]])
    sf.Engine(interleaved, optimizer=SGD).close()


class Sparse(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(50, WIDTH, mode="sum", sparse=True)
        self.other = nn.Embedding(30, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = (x.abs() * 10).long() % 30
        return F.cross_entropy(self.head(self.embedding(rows) + self.other(rows).mean(1)), y)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_gradients_train_as_dense_ones_do(ranks: Ranks, layout: str) -> None:
    same_training(
        Sparse, batches(), layout=layout, world_size=2, parallel=mesh_for(layout), accumulate=2,
        optimizer=partial(torch.optim.SGD, lr=0.1), steps=4, parameter_tol=1e-5, ranks=ranks,
    )  # fmt: skip


# -- buffers ----------------------------------------------------------------------------------------------------------


class BufferBlock(nn.Module):
    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("missing", None)
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)
        self.register_buffer("shared", shared)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.steps.add_(1)
            self.shared.add_(1.0)
        assert self.missing is None
        return x + self.linear(x) * self.table + self.shared * 1e-3


class BufferModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = torch.zeros(WIDTH)
        self.blocks = nn.ModuleList(BufferBlock(shared) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_of_all_kinds_are_as_in_plain_pytorch(ranks: Ranks, layout: str) -> None:
    same_training(  # buffers are compared with the parameters
        BufferModel, batches(), layout=layout, world_size=2, parallel=mesh_for(layout), optimizer=SGD, steps=4,
        parameter_tol=1e-5, ranks=ranks,
    )  # fmt: skip


def _buffers() -> list[str]:
    torch.manual_seed(dist.get_rank())
    model = BufferModel()
    plain = set(model.state_dict())
    shared = [block.shared for block in model.blocks]
    engine = sf.Engine(model, optimizer=SGD, layout="zero3", precision="bf16")
    wrong = []
    if set(engine.state_dict()) != plain:
        wrong.append("another state dict")
    if any(block.shared is not shared[0] for block in model.blocks):
        wrong.append("shared no more")
    first: Any = model.blocks[0]
    if (first.steps.dtype, first.flags.dtype, first.table.dtype) != (torch.int64, torch.bool, torch.float32):
        wrong.append("cast")
    engine.close()
    return wrong


def test_buffers_keep_their_dtype_and_stay_shared(ranks: Ranks) -> None:
    assert ranks.run(_buffers, world_size=2) == [[], []]


# -- inputs and outputs -----------------------------------------------------------------------------------------------

Point = namedtuple("Point", ["x", "rest"])


class Typed(NamedTuple):
    x: Tensor
    note: str = "kept"


@dataclass
class Data:
    x: Tensor
    extra: Any = None
    derived: Tensor | None = field(default=None, init=False)


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    rest: tuple[Any, ...] = ()


class Encoding(UserDict):  # type: ignore[type-arg]
    """As transformers' BatchEncoding: a mapping that is no dict, with attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError as error:
            raise AttributeError(name) from error


class Output(OrderedDict):  # type: ignore[type-arg]
    """As transformers' ModelOutput: keys are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Holder:
    """An object of the user's."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def _output(**values: Any) -> Output:
    made = Output()
    for key, value in values.items():
        made[key] = value
    return made


PACK: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: [x, 1],
    "tuple": lambda x: (x, "text"),
    "dict": lambda x: {"x": x, "n": None},
    "nested": lambda x: {"a": [({"x": x},)]},
    "namedtuple": lambda x: Point(x, [1]),
    "NamedTuple": lambda x: Typed(x),
    "dataclass": lambda x: Data(x, extra={"k": [x]}),
    "frozen dataclass": lambda x: Frozen(x, (1, x)),
    "ordered dict": lambda x: OrderedDict(x=x),
    "encoding": lambda x: Encoding(x=x, ids=torch.arange(3)),
    "model output": lambda x: _output(x=x, hidden=(x, x)),
    "namespace": lambda x: SimpleNamespace(x=x),
    "object": Holder,
}


def unpack(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple)):
        return unpack(value[0])
    if isinstance(value, dict) and "a" in value:
        return unpack(value["a"])
    return value["x"] if isinstance(value, (dict, UserDict)) else value.x


class ContainerBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any, *, more: Any = None) -> Any:
        x = unpack(value)
        assert more is None or unpack(more).dtype == x.dtype
        return PACK[self.kind](x + torch.tanh(self.linear(x)))


class Containers(nn.Module):
    """What a block takes and gives is a container; the model's input and output too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(ContainerBlock(kind) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, value: Any, more: Any = None) -> Any:
        if isinstance(value, Tensor):
            value = PACK[self.kind](value)
        for block in self.blocks:
            value = block(value, more=value)
        return PACK[self.kind](self.head(unpack(value)))


def _loss(output: Any, batch: tuple[Any, ...]) -> Tensor:
    return F.cross_entropy(unpack(output).float(), batch[-1])


@pytest.mark.sampled(14)
@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_containers_and_objects_as_inputs_and_outputs_train_as_in_plain_pytorch(
    ranks: Ranks, layout: str, kind: str
) -> None:
    same_training(
        partial(Containers, kind), batches(), layout=layout, world_size=2, parallel=mesh_for(layout), optimizer=SGD,
        steps=3, parameter_tol=1e-5, loss=_loss, ranks=ranks,
    )  # fmt: skip


def _bf16(kinds: list[str]) -> list[str]:
    """The model's input comes in containers of fp32 tensors; its weights are bf16."""
    wrong = []
    for kind in kinds:
        engine = sf.Engine(Containers(kind), optimizer=SGD, layout="zero3", precision="bf16")
        x, y = batches(1)[0]
        given = PACK[kind](x)
        loss = _loss(engine(given, more=PACK[kind](x)), (y,))
        engine.backward(loss)
        engine.step()
        if unpack(given).dtype != torch.float32 or unpack(given) is not x:
            wrong.append(f"{kind}: the caller's own container was changed")
        engine.close()
    return wrong


@pytest.mark.soak
def test_fp32_inputs_are_cast_inside_of_containers_and_the_callers_are_left_alone(ranks: Ranks) -> None:
    kinds = [kind for kind in PACK if kind not in ("namespace", "object")]
    assert ranks.run(_bf16, kinds, world_size=2) == [[], []]


def test_casting_keeps_types_and_what_needs_no_cast() -> None:
    x, ids = torch.ones(2), torch.arange(2)
    same = (ids, [ids], {"ids": ids}, Point(ids, []), Data(ids), Frozen(ids), "text", None, torch.Size([2]))
    for value in (*same, torch.ones(2, dtype=torch.float64), Holder(x)):
        assert cast_floats(value, torch.bfloat16) is value
    for name, pack in PACK.items():
        if name in ("namespace", "object"):
            continue
        value = pack(x)
        cast = cast_floats(value, torch.bfloat16)
        assert type(cast) is type(value) and cast is not value, name
        assert unpack(cast).dtype == torch.bfloat16 and unpack(value) is x, name
    output = cast_floats(_output(x=x), torch.bfloat16)
    assert output["x"].dtype == output.x.dtype == torch.bfloat16
    assert cast_floats(MappingProxyType({"x": x}), torch.bfloat16)["x"].dtype == torch.bfloat16
    data = Data(x)
    data.derived = x
    assert cast_floats(data, torch.bfloat16).derived.dtype == torch.bfloat16 and data.derived is x
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    cast = cast_floats(packed, torch.bfloat16)
    assert type(cast) is type(packed) and cast.data.dtype == torch.bfloat16 and cast.batch_sizes is packed.batch_sizes


def test_transformers_own_containers_are_cast() -> None:
    from transformers import BatchEncoding
    from transformers.modeling_outputs import BaseModelOutput

    x = torch.ones(2, 3)
    given = BatchEncoding({"pixel_values": x, "input_ids": torch.arange(3)})
    cast = cast_floats(given, torch.bfloat16)
    assert type(cast) is BatchEncoding and cast.pixel_values.dtype == torch.bfloat16 and given.pixel_values is x
    output = BaseModelOutput(last_hidden_state=x, hidden_states=(x, x))
    cast = cast_floats(output, torch.bfloat16)
    assert type(cast) is BaseModelOutput
    assert cast.last_hidden_state.dtype == cast["last_hidden_state"].dtype == cast[0].dtype == torch.bfloat16
    assert cast.hidden_states[1].dtype == torch.bfloat16 and output.last_hidden_state is x
