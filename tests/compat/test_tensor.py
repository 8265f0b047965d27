"""DeepSpeed's tensor parallelism: ``tensor_parallel`` of the config, ``tp_model_init``, an ``mpu``, whole files."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.compat import deepspeed
from shardfold.compat.deepspeed.config import read
from shardfold.compat.deepspeed.config_parallel import plan_words
from shardfold.compat.deepspeed.tensor import plan_of
from shardfold.compat.deepspeed.utils import groups
from shardfold.compat.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from shardfold.errors import ConfigError, UsageError
from shardfold.parallel.plan import TensorPlan
from shardfold.testing import Ranks
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from tests.support.clients import llama, needs

STEPS, ROWS, TOLERANCE = 3, 2, 1e-12
SIZES = GPTConfig(layers=2, d_model=16, heads=4, d_ff=32, context=6, vocab=17)
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}}


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(SIZES).double()


def config(stage: int = 2, accumulate: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": accumulate, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "steps_per_print": None, **ADAMW, **more,
    }  # fmt: skip


def batch(step: int, of: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + of)
    return torch.randint(17, (ROWS, 7), generator=draw)


def plain(readers: int, model: nn.Module | None = None) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses of the first rank, norms and weights of the same training in one process."""
    model = model or build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(STEPS):
        for of in range(readers):
            tokens = batch(step, of)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            (loss / readers).backward()
            if of == 0:
                losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


def steps(engine: Any, count: int = STEPS, first: int = 0) -> tuple[list[float], list[float]]:
    losses: list[float] = []
    norms: list[float] = []
    for step in range(first, first + count):
        tokens = batch(step, engine.get_data_parallel_rank())
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys() and all(a[name].shape == b[name].shape for name in a)
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def _trained(stage: int, folder: Path) -> dict[str, Any]:
    """What an engine with two ranks of tensor tells, saves and goes on with; every rank."""
    deepspeed.init_distributed()
    engine = deepspeed.initialize(model=build(), config=config(stage, tensor_parallel={"autotp_size": 2}))[0]
    told: dict[str, Any] = {
        "autotp": engine.autotp_size(), "tp": engine.mp_world_size, "dp": engine.dp_world_size,
        "rank": (engine.get_tensor_parallel_rank(), groups.get_tensor_model_parallel_rank()),
        "group": dist.get_process_group_ranks(groups.get_tensor_model_parallel_group()),
        "of_data": dist.get_process_group_ranks(groups.get_data_parallel_group()),
        "source": groups.get_tensor_model_parallel_src_rank(),
    }  # fmt: skip
    told["losses"], told["norms"] = steps(engine)
    told["here"] = tuple(engine.module.blocks[0].mlp.down.weight.shape) if hasattr(
        engine.module.blocks[0], "mlp"
    ) else None  # fmt: skip
    told["whole"] = engine._consolidated_16bit_state_dict()
    told["module"] = engine.module_state_dict()
    engine.save_checkpoint(folder, tag="cut")
    engine.save_16bit_model(folder / "16")
    engine.load_module_state_dict({"module": told["module"]})
    told["after"] = apart(engine.module_state_dict(), told["module"])
    engine.destroy()
    other = deepspeed.initialize(model=build(), config=config(3 - stage))[0]  # all ranks are of data
    other.load_checkpoint(folder)
    told["elsewhere"], told["steps"] = other.module_state_dict(), other.global_steps
    told["dp_after"] = other.dp_world_size, groups.get_tensor_model_parallel_world_size()
    other.destroy()
    return told


@pytest.mark.parametrize("stage, world", [(1, 2), pytest.param(2, 4, marks=pytest.mark.soak)])
def test_a_model_that_is_cut_trains_as_in_one_process(ranks: Ranks, tmp_path: Path, stage: int, world: int) -> None:
    """Losses, norms and weights of one process in fp64, and the accessors tell how ranks are shared out. Consolidated
    and fp32 files have whole tensors, whole state dicts load, and the checkpoint loads where nothing is cut."""
    told = ranks.run(_trained, stage, tmp_path, world_size=world)
    losses, norms, weights = plain(world // 2)
    for rank, one in enumerate(told):
        assert (one["autotp"], one["tp"], one["dp"], one["rank"]) == (2, 2, world // 2, (rank % 2, rank % 2))
        assert one["group"] == [rank // 2 * 2, rank // 2 * 2 + 1] and one["source"] == rank // 2 * 2
        assert one["of_data"] == list(range(rank % 2, world, 2))
        assert (one["whole"] is None) == (rank > 0)
        assert one["norms"] == pytest.approx(norms, rel=TOLERANCE) and one["after"] == 0.0
        assert apart(one["module"], weights) < TOLERANCE and apart(one["elsewhere"], weights) < TOLERANCE
        assert (one["steps"], one["dp_after"]) == (STEPS, (world, 1))
    assert told[0]["losses"] == pytest.approx(losses, rel=TOLERANCE)
    assert apart(told[0]["whole"], weights) < TOLERANCE
    saved = torch.load(tmp_path / "16/pytorch_model.bin", weights_only=True)
    assert apart(saved, weights) < TOLERANCE
    assert apart(get_fp32_state_dict_from_zero_checkpoint(tmp_path), weights) < 1e-6


def _asked(how: str) -> Any:
    deepspeed.init_distributed()
    model, more = build(), dict[str, Any]()
    if how == "tp_model_init":
        model = deepspeed.tp_model_init(model=model, tp_size=2, dtype=torch.float32, config=config())
    else:
        section: dict[str, Any] = {"autotp_size": 2, "partition_config": {"layer_specs": [
            {"patterns": [r"blocks\.\d+\.attention\..*\.weight$"], "partition_type": "skip"},
        ]}}  # fmt: skip
        more = {"tensor_parallel": section}
    engine = deepspeed.initialize(model=model, config=config(3 if how == "tp_model_init" else 0, **more))[0]
    losses, norms = steps(engine)
    shapes = {name: tuple(p.shape) for name, p in engine.module.named_parameters()}
    state = engine.module_state_dict()
    engine.destroy()
    return losses, norms, state, engine.autotp_size(), shapes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["tp_model_init", "specs"])
def test_other_ways_to_ask_for_it(ranks: Ranks, how: str) -> None:
    """``tp_model_init`` without a word in the config, at stage 3; and ``partition_config``, which leaves attention
    whole and the rest as the model's plan says."""
    (losses, norms, state, size, shapes), _ = ranks.run(_asked, how, world_size=2)
    its_losses, its_norms, weights = plain(1)
    assert size == 2 and losses == pytest.approx(its_losses, rel=TOLERANCE)
    assert norms == pytest.approx(its_norms, rel=TOLERANCE) and apart(state, weights) < TOLERANCE
    whole = {name: tuple(value.shape) for name, value in weights.items()}
    cut = {name for name in shapes if shapes[name] != whole[name]}
    assert cut and (how == "tp_model_init") == any("attention" in name for name in cut), cut


SPECS = [
    {"patterns": [r".*\.attn\.c_attn\.weight$"], "partition_type": "column", "shape": [3, -1]},
    {"patterns": [r".*\.mlp\.c_fc\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.c_proj\.weight$"], "partition_type": "row"},
]
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "kept": {},
    "contiguous": {
        "partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": SIZES.layers,
    },
    "host": {"partition_activations": True, "cpu_checkpointing": True},
}  # fmt: skip


def gpt2(dropout: float) -> Any:
    """Of transformers, which keeps numbers of heads beside its layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    its = GPT2Config(
        n_embd=SIZES.d_model, n_layer=SIZES.layers, n_head=SIZES.heads, vocab_size=SIZES.vocab, n_positions=16,
        bos_token_id=0, eos_token_id=0, use_cache=False, **rates,
    )  # fmt: skip
    return GPT2LMHeadModel(its).double().train()


class Losing(nn.Module):
    """The mean loss of a model of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.model = model.config, model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())


def _checkpointed() -> dict[str, Any]:
    """Losses, norms and weights by what is kept, with and without dropout."""
    deepspeed.init_distributed()
    found: dict[str, Any] = {}
    specs = {"use_default_specs": False, "layer_specs": SPECS}
    for dropout, names in ((0.0, ["contiguous"]), (0.3, [*CHECKPOINTS])):
        for name in names:
            options = CHECKPOINTS[name]
            model, ran = Losing(gpt2(dropout)), list[int]()
            its = config(1, tensor_parallel={"autotp_size": 2, "partition_config": specs})
            its["activation_checkpointing"] = options
            if options:
                deepspeed.checkpointing.configure(None, its)
                for block in model.model.transformer.h:
                    block.forward = partial(_again, block.forward, ran)
            engine = deepspeed.initialize(model=model, config=its)[0]
            torch.manual_seed(9)
            told = steps(engine)
            assert len(ran) == 2 * STEPS * SIZES.layers * bool(options)  # forward, and once more in backward
            found[f"{name} {dropout}"] = (*told, engine.module_state_dict())
            engine.destroy()
    return found


def _again(forward: Callable[..., Any], ran: list[int], *args: Any, **kwargs: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        ran.append(1)
        return forward(*args, **kwargs)

    return deepspeed.checkpointing.checkpoint(counted, *args, **kwargs)


@pytest.mark.soak
@needs("transformers")
def test_divided_checkpoints_of_a_model_that_is_cut(ranks: Ranks) -> None:
    """``partition_activations`` beside ``partition_config``, for GPT-2: numbers of one process, and with dropout those
    of the same without checkpoints."""
    for found in ranks.run(_checkpointed, world_size=2):
        losses, norms, weights = plain(1, Losing(gpt2(0.0)))
        its_losses, its_norms, its_weights = found["contiguous 0.0"]
        assert its_losses == pytest.approx(losses, rel=TOLERANCE)
        assert its_norms == pytest.approx(norms, rel=TOLERANCE) and apart(its_weights, weights) < TOLERANCE
        for name in CHECKPOINTS:
            assert found[f"{name} 0.3"][:2] == found["kept 0.3"][:2], name
            assert apart(found[f"{name} 0.3"][2], found["kept 0.3"][2]) == 0, name
        assert found["kept 0.3"][0][0] != its_losses[0]


@needs("transformers")
def test_the_head_may_stay_whole() -> None:
    """``vocab_parallel_lm_head`` false leaves the head and the embedding of words out of the plan."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(llama())
    for whole in (False, None):
        section = {"autotp_size": 2, "vocab_parallel_lm_head": whole}
        plan = plan_of(model, read({"train_batch_size": 8, "tensor_parallel": section}, world_size=2))
        words = TensorPlan(model, plan).words
        assert ("lm_head" in words) == ("model.embed_tokens" in words) == (whole is None)
        assert str(words["model.layers.0.mlp.down_proj"]) == "row"


class _Megatron:
    """As much of Megatron-LM's ``mpu`` as is asked for: two ranks of tensor, which follow each other."""

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_tensor_model_parallel_world_size(self) -> int:
        return 2

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank() % 2

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // 2


class _Sum(torch.autograd.Function):
    """Of the ranks' summands forward, or of their gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, forward: bool) -> Tensor:
        ctx.group, ctx.of = group, forward
        x = x.clone()
        if forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].clone()
        if not ctx.of:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


class OfItsOwn(nn.Module):
    """A feed-forward whose hidden part each rank has some of, by layers of the user's, as Megatron-LM marks them."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        up, down, self.norm = nn.Linear(8, 12).double(), nn.Linear(12, 8).double(), nn.LayerNorm(8).double()
        mine = slice(rank * 12 // size, (rank + 1) * 12 // size)
        self.up, self.down, self.group = up, down, group
        self.bias = nn.Parameter(down.bias.detach().clone())
        down.bias = None  # pyright: ignore
        parts = {"up.weight": up.weight[mine], "up.bias": up.bias[mine], "down.weight": down.weight[:, mine]}
        for name, part in parts.items():
            module, last = getattr(self, name[: name.index(".")]), name.rpartition(".")[2]
            setattr(module, last, nn.Parameter(part.detach().clone()))
            parameter: Any = getattr(module, last)
            parameter.tensor_model_parallel, parameter.partition_dim = size > 1, int(name == "down.weight")

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.group is None:
            return (self.down(self.up(x).tanh()) + self.bias).square().mean()
        x = _Sum.apply(x, self.group, False)  # pyright: ignore
        return (_Sum.apply(self.down(self.up(x).tanh()), self.group, True) + self.bias).square().mean()  # pyright: ignore


def _own(folder: Path) -> Any:
    deepspeed.init_distributed()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    model = OfItsOwn(pairs[rank // 2], rank % 2, 2)
    engine = deepspeed.initialize(model=model, config=config(2), mpu=_Megatron())[0]
    norms: list[float] = []
    for step in range(STEPS):
        engine.backward(engine(inputs(step, rank // 2)))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    engine.save_checkpoint(folder)
    told = norms, engine.module_state_dict(), engine.dp_world_size, engine.autotp_size(), type(groups.mpu).__name__
    engine.destroy()
    return told


def inputs(step: int, of: int) -> Tensor:
    return torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + of))


@pytest.mark.soak
def test_layers_of_a_model_s_own_by_its_mpu(ranks: Ranks, tmp_path: Path) -> None:
    """The norm counts what is replicated once, gradients are summed over the ranks of data alone, and states and files
    have whole tensors, as ``partition_dim`` says."""
    told = ranks.run(_own, tmp_path, world_size=4)
    model = OfItsOwn(None, 0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    norms: list[float] = []
    for step in range(STEPS):
        for of in range(2):
            (model(inputs(step, of)) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    for its_norms, state, data, size, mpu in told:
        assert its_norms == pytest.approx(norms, rel=TOLERANCE)
        assert apart(state, model.state_dict()) < TOLERANCE and (data, size, mpu) == (2, 0, "_Megatron")
    assert apart(get_fp32_state_dict_from_zero_checkpoint(tmp_path), model.state_dict()) < 1e-6


def _refused() -> list[str]:
    deepspeed.init_distributed()
    said: list[str] = []

    def of(call: Callable[[], Any], kind: type[Exception]) -> None:
        with pytest.raises(kind) as caught:
            call()
        said.append(str(caught.value))

    def made(model: nn.Module | None = None, **more: Any) -> Any:
        mpu = more.pop("mpu", None)
        return deepspeed.initialize(model=model or build(), config=config(1, **more), mpu=mpu)

    of(lambda: made(tensor_parallel={"autotp_size": 3}), ConfigError)
    of(lambda: made(nn.Linear(4, 4).double(), tensor_parallel={"autotp_size": 2, "partition_config": {
        "layer_specs": [{"patterns": ["x.*"]}]}}), ConfigError)  # fmt: skip
    asked = deepspeed.tp_model_init(build(), 2, torch.bfloat16)
    of(lambda: made(asked, tensor_parallel={"autotp_size": 1}), ConfigError)
    of(lambda: made(asked, bf16={"enabled": False}, fp16={"enabled": True}), ConfigError)
    of(lambda: deepspeed.tp_model_init(asked, 1, torch.bfloat16), ConfigError)
    other = _Megatron()
    other.get_pipeline_model_parallel_world_size = lambda: 2  # pyright: ignore
    of(lambda: made(mpu=other), ConfigError)
    turned = _Megatron()
    turned.get_tensor_model_parallel_rank = lambda: 1 - dist.get_rank()
    of(lambda: made(mpu=turned), ConfigError)
    engine = made(tensor_parallel={"autotp_size": 2})[0]
    tokens = batch(0, dist.get_rank())
    of(lambda: engine(tokens[:, :-1], tokens[:, 1:]), UsageError)
    engine.destroy()
    return said


def test_what_cannot_be_is_one_sentence(ranks: Ranks) -> None:
    """On every rank, in the words of what was given."""
    words = [
        "tensor_parallel.autotp_size = 3 does not multiply up to the 2 ranks",
        "patterns has 'x.*', which matches no parameter",
        "tp_model_init(tp_size=...) says 2 ranks of tensor, and tensor_parallel.autotp_size says 1",
        "tp_model_init(dtype=torch.bfloat16), but the config trains in torch.float16",
        "the model was given (2, torch.bfloat16) before",
        "initialize(mpu=...) has 2 ranks of pipeline",
        "ranks of tensor follow each other",
        "the 2 ranks that share each layer have different batches",
    ]
    for said in ranks.run(_refused, world_size=2):
        for text, word in zip(said, words, strict=True):
            assert word in text and not re.search(r"[.] [A-Z]", text), text


def test_patterns_of_a_config_become_words() -> None:
    """``partition_config`` in the words of a plan; what is not built is refused by its key."""
    names = ["a.q.weight", "a.q.bias", "a.gate_up.weight", "a.o.weight", "router.weight"]
    specs = [
        {"patterns": [r".*\.gate_up\.weight"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
        {"patterns": [r".*\.q\.(weight|bias)$"]},
        {"patterns": [r".*\.o\."], "partition_type": "Row"},
        {"patterns": ["router"], "partition_type": "skip", "grad_allreduce": True},
        {"patterns": ["none of these"], "model_types": ["llama"]},
    ]
    assert plan_words({"layer_specs": specs}, names, "gpt") == {
        "a.q": "column",
        "a.gate_up": ("column", 2),
        "a.o": "row",
        "router": "partial",
    }
    for spec, word in (
        ({"patterns": [".*"], "partition_type": "colum"}, "Did you mean 'column'?"),
        ({"patterns": [".*"], "shape": [[4, 2, 2], -1]}, "n equal matrices"),
        ({"patterns": [".*"], "partition_dim": 1}, "columns are cut along 0"),
        ({"pattern": [".*"]}, "Did you mean 'patterns'?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(word)):
            plan_words({"layer_specs": [spec]}, names, None)


def test_sizes_of_a_config() -> None:
    """The batch triad counts ranks as DeepSpeed does: each of tensor, and those that share sequences once."""
    given = {"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}
    settings = read(given, world_size=8)
    assert settings.sizes == (2, 2, 2, 1) and settings.micro_batch == 2
    assert settings.mesh == {"inter": 2, "intra": 2, "tensor": 2}
    early = read({**given, "tensor_parallel": {"autotp_size": "auto"}}, early=True)
    assert early["tensor_parallel.autotp_size"] == 0
    with pytest.raises(ConfigError, match="data_parallel_size = 4 x sequence_parallel_size = 4 does not multiply up"):
        read({"train_batch_size": 8, "data_parallel_size": 4, "sequence_parallel_size": 4}, world_size=8)
    with pytest.raises(ConfigError, match="groups of 4 ranks"):
        zero = {"stage": 3, "mics_shard_size": 4}
        read({"train_batch_size": 8, "sequence_parallel_size": 2, "zero_optimization": zero}, world_size=8)
    with pytest.raises(ConfigError, match=re.escape("Did you mean 'tensor_parallel.tp.tp_grain_size'?")):
        read({"train_batch_size": 8, "tensor_parallel": {"tp_grain_size": 64}}, world_size=8)
