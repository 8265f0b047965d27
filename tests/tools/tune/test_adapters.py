"""Adapters are peft's own under an engine: losses, what is trained, and what is written, beside peft alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from tests.support.clients import needs
from tests.tools.tune import support

pytestmark = needs("transformers", "peft")

STEPS = 20
LR = 5e-3
LOOSE = 1e-6
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4},
    "rslora": {"rank": 4, "variant": "rslora"},
    "dora": {"rank": 4, "variant": "dora"},
    "pissa": {"rank": 4, "variant": "pissa"},
    "olora": {"rank": 4, "variant": "olora"},
    "loftq": {"rank": 4, "variant": "loftq"},
    "lora+": {"rank": 4, "lr_ratio": 8, "targets": "q_proj,down_proj"},
    "whole": {"rank": 4, "modules": "lm_head"},
    "prefix": {"kind": "prefix", "pre_seq_len": 4},
    "projected": {"kind": "prefix", "pre_seq_len": 4, "prefix_projection": True},
    "yarn": {"rank": 4},
    "linear": {"rank": 4},
}
ROPE = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "linear": {"rope_type": "linear", "factor": 4.0},
}
"""As transformers' config has them."""


def _settings(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    adapter = KINDS.get(name)
    if name in ROPE:
        more = {"text": {"rope": f"{name}:4"}, **more}
    return {
        "model": folder / "base", "data": str(folder / "rows.jsonl"), "cache": folder / "cache", "steps": STEPS,
        "lr": LR, "schedule": "constant", "clip_norm": 0.0, "adapter": adapter, **more,
    }  # fmt: skip


def _run(settings: dict[str, Any]) -> Any:
    from shardfold.tools.observe.console import lenient_console
    from shardfold.tools.tune.config import SFTConfig
    from shardfold.tools.tune.run import TuneRun

    run = TuneRun(SFTConfig.load(settings), lenient_console())
    run.batches = run.batches_of(run.rows, shuffle=False)
    run.recipe.begin(run)
    return run


def ours(folder: str, name: str, more: dict[str, Any]) -> tuple[list[float], list[list[float]]]:
    """Losses under an engine, and logits of the base with the adapter that was written, as plain peft reads it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from shardfold.tools.tune._written import write_model

    here = Path(folder)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    out = here / f"{name}-{world}-{more.get('layout')}-{more.get('activations')}"
    run = _run(_settings(here, name, micro_batch=4 // world, **more))
    windows = iter(run.batches)
    losses = [run.step(windows).loss for _ in range(STEPS)]
    if run.leads:
        out.mkdir()
    write_model(run, out)
    run.engine.close()
    if not run.leads:
        return losses, []
    named = json.loads((out / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    base = AutoModelForCausalLM.from_pretrained(named, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        model = PeftModel.from_pretrained(base, str(out / "adapter"), is_trainable=False)
    return losses, _logits(model.eval())


def _logits(model: Any) -> list[list[float]]:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.arange(5, 13)[None]).logits[0].tolist()


def alone(folder: str, name: str) -> tuple[list[float], list[list[float]], float]:
    """The same with peft alone, in one process, from the same first values; and by how much what peft makes of the base
    differs from the base where an adapter is to change nothing."""
    import torch
    import torch.nn.functional as F
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from shardfold.tools.tune.adapters import beginning, optimizer_groups
    from shardfold.tools.tune.config import Adapter
    from shardfold.tools.tune.models import ModelPlace, hollow_model

    here, adapter = Path(folder), Adapter.load(KINDS[name])
    place = ModelPlace.find(here / "base")
    wrapped, tensors = beginning(hollow_model(place.config, "lm"), place, adapter, "lm", 0)
    config = place.config
    if name in ROPE:
        config.rope_parameters = {**config.rope_parameters, **ROPE[name]}
        config.max_position_embeddings *= 4
    base = AutoModelForCausalLM.from_pretrained(here / "base", config=config, dtype=torch.float32)
    first = _logits(base)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        model: Any = get_peft_model(base, wrapped.peft_config["default"])
    model.load_state_dict({n: tensors[n] for n in tensors}, strict=False)
    changed = max(
        abs(a - b) for x, y in zip(first, _logits(model.eval()), strict=True) for a, b in zip(x, y, strict=True)
    )
    run = _run(_settings(here, name, micro_batch=4))
    batches = [window.batches[0] for _, window in zip(range(STEPS), iter(run.batches), strict=False)]
    run.engine.close()
    if adapter.lr_ratio is None:
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
    else:
        optimizer = optimizer_groups(model, adapter, torch.optim.AdamW, LR, 0.0)
    model.train()
    losses: list[float] = []
    for batch in batches:
        inputs = {k: v for k, v in batch.inputs.items() if k != "position_ids" or adapter.kind == "lora"}
        logits = model(**inputs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, _logits(model.eval()), changed


def _prepared(tmp_path: Path) -> str:
    support.model_folder(tmp_path / "base", scale=4.0)
    support.write_rows(tmp_path / "rows.jsonl", support.chats(STEPS * 4))
    return str(tmp_path)


def _near(found: list[list[float]], wanted: list[list[float]], tolerance: float) -> bool:
    return all(a == pytest.approx(b, abs=tolerance, rel=tolerance) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "name", [n if n in ("dora", "yarn") else pytest.param(n, marks=pytest.mark.soak) for n in KINDS]
)
def test_as_with_peft_alone(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """20 losses on one rank and under zero3 on two are those of peft alone, and so are the logits of what is written,
    read by plain peft. Before the first step the model answers as its base does, but for what LoftQ rounds and a
    prefix adds."""
    folder = _prepared(tmp_path)
    losses, logits, changed = ranks.run(alone, folder, name, world_size=1)[0]
    assert losses[-1] < losses[0] or name == "prefix"  # without a projection one learns less than batches differ
    if name not in ("loftq", "prefix", "projected"):
        assert changed < 1e-4
    for world, layout in ((1, "ddp"), (2, "zero3")):
        found, written = ranks.run(ours, folder, name, {"layout": layout}, world_size=world)[0]
        assert found == pytest.approx(losses, abs=LOOSE, rel=LOOSE)
        assert _near(written, logits, 1e-4 if name in ("pissa", "olora") else 1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS)
def test_every_layout_is_as_peft_alone(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """20 losses on two ranks under each other layout, with recomputation; also of a prefix, with which peft refuses
    it."""
    folder = _prepared(tmp_path)
    losses, logits, _ = ranks.run(alone, folder, name, world_size=1)[0]
    for layout in ("zero1", "zero2", "hsdp", "offload", "infinity"):
        more = {"layout": layout, "activations": "recompute"}
        found, written = ranks.run(ours, folder, name, more, world_size=2)[0]
        assert found == pytest.approx(losses, abs=LOOSE, rel=LOOSE), layout
        assert _near(written, logits, 1e-4 if name in ("pissa", "olora") else 1e-5), layout


def test_norms_of_rows_are_found_from_factors() -> None:
    """Of a weight with a change of low rank, which is not formed: those of the sum, to rounding."""
    import torch

    from shardfold.tools.tune.adapters import row_norms

    draw = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(*shape, generator=draw) for shape in ((24, 40), (4, 40), (24, 4)))
    wanted = (weight.double() + 0.7 * b.double() @ a.double()).norm(dim=1)
    assert torch.allclose(row_norms(weight, a, b, 0.7).double(), wanted, rtol=1e-6)
    assert not torch.allclose(weight.double().norm(dim=1), wanted, rtol=0.1)


@pytest.mark.parametrize(("bias", "dropout"), [(False, 0.0), (True, 0.0), (True, 0.5)])
def test_dora_is_that_of_peft(bias: bool, dropout: float) -> None:
    """Output and gradients of a layer, with and without a bias, and where its input is dropped out."""
    import torch
    from peft import LoraConfig, get_peft_model

    from shardfold.tools.tune.adapters import _with_quick_dora

    torch.manual_seed(0)
    config = LoraConfig(target_modules=["0"], r=2, use_dora=True, lora_dropout=dropout, init_lora_weights=False)
    base = torch.nn.Sequential(torch.nn.Linear(12, 8, bias=bias))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        model: Any = get_peft_model(base, config).double()
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)

    def ran() -> list[torch.Tensor]:
        torch.manual_seed(1)
        out = model(x)
        wanted = [x, *(each for each in model.parameters() if each.requires_grad)]
        return [out, *torch.autograd.grad(out.square().sum(), wanted)]

    theirs = ran()
    _with_quick_dora(model)
    for found, wanted in zip(ran(), theirs, strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-9 * float(wanted.detach().abs().max()))
    assert type(model.base_model.model[0].lora_variant["default"]).__name__ == "QuickDora"


@pytest.mark.parametrize("name", ["lora", "projected"])
def test_embeddings_that_are_the_head(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """The file has one tensor for both; an adapter beside them learns as it does with peft alone."""
    support.model_folder(tmp_path / "base", scale=4.0, tie_word_embeddings=True)
    support.write_rows(tmp_path / "rows.jsonl", support.chats(STEPS * 4))
    losses, logits, _ = ranks.run(alone, str(tmp_path), name, world_size=1)[0]
    found, written = ranks.run(ours, str(tmp_path), name, {"layout": "zero3"}, world_size=2)[0]
    assert found == pytest.approx(losses, abs=LOOSE, rel=LOOSE)
    assert _near(written, logits, 1e-5)


@pytest.mark.parametrize("name", ["projected", pytest.param("prefix", marks=pytest.mark.soak)])
def test_a_prefix_with_recomputation(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Blocks that are computed again see the prefix once: losses are peft's without."""
    folder = _prepared(tmp_path)
    losses, logits, _ = ranks.run(alone, folder, name, world_size=1)[0]
    more = {"layout": "zero3", "activations": "recompute"}
    found, written = ranks.run(ours, folder, name, more, world_size=2)[0]
    assert found == pytest.approx(losses, abs=LOOSE, rel=LOOSE)
    assert _near(written, logits, 1e-5)


def test_each_round_of_loftq_is_nearer() -> None:
    """What is left of a weight falls, and is less than what rounding alone leaves; LoRA's scaling is counted."""
    import torch

    from shardfold.tools.tune._loftq import loftq, rounded

    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    left: list[float] = []
    for rounds in range(1, 5):
        base, a, b = loftq(weight, 8, 2.0, "nf4/64", rounds)
        assert torch.equal(rounded(base, "nf4/64"), base)
        left.append(float((weight - base - 2.0 * b @ a).norm()))
    assert left == sorted(left, reverse=True) and left[-1] < 0.95 * left[0]
    assert left[0] < float((weight - rounded(weight, "nf4/64")).norm())


def expanded(folder: str) -> tuple[bool, list[float], set[str], set[str]]:
    """Whether the expanded model answers as its base to the bit, losses, and which parameters changed."""
    import torch
    from transformers import AutoModelForCausalLM

    here = Path(folder)
    adapter = {"kind": "expand", "layers": 2}
    run = _run({**_settings(here, "", micro_batch=2, layout="zero3"), "adapter": adapter})
    base = AutoModelForCausalLM.from_pretrained(here / "base", dtype=torch.float32)
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        same = torch.equal(run.engine(input_ids=ids, use_cache=False).logits, base(input_ids=ids).logits)
    before = run.engine.state_dict()
    windows = iter(run.batches)
    losses = [run.step(windows).loss for _ in range(4)]
    after = run.engine.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    trained = set(run.trained)
    run.engine.close()
    return same, losses, changed, trained


def test_an_expanded_model_begins_as_its_base(ranks: Ranks, tmp_path: Path) -> None:
    """New blocks add nothing at first, to the bit, and are all that is trained."""
    folder = _prepared(tmp_path)
    same, losses, changed, trained = ranks.run(expanded, folder, world_size=2)[0]
    assert same and losses[-1] < losses[0]
    assert {name.split(".")[2] for name in trained} == {"1", "3"}
    assert changed and changed <= trained


def bf16(folder: str) -> list[float]:
    """How far DoRA's magnitudes have moved in bf16."""
    run = _run(_settings(Path(folder), "dora", micro_batch=2, layout="zero3", precision="bf16"))
    names = [name for name in run.trained if "magnitude" in name]
    first = {name: run.tensors[name].float() for name in names}
    windows = iter(run.batches)
    for _ in range(4):
        run.step(windows)
    state = run.engine.state_dict(frozen="skip")
    run.engine.close()
    return [float((state[name].float() - first[name]).abs().max()) for name in names]


def test_magnitudes_of_dora_move_in_bf16(ranks: Ranks, tmp_path: Path) -> None:
    """They rest in fp32, where four steps of the rate are seen."""
    moved = ranks.run(bf16, _prepared(tmp_path), world_size=2)[0]
    assert len(moved) == 14 and min(moved) > LR


def test_what_does_not_go_together() -> None:
    """Sentences, before a model is read."""
    from shardfold.tools.tune.config import SFTConfig, from_options

    common = {"model": "base", "data": "rows.jsonl"}
    with pytest.raises(ConfigError, match="--lora and --freeze choose different adapters"):
        from_options(SFTConfig, {"lora": "4", "freeze": "1"})
    with pytest.raises(ConfigError, match=r"\[adapter\]: there is no setting 'rang'.*rank"):
        SFTConfig.load({**common, "adapter": {"rang": 4}})
    with pytest.raises(ConfigError, match=r"--pre-seq-len has no effect here, as it is of a prefix"):
        SFTConfig.load({**common, "adapter": {"pre_seq_len": 4}})
    with pytest.raises(ConfigError, match="there is no setting 'lora'"):
        SFTConfig.load({**common, "lora": 4})
    with pytest.raises(ConfigError, match="leave --pack out"):
        SFTConfig.load({**common, "adapter": {"kind": "prefix"}, "text": {"pack": True}})
    with pytest.raises(ConfigError, match=r"no optimizer 'galor'.*'galore'"):
        SFTConfig.load({**common, "optimizer": "galor"})
    with pytest.raises(ConfigError, match=r"GaLore keeps moments of a low rank.*leave --lora"):
        SFTConfig.load({**common, "optimizer": "galore", "adapter": {"rank": 4}})
    with pytest.raises(ConfigError, match="--galore-rank has no effect here"):
        SFTConfig.load({**common, "galore_rank": 4})
    with pytest.raises(ConfigError, match="leave --sequence out, or --pipeline"):
        SFTConfig.load({**common, "pipeline": 2, "sequence": 2})
    with pytest.raises(ConfigError, match="which stages do not have: give --lora"):
        SFTConfig.load({**common, "pipeline": 2, "adapter": {"kind": "prefix"}})
    with pytest.raises(ConfigError, match="--order has no effect here"):
        SFTConfig.load({**common, "order": "gpipe"})
    with pytest.raises(ConfigError, match="there is no data"):
        SFTConfig.load({"model": "base"})
