"""``Runtime(compile="blocks")``: units of a kind share a graph that nothing breaks or makes anew, and train alike."""

from __future__ import annotations

import copy
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends import registry

import shardfold as sf
from shardfold.errors import ConfigError, ModelError
from shardfold.parallel.draws import Looked
from shardfold.testing import Ranks
from tests.support import experts, models, zoo

# Dynamo looks at ``.grad`` of every input, also of those that are no leaves, and makes an object of each autograd
# function that it traces; in plain PyTorch the same.
pytestmark = [
    pytest.mark.product,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

LAYOUTS = list(sf.PRESETS)
MODES = ["recompute", "select", "host", "disk", "packed"]
STEPS = 4
ARCHITECTURES = [
    "llama", "bert", "t5_tied", "vit", "clip", "wav2vec2",
    "mixtral", "mamba", "llama_lora", "mistral", "roberta", "mt5",
]  # fmt: skip
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

Loss = Callable[[Any, Any], Tensor]


class Graphs:
    """A backend that counts graphs, and runs them as another does."""

    def __init__(self, backend: str) -> None:
        self.made = 0
        self._run = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        self.made += 1
        return self._run(graph, inputs, **options)

    @classmethod
    def registered(cls, backend: str) -> Graphs:
        """A new one, which torch.compile knows as "graphs" from now on."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        made = cls(backend)
        registry._BACKENDS.pop("graphs", None)
        registry._COMPILER_FNS.pop("graphs", None)
        torch._dynamo.register_backend(made, name="graphs")
        return made


def mesh_of(layout: str) -> dict[str, int] | None:
    return {"inter": 2, "intra": dist.get_world_size() // 2} if layout in ("hsdp", "hpz") else None


def trained(
    model: nn.Module, batches: Sequence[Any], backend: str | None = "eager", loss: Loss | None = None, **options: Any
) -> dict[str, Any]:
    """Steps of an engine on this rank's part of each batch: losses, weights behind them, and of graphs how many there
    were behind each step, and how many breaks. From the third step on nothing may be compiled."""
    graphs = Graphs.registered(backend) if backend is not None else None
    runtime = sf.Runtime(compile="blocks:graphs" if backend is not None else None)
    engine = sf.Engine(model, **{"optimizer": SGD, "runtime": runtime, **options})
    losses, made = [], []
    try:
        for step, batch in enumerate(batches):
            with torch.compiler.set_stance("fail_on_recompile" if step >= 2 else "default"):
                value = run(engine, sliced(batch, engine.data_ranks, engine.data_rank), loss)
                engine.step()
            losses.append(engine.mean(value.item()))
            made.append(graphs.made if graphs is not None else 0)
        state = engine.state_dict()
        return {
            "losses": losses,
            "state": state if engine.rank == 0 else {},
            "made": made,
            "breaks": dict(torch._dynamo.utils.counters["graph_break"]),
            "explained": engine.explain(),
            "transient": engine.memory().transient,
        }
    finally:
        engine.close()


def run(engine: sf.Engine, part: Any, loss: Loss | None) -> Tensor:
    """Forward and backward of this rank's part of a batch; the loss."""
    if "pipeline" in engine.mesh.sizes:
        return engine.train_batch(tuple(part))
    given = part if engine.sequence is None else sf.sequence_shard(part)
    output = engine(**given) if isinstance(given, Mapping) else engine(*given)
    value = output if loss is None else loss(output, part)
    engine.backward(value)
    return value


def sliced(batch: Any, count: int, number: int) -> Any:
    if isinstance(batch, Mapping):
        return {key: value.chunk(count)[number] for key, value in batch.items()}
    return [value.chunk(count)[number] for value in batch]


def plain_losses(model: nn.Module, batches: Sequence[Any], optimizer: Any, loss: Loss | None = None) -> list[float]:
    made, losses = optimizer(model.parameters()), []
    for batch in batches:
        output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        value = output if loss is None else loss(output, batch)
        value.backward()
        made.step()
        made.zero_grad()
        losses.append(value.item())
    return losses


# -- architectures and layouts


def _architecture(name: str, layout: str, backend: str) -> tuple[dict[str, Any], list[float]]:
    torch.manual_seed(0)
    model, batches = zoo.build(name), zoo.batches(name, STEPS)
    optimizer = partial(torch.optim.AdamW, lr=zoo.ZOO[name].lr)
    expected = plain_losses(copy.deepcopy(model), batches, optimizer, partial(zoo.loss, name))
    mesh = mesh_of(layout)
    found = trained(model, batches, backend, partial(zoo.loss, name), optimizer=optimizer, layout=layout, parallel=mesh)
    return found, expected


def _check_architecture(ranks: Ranks, name: str, layout: str, backend: str) -> None:
    for found, expected in ranks.run(_architecture, name, layout, backend, world_size=2):
        steps = 1 if zoo.ZOO[name].routed else STEPS
        assert found["losses"][:steps] == pytest.approx(expected[:steps], rel=1e-6)
        assert found["breaks"] == {} and "in pieces" not in found["explained"]
        # Texts have a mask, images have none; a first block behind frozen embeddings gives its input no gradient.
        kinds = found["explained"].count("  x ") + (name in ("clip", "llama_lora"))
        assert found["made"] == [kinds] * STEPS and kinds < 5, found["made"]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3", "hsdp"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_in_one_graph_for_each_kind_of_block(ranks: Ranks, name: str, layout: str) -> None:
    """Losses of plain PyTorch, no break, and from the third step on no new graph."""
    _check_architecture(ranks, name, layout, "eager")


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_under_autograd_ahead_of_time(ranks: Ranks, name: str, layout: str) -> None:
    _check_architecture(ranks, name, layout, "aot_eager")


def _small(backend: str, **options: Any) -> tuple[dict[str, Any], list[float], dict[str, Tensor]]:
    """A small model beside plain PyTorch."""
    torch.manual_seed(0)
    plain, batches = models.Small(layers=3), models.batches(STEPS)
    model = copy.deepcopy(plain)
    expected = plain_losses(plain, batches, SGD)
    return trained(model, batches, backend, **options), expected, plain.state_dict()


def _check_small(reports: list[tuple[dict[str, Any], list[float], dict[str, Tensor]]], tol: float = 1e-6) -> None:
    for found, expected, weights in reports:
        assert found["losses"] == pytest.approx(expected, rel=tol)
        for name, value in found["state"].items():
            assert (value - weights[name]).abs().max() <= tol * weights[name].abs().max(), name
        assert found["made"] == [1] * STEPS and found["breaks"] == {}, found["made"]  # three blocks
        assert found["transient"] == 0


def _layout(layout: str, mode: str, offload: str | None = None) -> Any:
    return _small("aot_eager", layout=layout, parallel=mesh_of(layout), activations=mode, offload=offload)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_share_a_graph_under_every_layout(ranks: Ranks, layout: str) -> None:
    """Of parameters that are gathered and given back, summed in each micro-batch or once, or that rest on the host."""
    _check_small(ranks.run(_layout, layout, "keep", world_size=2))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
@pytest.mark.parametrize("mode", MODES)
def test_blocks_share_a_graph_under_every_mode_of_activations(ranks: Ranks, layout: str, mode: str) -> None:
    _check_small(ranks.run(_layout, layout, mode, world_size=2))


def test_blocks_share_a_graph_where_states_rest_on_the_host(ranks: Ranks) -> None:
    _check_small(ranks.run(_layout, "zero3", "recompute", "host", world_size=2))


PRECISIONS: dict[str, Any] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "autocast": sf.Precision(autocast="bf16"),
    "norms in fp32": {"*.norm": "fp32", "norm": "fp32", "*": "bf16"},
}


def _precision(layout: str, precision: str) -> list[str]:
    """What differs from the same engine without graphs, run by PyTorch's own kernels."""
    torch.manual_seed(0)
    model, batches = models.Small(layers=2), models.batches(STEPS)
    once, again = (
        trained(copy.deepcopy(model), batches, backend, layout=layout, precision=PRECISIONS[precision])
        for backend in ("eager", None)
    )
    wrong = [name for name, value in once["state"].items() if not torch.equal(value, again["state"][name])]
    wrong += ["losses"] * (once["losses"] != again["losses"]) + list(once["breaks"])
    return wrong + ["graphs"] * (once["made"] != [1] * STEPS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_a_precision_is_the_same_to_the_bit(ranks: Ranks, layout: str, precision: str) -> None:
    assert ranks.run(_precision, layout, precision, world_size=2) == [[], []]


VARIANTS: dict[str, dict[str, Any]] = {
    "recompute": {"activations": "recompute"},
    "autocast": {"precision": PRECISIONS["autocast"]},
    "bf16": {"precision": "bf16"},
}


def _variant(name: str, layout: str, variant: str) -> tuple[list[str], list[int], dict[str, int]]:
    """What differs from the same engine without graphs, how many graphs there were, and what broke one."""
    torch.manual_seed(0)
    model, batches, loss = zoo.build(name), zoo.batches(name, STEPS), partial(zoo.loss, name)
    options: dict[str, Any] = {"layout": layout, "parallel": mesh_of(layout), **VARIANTS[variant]}
    options["optimizer"] = partial(torch.optim.AdamW, lr=zoo.ZOO[name].lr)
    once, again = (trained(copy.deepcopy(model), batches, backend, loss, **options) for backend in ("eager", None))
    return ["losses"] * (once["losses"] != pytest.approx(again["losses"], rel=1e-6)), once["made"], once["breaks"]


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("place", range(len(ARCHITECTURES)))
def test_an_architecture_in_another_precision_or_recomputed(ranks: Ranks, place: int, variant: str) -> None:
    """As without: no break, and no graph behind the first step. Layouts take turns."""
    layout = ["ddp", "zero2", "zero3", "hsdp"][(place + list(VARIANTS).index(variant)) % 4]
    for wrong, made, breaks in ranks.run(_variant, ARCHITECTURES[place], layout, variant, world_size=2):
        assert wrong == [] and breaks == {} and len(set(made)) == 1 and 0 < made[0] < 5, (wrong, made, breaks)


AXES: dict[str, Any] = {
    "tensor": sf.Parallel(mesh={"tensor": 2}, tensor="auto"),
    "stream": sf.Parallel(mesh={"tensor": 2}, tensor="auto", sequence_parallel=True),
    "sequence": sf.Parallel(mesh={"sequence": 2}),
    "ring": sf.Parallel(mesh={"sequence": 2}, attention="ring"),
    "expert": sf.Parallel(mesh={"expert": 2}),
    "pipeline": sf.Parallel(mesh={"pipeline": 2}),
}


def _axis(axis: str, layout: str, backend: str = "eager") -> tuple[list[str], list[int], str]:
    """What differs from the same engine without graphs, how many graphs there were, and what the engine says. Ulysses
    repeats keys of grouped heads in a graph, whose gradients are then summed in another order."""
    torch.manual_seed(0)
    how: dict[str, Any] = {"layout": layout, "parallel": AXES[axis], "accumulate": 1 + (axis == "pipeline")}
    model, batches = {
        "pipeline": lambda: (models.Small(layers=4), models.batches(STEPS)),
        "expert": lambda: (experts.build(torch.float32), experts.batches(torch.float32)[:STEPS]),
    }.get(axis, lambda: (zoo.build("llama"), zoo.batches("llama", STEPS)))()
    loss = (lambda output, batch: output.loss) if isinstance(batches[0], dict) else None
    once, again = (trained(copy.deepcopy(model), batches, each, loss, **how) for each in (backend, None))
    tol = 1e-5 if backend == "inductor" else 1e-6 if axis == "sequence" else 0.0
    return differing(once, again, tol), once["made"], once["explained"]


def differing(once: dict[str, Any], again: dict[str, Any], tol: float) -> list[str]:
    """Names of what differs by more than this part of the largest element."""
    wrong = [
        name
        for name, value in again["state"].items()
        if (once["state"][name] - value).abs().max() > tol * value.abs().max()
    ]
    return wrong + ["losses"] * (once["losses"] != pytest.approx(again["losses"], rel=tol, abs=0.0))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
@pytest.mark.parametrize("axis", AXES)
def test_blocks_that_ranks_share_train_the_same(ranks: Ranks, axis: str, layout: str) -> None:
    """Along an axis of tensor collectives are in the graph, along one of sequence attention is, and experts are units
    of their own; the numbers are the same, to the bit where nothing is summed in another order."""
    for wrong, made, explained in ranks.run(_axis, axis, layout, world_size=2):
        assert wrong == [] and made[0] > 0 and made[1] == made[-1], (wrong, made)
        assert "in pieces" not in explained, explained
        if axis in ("tensor", "stream"):  # all blocks share a graph, but for the one where the stream begins
            assert explained.count("LlamaDecoderLayer_") == made[0] == 1 + (axis == "stream"), explained


def _packed(attention: str, mode: str) -> tuple[list[str], list[int], str]:
    """As :func:`_axis`, of batches whose tokens do not divide by the ranks, each packed in another way, and a model
    with fewer heads of keys than ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**zoo.GROUPED, "num_key_value_heads": 1}))
    generator = torch.Generator().manual_seed(1)
    batches = [
        {
            "input_ids": torch.randint(3, zoo.VOCAB, (4, 9), generator=generator),
            "labels": torch.randint(3, zoo.VOCAB, (4, 9), generator=generator),
            "document_ids": (torch.arange(9) >= edge).long().expand(4, 9),
        }
        for edge in (3, 0, 5, 7)
    ]
    how: dict[str, Any] = {"parallel": sf.Parallel(mesh={"sequence": 2}, attention=attention), "activations": mode}
    loss: Loss = lambda output, batch: output.loss  # noqa: E731
    once, again = (trained(copy.deepcopy(model), batches, backend, loss, **how) for backend in ("aot_eager", None))
    return differing(once, again, tol=1e-6), once["made"], once["explained"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mode", ["keep", "recompute", "select"])
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_a_batch_that_is_packed_in_another_way_goes_through_the_same_graph(
    ranks: Ranks, attention: str, mode: str
) -> None:
    """What was cut is looked up as the graph runs, in backward too. Ranks have other numbers of tokens."""
    for wrong, made, explained in ranks.run(_packed, attention, mode, world_size=2):
        assert wrong == [] and made == [1] * STEPS and "in pieces" not in explained, (wrong, made, explained)


def _kept_inputs(compiled: bool) -> list[int]:
    """How many inputs of columns are there, and how many are held behind a forward."""
    Graphs.registered("eager")
    runtime = sf.Runtime(compile="blocks:graphs" if compiled else None)
    torch.manual_seed(0)
    engine = sf.Engine(zoo.build("llama"), optimizer=SGD, parallel=AXES["tensor"], runtime=runtime)
    engine(**zoo.batches("llama", 1)[0])
    engine.close()
    looked = [f for m in engine.module.modules() if isinstance(f := vars(m).get("forward"), Looked)]
    shared = [each for forward in looked for each in forward.shared]
    return [len(shared), sum(each.copied is not None for each in shared)]


@pytest.mark.parametrize("compiled", [True, False])
def test_what_columns_are_given_is_forgotten_behind_a_forward(ranks: Ranks, compiled: bool) -> None:
    """Attention and the MLP of each of two blocks have one such input; kept, it would live as long as the model."""
    assert ranks.run(_kept_inputs, compiled, world_size=2) == [[4, 0]] * 2


# -- what makes another graph


def _sizes() -> list[int]:
    graphs = Graphs.registered("eager")
    engine = sf.Engine(models.Small(layers=3), optimizer=SGD, runtime=sf.Runtime(compile="blocks:graphs"))
    made: list[int] = []
    for rows in (8, 8, 12, 12, 6, 10, 8, 14):
        tokens, targets = models.batches(1, rows=rows)[0]
        engine.backward(engine(tokens, targets))
        engine.step()
        made.append(graphs.made)
    with torch.no_grad():
        engine(tokens, targets)
    engine.close()
    return [*made, graphs.made]


def test_a_second_size_of_batches_makes_one_more_graph(ranks: Ranks) -> None:
    """For all sizes, as dimensions that change are symbols from then on; an evaluation has one of its own."""
    assert ranks.run(_sizes, world_size=1) == [[1, 1, 2, 2, 2, 2, 2, 2, 3]]


def _changed() -> list[int]:
    graphs = Graphs.registered("eager")
    model = models.Small(layers=3)
    engine = sf.Engine(model, optimizer=SGD, layout="zero3", runtime=sf.Runtime(compile="blocks:graphs"))
    made: list[int] = []
    for step, batch in enumerate(models.batches(5)):
        if step == 1:
            model.blocks[0].requires_grad_(False)
        if step == 3:
            model.blocks[0].requires_grad_(True)
        engine.backward(engine(*batch))
        engine.step()
        made.append(graphs.made)
    engine.close()
    return made


def test_a_frozen_block_is_a_kind_of_its_own(ranks: Ranks) -> None:
    """And as it trains again it finds its graph."""
    assert ranks.run(_changed, world_size=2) == [[1, 2, 2, 2, 2]] * 2


# -- what is compiled, and what is not


class Talking(models.Block):
    """A block that no graph can hold whole."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        if y.sum().item() > 1e9:
            raise ValueError("too large")
        return x + self.down(F.gelu(y))


def _talking() -> tuple[list[str], list[str], bool]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardfold").addHandler(handler)
    torch.manual_seed(0)
    model = models.Small(layers=2)
    model.blocks = nn.ModuleList(Talking() for _ in range(2))
    batches = models.batches(3)
    expected = plain_losses(copy.deepcopy(model), batches, SGD)
    found = trained(model, batches, "eager", layout="zero3")
    logging.getLogger("shardfold").removeHandler(handler)
    lines = [line for line in found["explained"].splitlines() if "in pieces" in line]
    return [text for text in said if "compile" in text], lines, found["losses"] == pytest.approx(expected, rel=1e-6)


def test_a_block_that_is_no_graph_is_compiled_in_pieces(ranks: Ranks) -> None:
    """One warning has the line of the user's code, and so has ``explain()``."""
    ((said, lines, same),) = ranks.run(_talking, world_size=1)
    assert same and len(said) == len(lines) == 1
    assert (
        "Talking_0 is no one graph and is compiled in pieces" in said[0]
        and "test_unit_graphs.py" in said[0]
        and "Talking_0" in lines[0]
    )


def _logged(layout: str) -> list[str]:
    said: list[str] = []
    handler, log = logging.Handler(logging.INFO), logging.getLogger("shardfold")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    before, _ = log.level, log.setLevel(logging.INFO)
    torch.manual_seed(0)
    trained(models.Small(layers=3), models.batches(STEPS), "aot_eager", layout=layout)
    log.removeHandler(handler)
    log.setLevel(before)
    return [text for text in said if text.startswith("compiled by")]


def test_the_log_says_what_was_compiled(ranks: Ranks) -> None:
    """Once: the kinds, how many units and graphs each has, and how long it took."""
    for said in ranks.run(_logged, "zero3", world_size=2):
        assert len(said) == 1 and re.fullmatch(r"compiled by graphs in \d+\.\d s: Block_0 x 3: 1 graph", said[0]), said


def _put_and_taken() -> tuple[list[bool], list[bool]]:
    Graphs.registered("eager")
    model = models.Small(layers=2)
    modules = [model.embedding, *model.blocks, model.head, model.blocks[0].up]
    runtime = sf.Runtime(compile="blocks:graphs")
    engine = sf.Engine(
        model, optimizer=SGD, runtime=runtime, layout="ddp", activations={"blocks.1": "recompute", "*": "keep"}
    )
    during = ["forward" in vars(module) for module in modules]
    copied: Any = copy.deepcopy(model)
    during.append("forward" in vars(copied.blocks[0]))
    engine.close()
    return during, ["forward" in vars(module) for module in modules]


def test_blocks_are_compiled_and_single_layers_are_not(ranks: Ranks) -> None:
    """Copies have their own forwards, and so has everything behind ``close()``."""
    ((during, behind),) = ranks.run(_put_and_taken, world_size=1)
    assert during == [False, True, True, False, False, False] and not any(behind)


def _in_fp8(layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Blocks whose layers multiply in fp8, but for the last one's, compiled and not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(5)))
    batches = [[torch.randn(8, 32)] for _ in range(STEPS)]

    def loss(output: Tensor, _: Any) -> Tensor:
        return output.square().mean()

    options: dict[str, Any] = {"layout": layout, "precision": "fp8", "loss": loss}
    return tuple(trained(copy.deepcopy(model), batches, backend, **options) for backend in ("eager", None))  # type: ignore[return-value]


@pytest.mark.parametrize("layout", ["zero3", pytest.param("ddp", marks=pytest.mark.soak)])
def test_products_in_fp8_are_in_graphs(ranks: Ranks, layout: str) -> None:
    """Blocks share a graph, and have the numbers of those that are not compiled. The first one's input has no gradient,
    and the last one's layer is not in fp8."""
    for compiled, plain in ranks.run(_in_fp8, layout, world_size=2):
        assert compiled["losses"] == plain["losses"] and compiled["breaks"] == {}
        assert compiled["made"] == [3] * STEPS and compiled["explained"].count("Sequential_") == 2


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("block", r"compile='block'\) is unknown\. Did you mean 'blocks'\?"),
        ("model", r"compile='model'\) is unknown\. It is 'blocks' or"),
        (True, r"compile=\.\.\.\) is True: it is 'blocks'"),
        ("blocks:aot_eagre", r"no such backend\. Did you mean 'aot_eager'\?"),
    ],
)
def test_what_is_no_way_to_compile_is_refused(given: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        sf.Engine(models.Small(), optimizer=SGD, runtime=sf.Runtime(compile=given))


def test_no_compiler_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one sentence that says how to mend it; a machine without one runs other backends."""
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler on the CPU and finds no '/nowhere/g\+\+'"):
        sf.Engine(models.Small(), optimizer=SGD, runtime=sf.Runtime(compile="blocks", device="cpu"))


def test_nothing_to_compile_is_refused() -> None:
    with pytest.raises(ModelError, match=r"compile=\.\.\.\) applies to no unit"):
        sf.Engine(nn.Linear(8, 8), optimizer=SGD, runtime=sf.Runtime(compile="blocks:eager"))


def test_a_budget_of_activations_is_refused() -> None:
    """It would measure what does not run."""
    with pytest.raises(ConfigError, match=r"'fit:1GiB' measures what runs"):
        runtime = sf.Runtime(compile="blocks:eager")
        sf.Engine(models.Small(), optimizer=SGD, activations="fit:1GiB", runtime=runtime)


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("mode", ["keep", "recompute", "select"])
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_inductor_trains_the_same(ranks: Ranks, layout: str, mode: str) -> None:
    options = {"layout": layout, "activations": mode}
    _check_small(
        ranks.run(partial(_small, **options), "inductor", world_size=2, timeout=600, warnings_as_errors=False), tol=1e-5
    )


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("name", ["llama", "bert", "vit", "mixtral"])
def test_inductor_trains_an_architecture_as_plain_pytorch_does(ranks: Ranks, name: str) -> None:
    how: dict[str, Any] = {"world_size": 2, "timeout": 600, "warnings_as_errors": False}
    for found, expected in ranks.run(_architecture, name, "zero3", "inductor", **how):
        steps = 1 if zoo.ZOO[name].routed else STEPS
        assert found["losses"][:steps] == pytest.approx(expected[:steps], rel=1e-5)
        assert found["breaks"] == {} and len(set(found["made"])) == 1


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("axis", ["tensor", "sequence", "ring"])
def test_inductor_trains_blocks_that_ranks_share(ranks: Ranks, axis: str) -> None:
    """Collectives and attention are operations that it leaves as they are."""
    how: dict[str, Any] = {"world_size": 2, "timeout": 600, "warnings_as_errors": False}
    for wrong, made, explained in ranks.run(_axis, axis, "zero1", "inductor", **how):
        assert wrong == [] and len(set(made)) == 1 and "in pieces" not in explained, (wrong, made)
