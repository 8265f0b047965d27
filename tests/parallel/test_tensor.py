"""Models that are cut along an axis of tensor train like whole ones."""

from __future__ import annotations

import copy
import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, ModelError, UsageError
from shardfold.parallel import split
from shardfold.parallel.plan import TensorPlan
from shardfold.testing import Ranks
from tests.parallel.models import ADAM, MODELS, batches, loss_of, make, part, plain


def _trains(name: str, size: int, heads: int, layout: str) -> None:
    engine = sf.Engine(
        make(name, heads),
        optimizer=ADAM,
        layout=layout,
        parallel=sf.Parallel(mesh={"tensor": size}, tensor="auto"),
        clip_norm=0.1,
        runtime=sf.Runtime(debug=True),
    )
    losses, norms, grads, whole = plain(name, heads)
    for step, batch in enumerate(batches()):
        mine = [t.chunk(engine.data_ranks)[engine.data_rank] for t in batch]
        loss = loss_of(engine, *mine)
        engine.backward(loss)
        with engine.gathered(of="grads") as found:
            for key, grad in found.items():
                if key in grads[step]:
                    torch.testing.assert_close(grad, part(engine, key, grads[step][key]), rtol=1e-12, atol=1e-13,
                                               msg=lambda text, key=key: f"{key}: {text}")  # fmt: skip
        report = engine.step()
        assert engine.mean(loss.item()) == pytest.approx(losses[step], rel=1e-12)
        assert report.grad_norm == pytest.approx(norms[step], rel=1e-12)
    for key, value in engine.state_dict().items():
        torch.testing.assert_close(value, part(engine, key, whole[key]), rtol=1e-12, atol=1e-12)
    engine.close()


CASES = [
    pytest.param(name, size, 6 if size == 3 else 4, "ddp", size, marks=() if (name, size) in FEW else pytest.mark.soak)
    for FEW in [
        {("gpt-tied", 2), ("llama", 4), ("qwen3", 2), ("gpt2", 2), ("bert", 3), ("gpt", 3), ("t5", 2), ("mixtral", 2)}
    ]
    for name in MODELS
    for size in (2, 3, 4)
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "size", "heads", "layout", "world"), CASES)
def test_models(ranks: Ranks, name: str, size: int, heads: int, layout: str, world: int) -> None:
    """Loss, every gradient, the norm before clipping and parameters after 5 steps are plain PyTorch's to 1e-12."""
    ranks.run(_trains, name, size, heads, layout, world_size=world)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt", "zero3"),
        ("llama-1kv", "zero1"),
        *(
            pytest.param(name, layout, marks=pytest.mark.soak)
            for name in ("gpt", "llama", "qwen3", "gpt2", "bert")
            for layout in ("ddp", "zero1", "zero2", "zero3", "hsdp")
        ),
    ],
)
def test_with_axes_of_data(ranks: Ranks, name: str, layout: str) -> None:
    """The same on two ranks along tensor by two of data, under layouts that split what each of them has."""
    ranks.run(_trains, name, 2, 4, layout, world_size=4)


def _first_values(name: str, size: int, folder: str) -> None:
    """Values of a model built under meta_init, whole and cut; and of safetensors read into either."""
    with sf.meta_init():
        model = MODELS[name](4)
    engine = sf.Engine(
        model, layout="zero3", parallel=sf.Parallel(mesh={"tensor": size}, tensor="auto"), init=sf.Init(seed=3)
    )
    whole = torch.load(f"{folder}/{name}.pt")
    for key, value in engine.state_dict().items():
        assert torch.equal(value, part(engine, key, whole[key])), key
    engine.close()
    with sf.meta_init():
        model = MODELS[name](4)
    engine = sf.Engine(
        model,
        parallel=sf.Parallel(mesh={"tensor": size}, tensor="auto"),
        init=sf.Init(weights=f"{folder}/{name}.safetensors"),
    )
    state = make(name).float().state_dict()
    for key, value in engine.state_dict().items():
        assert torch.equal(value, part(engine, key, state[key])), key
    engine.close()


@pytest.mark.soak
def test_first_values_do_not_depend_on_the_axis(ranks: Ranks, tmp_path: Any) -> None:
    """Under ``meta_init`` each rank has its part of what one rank initializes, packed matrices and ties included; so it
    has of whole safetensors."""
    from safetensors.torch import save_model

    for name in ("gpt-tied", "gpt"):
        with sf.meta_init():
            model = MODELS[name](4)
        engine = sf.Engine(model, layout="ddp", init=sf.Init(seed=3))
        torch.save(engine.state_dict(), tmp_path / f"{name}.pt")
        engine.close()
        save_model(make(name).float(), str(tmp_path / f"{name}.safetensors"))
        ranks.run(_first_values, name, 2, str(tmp_path), world_size=2)


def _steps(name: str, size: int, path: str | None, save: str | None, steps: int) -> dict[str, Tensor]:
    mesh = {"tensor": size} if size > 1 else None
    engine = sf.Engine(make(name), optimizer=ADAM, parallel=sf.Parallel(mesh=mesh, tensor="auto"), clip_norm=0.1)
    if path is not None:
        engine.load(path)
    for batch in batches(4)[engine.steps : steps]:
        engine.backward(loss_of(engine, *batch))
        engine.step()
    if save is not None:
        engine.save(save, wait=True)
    state = {key: value.clone() for key, value in engine.state_dict().items()}
    whole = plain(name, 4, 4)[3]
    if steps == 4:
        for key, value in state.items():
            torch.testing.assert_close(value, part(engine, key, whole[key]), rtol=1e-12, atol=1e-12)
    engine.close()
    return state


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gpt2", pytest.param("gpt-tied", marks=pytest.mark.soak)])
def test_checkpoints_of_any_number_of_parts(ranks: Ranks, tmp_path: Any, name: str) -> None:
    """A checkpoint of two ranks along tensor goes on on one, and one of one rank on two: after the last
    step parameters are those of plain PyTorch, so weights and moments of packed and tied parameters have come along."""
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    ranks.run(_steps, name, 2, None, two, 2, world_size=2)
    _steps(name, 1, two, None, 4)
    _steps(name, 1, None, one, 2)
    ranks.run(_steps, name, 2, one, None, 4, world_size=2)


def _sent(tied: bool) -> list[tuple[Any, ...]]:
    engine = sf.Engine(
        make("gpt-tied" if tied else "gpt"),
        optimizer=ADAM,
        layout="ddp",
        parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto"),
    )
    engine.backward(loss_of(engine, *batches(1)[0]))
    engine.step()
    rows = [tuple(row) for row in engine.traffic().rows]
    engine.close()
    return rows


def test_bytes_are_those_of_the_formula(ranks: Ranks) -> None:
    """Two sums of the activations per block and pass (Megatron-LM), one for the embedding, one for the head's gradient,
    and of the loss a largest value, a sum of exponentials and an own logit per row; nothing else."""
    blocks, rows, width = 2, 4 * 6, 16
    calls = blocks * 2 * 2 + 2 + 2
    num_bytes = 8 * ((blocks * 2 * 2 + 2) * rows * width + rows + 2 * rows)
    assert ranks.run(_sent, True, world_size=2)[0] == [
        ("layers", "ALL_REDUCE", ("tensor",), calls, float(num_bytes), num_bytes)
    ]


def _differs(drop: str) -> list[str]:
    """What of a step is not plain PyTorch's where one kind of collective is left out."""
    kept = split.copy, split.reduce, split.gather, split.Summed.__call__
    if drop in ("copy", "reduce"):
        setattr(split, drop, lambda x, group: x)
    elif drop == "gather":
        split.gather = lambda x, group, dim, sizes=None: torch.cat([x] * group.size, dim)[..., : sum(sizes or [])]
    elif drop == "partial":
        split.Summed.__call__ = lambda self, grad: grad  # type: ignore[method-assign]
    try:
        engine = sf.Engine(
            make("qwen3"),
            optimizer=ADAM,
            layout="ddp",
            parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto"),
            clip_norm=0.1,
        )
        losses, _, grads, _ = plain("qwen3", 4, 1)
        loss = loss_of(engine, *batches(1)[0])
        engine.backward(loss)
        with engine.gathered(of="grads") as found:
            wrong = [
                key
                for key, grad in found.items()
                if key in grads[0]
                and not torch.allclose(grad, part(engine, key, grads[0][key]), rtol=1e-10, atol=1e-12)
            ]
        if abs(loss.item() - losses[0]) > 1e-10:
            wrong.append("loss")
        engine.close()
    finally:
        split.copy, split.reduce, split.gather = kept[:3]
        split.Summed.__call__ = kept[3]  # type: ignore[method-assign]
    return wrong


@pytest.mark.soak
def test_no_collective_may_be_left_out(ranks: Ranks) -> None:
    """Without any one kind of collective gradients are others than plain PyTorch's, of the parameters that need it."""
    wrong = {drop: ranks.run(_differs, drop, world_size=2)[0] for drop in ("", "copy", "reduce", "gather", "partial")}
    norms = [f"model.layers.{i}.self_attn.{which}_norm.weight" for i in (0, 1) for which in ("q", "k")]
    assert wrong[""] == []
    assert sorted(wrong["partial"]) == sorted(norms)
    assert "loss" in wrong["reduce"] and "loss" in wrong["gather"]
    assert "loss" not in wrong["copy"] and "model.layers.0.input_layernorm.weight" in wrong["copy"]


def _replicas() -> tuple[str, list[str]]:
    engine = sf.Engine(
        make("llama-1kv").float(),
        optimizer=ADAM,
        layout="zero1",
        parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto"),
    )
    for tokens, targets in batches(3):
        engine.backward(loss_of(engine, tokens.chunk(2)[engine.data_rank], targets.chunk(2)[engine.data_rank]))
        engine.step()
    equal = sf.numerics.replicas(engine)
    if engine.mesh.coords["tensor"] == 1:
        for unit in engine.units:
            for name, parameter in unit.parameters():
                if name == "model.layers.1.self_attn.k_proj.weight":
                    parameter.data[0, 0] += 1e-3
    found = sf.numerics.replicas(engine)
    engine.close()
    return str(equal), found


@pytest.mark.soak
def test_replicas_are_equal_and_one_that_is_not_is_named(ranks: Ranks) -> None:
    """What is replicated on the axis is equal to the bit after steps in fp32, keys and values of a head that two ranks
    share among it; one that was changed on a rank is found, by name, on all of them."""
    for equal, found in ranks.run(_replicas, world_size=4):
        assert (equal, found) == ("[]", ["model.layers.1.self_attn.k_proj.weight"])


class Between(nn.Module):
    """A scale between a column and a row, of which each rank sees a part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.scale(self.up(x))).square().mean()


class Aside(Between):
    """What a column gives goes into the loss past the row, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(x).abs().mean()


BETWEEN = {"up": "column", "down": "row"}


def _apart(layout: str) -> list[str]:
    said: list[str] = []
    torch.manual_seed(0)
    model, x = Between().double(), torch.randn(4, 4, dtype=torch.float64)
    engine = sf.Engine(
        copy.deepcopy(model), optimizer=ADAM, layout=layout, parallel=sf.Parallel(mesh={"tensor": 2}, tensor=BETWEEN)
    )
    with pytest.raises(UsageError) as batches_differ:
        engine(x + engine.rank)
    said.append(str(batches_differ.value))
    engine.reset()
    before = {key: value.clone() for key, value in engine.state_dict().items()}
    engine.backward(engine(x))
    with pytest.raises(ModelError) as gradients_differ:
        engine.step()
    said.append(str(gradients_differ.value))
    assert all(torch.equal(before[key], value) for key, value in engine.state_dict().items())
    engine.close()
    torch.manual_seed(0)
    aside = Aside().double()
    engine = sf.Engine(
        aside,
        optimizer=ADAM,
        layout=layout,
        parallel=sf.Parallel(mesh={"tensor": 2}, tensor={**BETWEEN, "scale": "partial"}),
    )
    engine.backward(engine(x))
    with pytest.raises(ModelError) as losses_differ:
        engine.step()
    said.append(str(losses_differ.value))
    engine.close()
    engine = sf.Engine(
        model,
        optimizer=ADAM,
        layout=layout,
        parallel=sf.Parallel(mesh={"tensor": 2}, tensor={**BETWEEN, "scale": "partial"}),
    )
    for _ in range(3):
        engine.backward(engine(x))
        engine.step()
    engine.close()
    return said


def test_what_ranks_have_to_have_alike_is_compared(ranks: Ranks) -> None:
    """Batches that differ between ranks that share layers are refused on all of them at the first forward, and at the
    first step the gradient of a parameter that has to be summed, by name, before any weight has changed, and a loss
    of which each rank has a part."""
    for batch, gradient, loss in ranks.run(_apart, "zero1", world_size=2):
        assert "ranks along 'tensor', which share each layer, have different batches" in batch
        assert gradient.startswith("the gradient of 'scale.weight' differs between ranks along 'tensor'")
        assert loss.startswith("the loss differs between ranks along 'tensor'")


class Hooked(nn.Module):
    tensor_plan: ClassVar = {"words": "vocabulary", "up": "column", "down": "row", "tail": "gathered"}

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down, self.tail = (
            nn.Embedding(10, 4), nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 6)
        )  # fmt: skip

    def forward(self, numbers: Tensor) -> Tensor:
        return self.tail(self.down(self.up(self.words(numbers)).tanh())).square().mean()


def _hook(model: Any, seen: dict[str, tuple[Any, ...]], when: str) -> None:
    for name, module in model.named_children():
        module.register_forward_hook(lambda _, x, y, n=name: seen.__setitem__(f"{when} {n}", (x[0], y)))
        module.register_full_backward_hook(lambda _, x, y, n=name: seen.__setitem__(f"{when} {n}, grads", (*x, *y)))
    model.up.weight.register_hook(lambda grad: seen.__setitem__(f"{when} up.weight", (grad,)))


def _hooks_see() -> set[str]:
    torch.manual_seed(0)
    model, numbers = Hooked().double(), torch.arange(5)
    whole = copy.deepcopy(model)
    mine, wanted = dict[str, tuple[Any, ...]](), dict[str, tuple[Any, ...]]()
    for each in (model, whole):
        each.up.register_forward_hook(lambda _, x, y: 2 * y)  # to a slice the same as to the whole
        each.down.register_forward_hook(lambda _, x, y: y + 1)
    _hook(model, mine, "early")
    engine = sf.Engine(model, optimizer=ADAM, layout="zero1", parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto"))
    _hook(model, mine, "late")
    for when in ("early", "late"):
        _hook(whole, wanted, when)
    loss = engine(numbers)
    engine.backward(loss)
    plain_loss = whole(numbers)
    plain_loss.backward()
    torch.testing.assert_close(loss, plain_loss)
    sliced: set[str] = set()
    assert mine.keys() == wanted.keys()
    for name, values in wanted.items():
        for place, (here, there) in enumerate(zip(mine[name], values, strict=True)):
            if there is not None and here.shape != there.shape:
                sliced.add(f"{name.partition(' ')[2]}: {'inputs' if place == 0 and len(values) > 1 else 'outputs'}")
                there = there.chunk(2, 0 if name.endswith("up.weight") else -1)[engine.rank]
            torch.testing.assert_close(here, there)
    engine.close()
    return sliced


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the embedding's, of numbers
def test_what_hooks_see(ranks: Ranks) -> None:
    """Of columns the outputs and of rows the inputs are this rank's slices, and so are gradients of them and of what is
    cut; all else is whole, and all of it plain PyTorch's, whether a hook was registered before the engine or after."""
    cut = {"up: outputs", "up, grads: outputs", "down: inputs", "down, grads: inputs", "up.weight: outputs"}
    assert ranks.run(_hooks_see, world_size=2) == [cut, cut]


def _built_split() -> None:
    losses, _, _, _ = plain("gpt", 4, 3)
    values = dict(make("gpt").named_parameters())
    with sf.sharded_init(dtype=torch.float64):
        model = MODELS["gpt"](4)
    for name, parameter in model.named_parameters():
        with sf.whole(parameter, source=0):
            parameter.data.copy_(values[name].detach())
    engine = sf.Engine(
        model, optimizer=ADAM, layout="zero3", parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto"), clip_norm=0.1
    )  # fmt: skip
    for step, batch in enumerate(batches(3)):
        tokens, targets = (each.chunk(2)[engine.data_rank] for each in batch)
        loss = loss_of(engine, tokens, targets)
        engine.backward(loss)
        engine.step()
        assert engine.mean(loss.item()) == pytest.approx(losses[step], rel=1e-11)
    engine.close()


def test_a_model_that_was_built_split(ranks: Ranks) -> None:
    """Under ``sharded_init()`` over all ranks: each parameter is whole for the moment in which it is cut."""
    ranks.run(_built_split, world_size=4)


# -- adapters of peft


def _adapted(kind: str, heads: int = 4, kv_heads: int = 2, **options: Any) -> nn.Module:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(3)
    if kind == "gpt2":  # one matrix for queries, keys and values
        config = transformers.GPT2Config(vocab_size=24, n_embd=128, n_layer=2, n_head=heads, n_positions=16,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(vocab_size=24, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=16)  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    settings = {"target_modules": "all-linear", "r": 2, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    with warnings.catch_warnings():  # peft reads a property that transformers has renamed
        warnings.simplefilter("ignore")
        adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**settings | options))
    return adapted


def _adapted_steps(kind: str, kv_heads: int, layout: str, size: int) -> tuple[list[float], list[Any], int]:
    """Losses, what of an adapter's gradients ranks have with the whole's shapes, and how many numbers a rank has."""
    parallel = sf.Parallel(mesh={"tensor": size}, tensor="auto") if size > 1 else sf.Parallel()
    model = _adapted(kind, kv_heads=kv_heads)
    coded = "nf4" in layout  # whose values are fp32
    engine = sf.Engine(model if coded else model.double(), optimizer=ADAM, layout=layout, parallel=parallel)
    slots = {s.name: s for unit in engine.units for seg in unit.spec.segments for s in seg.slots}
    losses, grads = list[float](), list[Any]()
    for step in range(1 if coded else 2):
        tokens = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        losses.append(loss.item())
        with engine.gathered(of="grads") as found:
            grads.append({n: (g.clone(), slots[n].box) for n, g in found.items() if ".lora_" in n and n in slots})
        engine.step()
    engine.close()
    return losses, grads, sum(slot.numel for slot in slots.values())


@pytest.mark.parametrize(
    ("kind", "kv_heads", "layout"),
    [
        ("llama", 2, "zero3"),
        ("llama", 2, "zero3+nf4/64"),
        pytest.param("llama", 1, "zero3", marks=pytest.mark.soak),
        pytest.param("gpt2", 4, "zero3", marks=pytest.mark.soak),
    ],
)
def test_layers_with_adapters_are_cut(ranks: Ranks, kind: str, kv_heads: int, layout: str) -> None:
    """Of each layer that peft wrapped a rank has half, of the adapter's matrix on the side that is cut, too; losses and
    the adapters' gradients are those of one rank. Codes have blocks that no cut goes through."""
    losses, grads, numbers = ranks.run(_adapted_steps, kind, kv_heads, layout, 1, world_size=1)[0]
    for mine, found, some in ranks.run(_adapted_steps, kind, kv_heads, layout, 2, world_size=2):
        assert some < 0.6 * numbers
        assert mine == pytest.approx(losses, rel=1e-10 if "nf4" not in layout else 1e-5)
        for step, each in enumerate(found):
            assert len(each) == len(grads[step])
            cut = sum(box is not None for _, box in each.values())
            assert cut == len(each) / 2 - (4 if kv_heads == 1 else 0)  # both ranks need all of one head
            for name, (grad, box) in each.items():
                whole = grads[step][name][0]
                if box is not None:
                    whole = whole.reshape(box.view(whole.shape))[box.slices].reshape(grad.shape)
                near = (1e-5 if "nf4" in layout else 1e-10) * whole.abs().max().item()
                torch.testing.assert_close(
                    grad, whole, rtol=0, atol=near, msg=lambda text, name=name: f"{name}: {text}"
                )


def test_adapters_that_are_not_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match="q_proj' is 'column' and has an adapter that is more than the matrices"):
        TensorPlan(_adapted("llama", use_dora=True), "auto")
    with pytest.raises(ConfigError, match="leave sequence_parallel out"):
        TensorPlan(_adapted("llama"), "auto", sequence_parallel=True)


def test_a_plan_of_which_nothing_fits_is_not_taken() -> None:
    """The config of a model of transformers at one whose body has other names: its layers are found by a trace."""
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model.config = pytest.importorskip("transformers").LlamaConfig()
    plan = TensorPlan(model, "auto")
    assert {path: word.name for path, word in plan.words.items()} == {"0": "column", "2": "row"}
