"""DeepSpeed's pipelines: PipelineModule, LayerSpec, TiedLayerSpec and PipelineEngine train like plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfold.compat import deepspeed
from shardfold.compat.deepspeed.pipe import (
    LayerSpec,
    PipelineModule,
    PipeModelDataParallelTopology,
    ProcessTopology,
    TiedLayerSpec,
)
from shardfold.compat.deepspeed.pipeline_module import _cut
from shardfold.compat.deepspeed.runtime.pipe.module import PipelineError
from shardfold.errors import ConfigError, OrderError, UsageError
from shardfold.testing import Ranks

VOCAB, WIDTH, TIME, ROWS, STEPS = 13, 8, 5, 2, 3


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shift = nn.LayerNorm(WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) + self.shift


def _head(embedding: Any, x: Tensor) -> Tensor:
    return x @ embedding.weight.T


def _halved(x: Tensor) -> Tensor:
    return x * 0.5


def _tied() -> list[Any]:
    return [
        TiedLayerSpec("embedding", Embedding),
        *(LayerSpec(Block) for _ in range(4)),
        _halved,
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embedding", Embedding, forward_fn=_head),
    ]


def _flat(x: Tensor) -> Tensor:
    return torch.flatten(x, 1)


def _images() -> list[Any]:
    """As a list of a network's own modules, which every rank has made."""
    torch.manual_seed(3)
    features = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2),
    )  # fmt: skip
    classifier = nn.Sequential(nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Linear(8, VOCAB))
    return [*features, _flat, *classifier]


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


class Plain(nn.Module):
    """The same layers in one process, seeded as ``seed_layers`` does."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.tied = nn.ModuleDict()
        self.calls: list[Callable[[Any], Any]] = []
        self.kept = nn.ModuleList()
        for index, layer in enumerate(layers):
            torch.manual_seed(1234 + index)
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in self.tied:
                    self.tied[layer.key] = layer.build()
                shared: Any = self.tied[layer.key]
                function = layer.forward_fn
                self.calls.append(shared if function is None else lambda x, f=function, m=shared: f(m, x))
                continue
            made = layer.build() if isinstance(layer, LayerSpec) else layer
            if isinstance(made, nn.Module):
                self.kept.append(made)
            self.calls.append(made)

    def forward(self, x: Any) -> Any:
        for call in self.calls:
            x = call(x)
        return x


MODELS: dict[str, Callable[[], list[Any]]] = {"tied": _tied, "images": _images}


def _part(name: str, step: int, reader: int, micro: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + 100 * reader + micro)
    if name == "images":
        return torch.randn(ROWS, 2, 6, 6, generator=draw), torch.randint(VOCAB, (ROWS,), generator=draw)
    tokens = torch.randint(VOCAB, (ROWS, TIME + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def _config(stage: int, micro: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": micro, "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage}, "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}, **more,
    }  # fmt: skip


def _made(name: str, stages: int, stage: int, micro: int, **more: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    deepspeed.init_distributed()
    loss = _loss if name == "tied" else nn.CrossEntropyLoss()
    net = PipelineModule(MODELS[name](), num_stages=stages, loss_fn=loss, seed_layers=True, **more.pop("net", {}))
    weights = [p for p in net.parameters() if p.requires_grad]
    return deepspeed.initialize(model=net, model_parameters=weights, config=_config(stage, micro, **more))[0]


def _data(engine: Any, name: str, step: int, *, everywhere: bool) -> Iterator[Any] | None:
    if not everywhere and not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    reader = engine.get_data_parallel_rank()
    return iter([_part(name, step, reader, micro) for micro in range(engine.micro_batches)])


def _step(plain: nn.Module, optimizer: Any, name: str, step: int, readers: int, micro: int) -> tuple[float, float]:
    """Loss and norm of a step in one process."""
    total, criterion = 0.0, _loss if name == "tied" else nn.functional.cross_entropy
    for reader in range(readers):
        for number in range(micro):
            inputs, labels = _part(name, step, reader, number)
            loss = criterion(plain(inputs), labels) / (readers * micro)
            loss.backward()
            total += loss.item()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


def _evaluated(plain: nn.Module, name: str, readers: int, micro: int) -> float:
    criterion = _loss if name == "tied" else nn.functional.cross_entropy
    parts = [_part(name, 9, reader, number) for reader in range(readers) for number in range(micro)]
    return sum(criterion(plain(inputs), labels).item() for inputs, labels in parts) / len(parts)


def _trains(name: str, stages: int, stage: int, micro: int, everywhere: bool, more: dict[str, Any]) -> None:
    engine = _made(name, stages, stage, micro, **more)
    readers = engine.dp_world_size
    plain = Plain(MODELS[name]())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        loss = engine.train_batch(_data(engine, name, step, everywhere=everywhere))
        wanted, norm = _step(plain, optimizer, name, step, readers, micro)
        torch.testing.assert_close(loss.item(), wanted, rtol=1e-12, atol=0)
        torch.testing.assert_close(engine.get_global_grad_norm(), norm, rtol=1e-11, atol=0)
    loss, logits = engine.eval_batch(_data(engine, name, 9, everywhere=everywhere), return_logits=True)
    assert engine.global_steps == STEPS and engine.global_samples == STEPS * ROWS * micro * readers
    with torch.no_grad():
        torch.testing.assert_close(loss.item(), _evaluated(plain, name, readers, micro), rtol=1e-12, atol=0)
        if engine.is_last_stage():
            inputs, _ = _part(name, 9, engine.get_data_parallel_rank(), 0)
            torch.testing.assert_close(logits[0], plain(inputs), rtol=1e-12, atol=1e-12)
    assert (logits is None) != engine.is_last_stage()
    engine.destroy()


RECOMPUTED = {"pipeline": {"activation_checkpoint_interval": 1}}
CASES: list[Any] = [  # model, ranks, stages, ZeRO's stage, micro-batches, all stages have data, more
    ("tied", 2, 2, 1, 3, True, {}),
    ("tied", 4, 4, 2, 5, False, RECOMPUTED),
    ("images", 2, 2, 3, 2, True, {"net": {"partition_method": "uniform"}}),
]
MORE: list[Any] = [
    *(("tied", 4, 2, stage, 3, True, {}) for stage in (0, 1, 2, 3)),
    *(("images", 4, 2, stage, 3, True, {}) for stage in (1, 3)),
    ("tied", 3, 3, 0, 1, False, {}),
    ("tied", 1, 1, 2, 2, True, RECOMPUTED),
    ("images", 4, 4, 1, 6, False, {"net": {"partition_method": "type:Conv|Linear"}}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "ranks_", "stages", "stage", "micro", "everywhere", "more"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE)],
)
def test_trains(ranks: Ranks, name: str, ranks_: int, *, stages: int, stage: int, micro: int, everywhere: bool,
                more: dict[str, Any]) -> None:  # fmt: skip
    """Losses, norms and outputs of an evaluation are plain PyTorch's to 1e-12; ZeRO 2 and 3 go inside, too."""
    ranks.run(_trains, name, stages, stage, micro, everywhere, more, world_size=ranks_)


def _of_a_sequential() -> tuple[list[float], list[float]]:
    """Losses of layers out of an ``nn.Sequential``, and in plain PyTorch."""
    with pytest.raises(ConfigError, match=r"was given a Linear: give a list of layers or an nn\.Sequential"):
        PipelineModule(nn.Linear(2, 2), num_stages=1)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    plain = copy.deepcopy(layers)
    sgd, inputs, labels = torch.optim.SGD(plain.parameters(), lr=0.1), torch.ones(1, 4), torch.ones(1, 1)
    net = PipelineModule(layers, num_stages=1, loss_fn=nn.MSELoss(), activation_checkpoint_interval=1)
    config = {"train_batch_size": 1, "gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]
    ours, theirs = list[float](), list[float]()
    for _ in range(2):
        ours.append(float(engine.train_batch(iter([(inputs, labels)]))))
        loss = nn.functional.mse_loss(plain(inputs), labels)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        theirs.append(loss.item())
    engine.destroy()
    return ours, theirs


def test_layers_may_be_a_sequential(ranks: Ranks) -> None:
    """Linear layers keep their inputs alone, so that an interval of checkpoints has nothing to do, and is taken."""
    [(ours, theirs)] = ranks.run(_of_a_sequential, world_size=1)
    assert ours == pytest.approx(theirs, rel=1e-6)


# -- checkpoints


def _saves(path: str, stages: int, stage: int, load: bool) -> dict[str, Tensor]:
    engine = _made("tied", stages, stage, 2)
    if load:
        found, client = engine.load_checkpoint(path)
        assert found is not None and client is not None and client["epoch"] == 3 and engine.global_steps == 1
    engine.train_batch(_data(engine, "tied", engine.global_steps, everywhere=True))
    if not load:
        engine.save_checkpoint(path, client_state={"epoch": 3})
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    if not load and engine.num_stages > 1:
        engine.load_module_state_dict({"module": state})
    engine.destroy()
    return state


@pytest.mark.parametrize("loaded", [(1, 1, 1), pytest.param((4, 4, 2), marks=pytest.mark.soak)])
def test_a_checkpoint_goes_on_with_other_stages(ranks: Ranks, tmp_path: Path, loaded: tuple[int, int, int]) -> None:
    """Values one step behind it are those of a training in one process."""
    ranks.run(_saves, str(tmp_path), 2, 2, False, world_size=2)
    count, stages, stage = loaded
    found = ranks.run(_saves, str(tmp_path), stages, stage, True, world_size=count)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        plain = Plain(_tied())
    finally:
        torch.set_default_dtype(before)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(2):
        _step(plain, optimizer, "tied", step, 1, 2)
    whole = plain.state_dict()
    for state in found:
        for name, of in (
            ("tied_modules.embedding.weight", "tied.embedding.weight"),
            ("3.mlp.2.weight", "kept.2.mlp.2.weight"),
        ):
            torch.testing.assert_close(state[name], whole[of], rtol=1e-12, atol=1e-13)


# -- what is built, and what is refused


class _Counted(nn.Linear):
    made = 0

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        _Counted.made += not self.weight.is_meta


def _builds() -> tuple[int, list[bool], list[int]]:
    deepspeed.init_distributed()
    net = PipelineModule([LayerSpec(_Counted, 4) for _ in range(6)], num_stages=2, partition_method="uniform")
    return _Counted.made, [p.is_meta for p in net.parameters()][::2], net.parts


def test_only_the_layers_of_a_stage_are_built_on_its_ranks(ranks: Ranks) -> None:
    assert ranks.run(_builds, world_size=2) == [
        (3, [False] * 3 + [True] * 3, [0, 3, 6]), (3, [True] * 3 + [False] * 3, [0, 3, 6]),
    ]  # fmt: skip


def test_layers_are_shared_out_by_parameters_by_count_and_by_class() -> None:
    specs: list[Any] = [LayerSpec(nn.Embedding, 9, 8), *(LayerSpec(nn.Linear, 2, 2) for _ in range(3)), _halved]
    layers = [spec.build() if isinstance(spec, LayerSpec) else nn.Identity() for spec in specs]
    assert _cut(layers, specs, "parameters", 2) == [0, 1, 5]
    assert _cut(layers, specs, "uniform", 2) == [0, 3, 5]
    bounds = _cut(layers, specs, "type:linear", 3)
    assert [sum(1 <= i < 4 for i in range(*bounds[part : part + 2])) for part in range(3)] == [1, 1, 1]
    for method, kind in (("profile", NotImplementedError), ("type:Conv", ValueError)):
        with pytest.raises(kind, match="partition_method"):
            _cut(layers, specs, method, 2)
    with pytest.raises(ValueError, match="5 layers for 6 stages"):
        _cut(layers, specs, "uniform", 6)


def _refuses() -> dict[str, str]:
    engine, said = _made("tied", 2, 1, 2), dict[str, str]()
    part = _part("tied", 0, 0, 0)
    calls: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
        "forward": (PipelineError, lambda: engine(part[0])),
        "step": (PipelineError, engine.step),
        "ended": (StopIteration, lambda: engine.train_batch(iter([part]))),
        "pair": (UsageError, lambda: engine.train_batch(iter([part[0], part[0]]))),
        "none": (UsageError, lambda: engine.eval_batch(None)),
        "word": (NotImplementedError, lambda: engine.eval_batch(iter([part] * 2), reduce_output="sum")),
        "stages": (ValueError, lambda: PipelineModule(_tied(), num_stages=3)),
        "neither": (RuntimeError, lambda: PipelineModule(_tied())),
        "axes": (ConfigError, lambda: PipelineModule(_tied(), topology=ProcessTopology(["data", "pipe"], [1, 2]))),
        "ranks": (ConfigError, lambda: PipelineModule(_tied(), topology=PipeModelDataParallelTopology(2, 2, 2))),
        "mpu": (ConfigError, lambda: deepspeed.initialize(model=engine.module, config=_config(1, 1), mpu=object())),
    }
    for name, (kind, call) in calls.items():
        with pytest.raises(kind) as raised:
            call()
        said[name] = str(raised.value)
    with torch.no_grad(), pytest.raises(RuntimeError, match="needs gradients"):
        engine.train_batch(iter([part] * 2))
    one = iter([part] * 2) if engine.is_first_stage() else iter([part])
    with pytest.raises((StopIteration, ConfigError, OrderError)) as raised:
        engine.train_batch(one)
    said["one"] = str(raised.value)
    engine.train_batch(iter([part] * 2))  # nothing was lost
    engine.destroy()
    return said


def test_what_is_refused_is_refused_in_a_sentence_on_all(ranks: Ranks) -> None:
    """And training goes on behind it."""
    words = {
        "forward": "engine.train_batch()", "step": "engine.train_batch()", "ended": "ended after 1 of 2 micro-batches",
        "pair": "a pair of inputs and labels", "none": "an iterator", "word": "'avg' or None", "stages": "cannot be d",
        "neither": "num_stages= or topology=", "axes": "pipe, data, model, in this order", "ranks": "8 ranks",
        "mpu": "is not for a PipelineModule", "one": "ended after 1 of 2",
    }  # fmt: skip
    for said in ranks.run(_refuses, world_size=2):
        for name, text in words.items():
            assert text in said[name] and "\n" not in said[name], said[name]


def _groups() -> dict[str, Any]:
    deepspeed.init_distributed()
    net = PipelineModule(_tied(), topology=PipeModelDataParallelTopology(2, 1, 2), loss_fn=_loss)
    engine = deepspeed.initialize(model=net, config=_config(1, 2, train_batch_size=8))[0]
    found = {
        "stage": engine.get_pipeline_parallel_rank(), "data": engine.get_data_parallel_rank(),
        "first": engine.is_first_stage(), "sizes": engine.get_batch_info(), "owner": net.stage_owner(7),
        "readers": torch.distributed.get_process_group_ranks(engine.data_parallel_group), "said": net.parts,
    }  # fmt: skip
    data = [(x, y) for x, y in (_part("tied", 0, 0, m) for m in range(8)) for x, y in zip(x, y, strict=True)]
    loader = deepspeed.initialize(
        model=PipelineModule(_tied(), num_stages=2, loss_fn=_loss), config=_config(2, 2), training_data=data
    )[0]
    found["loss"] = round(loader.train_batch().item(), 9)
    loader.destroy()
    engine.destroy()
    return found


@pytest.mark.soak
def test_ranks_are_shared_out_as_the_topology_says_and_a_dataset_is_read_by_itself(ranks: Ranks) -> None:
    said = ranks.run(_groups, world_size=4)
    assert [each["stage"] for each in said] == [0, 0, 1, 1] and [each["data"] for each in said] == [0, 1, 0, 1]
    assert [each["readers"] for each in said] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert {each["sizes"] for each in said} == {(8, 2, 2)} and {each["owner"] for each in said} == {1}
    assert len({each["loss"] for each in said}) == 1
