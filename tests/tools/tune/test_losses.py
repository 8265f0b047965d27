"""Each recipe's losses over 20 steps are those of TRL's trainer on the same tokens, on one rank and on two."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfold.testing import Ranks
from tests.support.clients import needs
from tests.tools.tune import support

pytestmark = needs("transformers", "peft", "trl", "datasets")

STEPS = 20
BATCH = 4
LR = 1e-3
TOLERANCE = 1e-5
ROWS = {"sft": support.chats, "dpo": support.pairs, "orpo": support.pairs, "reward": support.pairs,
        "kto": support.labelled}  # fmt: skip


def single_turns(number: int) -> list[dict[str, Any]]:
    """Conversations of one answer: TRL distils the last one alone."""
    return [{"messages": row["messages"][:2]} for row in support.chats(number)]


def _number(recipe: str) -> int:
    """Rows: each comes once; kto's answers go behind the prompts of one batch, which TRL pairs within a batch."""
    return BATCH if recipe == "kto" else STEPS * BATCH


def ours(recipe: str, folder: str, layout: str, adapter: dict[str, Any] | None, more: dict[str, Any]) -> list[float]:
    """Losses of a run on these ranks, which share out each batch."""
    from shardfold.tools.observe.console import lenient_console
    from shardfold.tools.tune.config import config_class
    from shardfold.tools.tune.run import TuneRun

    torch.manual_seed(0)
    here, world = Path(folder), torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    shared = more.get("tensor", 1) * more.get("sequence", 1)
    settings = {
        "model": here / "base", "data": str(here / "rows.jsonl"), "cache": here / "cache", "layout": layout,
        "steps": STEPS, "micro_batch": BATCH * shared // world, "lr": LR, "schedule": "constant", "clip_norm": 0.0,
        "adapter": adapter, **more,
    }  # fmt: skip
    run = TuneRun(config_class(recipe).load(settings), lenient_console())
    run.batches = run.batches_of(run.rows, shuffle=False)
    run.recipe.begin(run)
    windows = iter(run.batches)
    losses = [run.step(windows).loss for _ in range(run.total)]
    run.recipe.close()
    run.engine.close()
    return losses


def _columns(recipe: str, rows: Any) -> dict[str, list[Any]]:
    """The rows as TRL's trainers take them: tokens, or else the text, of which they make the same."""
    found: dict[str, list[Any]] = {}

    def add(**values: Any) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(value)

    for number in range(len(rows)):
        row = rows[number]
        if recipe == "sft":
            labels = [int(i) if t else -100 for i, t in zip(row.ids, row.trained, strict=True)]
            add(input_ids=row.ids.tolist(), labels=labels)
        elif recipe == "reward":
            add(chosen_ids=row.chosen.ids.tolist(), rejected_ids=row.rejected.ids.tolist())
        elif recipe == "distill":
            add(messages=single_turns(len(rows))[number]["messages"])
        else:
            add(**ROWS[recipe](len(rows))[number])
    return found


def theirs(recipe: str, folder: str, lora: dict[str, Any] | None, more: dict[str, Any]) -> list[float]:
    """Losses of TRL's trainer in one process."""
    import trl
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from shardfold.tools.tune.config import Source, Text
    from shardfold.tools.tune.data.prepared import prepare

    disable_progress_bars()
    warnings.simplefilter("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    here, tokenizer = Path(folder), support.tiny_tokenizer()
    kind: Any = {"sft": "chat", "distill": "chat", "kto": "label"}.get(recipe, "pair")
    text = Text(length=128)
    rows = prepare([Source(path=here / "rows.jsonl")], tokenizer, text, kind, cache=here / "cache")
    options: dict[str, Any] = {
        "output_dir": str(here / "trl"), "max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": LR,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "weight_decay": 0.0, "logging_steps": 1, "bf16": False,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_length": 128,
        "gradient_checkpointing": False, "train_sampling_strategy": "sequential", **more,
    }  # fmt: skip
    besides: dict[str, Any] = {}
    if recipe == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        options["max_completion_length"] = 64
        arguments, trainer_class = ORPOConfig(**options), ORPOTrainer
    elif recipe == "distill":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        arguments, trainer_class = GKDConfig(**options, lmbda=0.0), GKDTrainer
        besides["teacher_model"] = AutoModelForCausalLM.from_pretrained(here / "teacher", dtype=torch.float32)
    else:
        names = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}
        arguments = getattr(trl, f"{names[recipe]}Config")(**options)
        trainer_class = getattr(trl, f"{names[recipe]}Trainer")
    columns = _columns(recipe, rows)
    kind_of = AutoModelForSequenceClassification if recipe == "reward" else AutoModelForCausalLM
    model: Any = kind_of.from_pretrained(here / ("scored" if recipe == "reward" else "base"), dtype=torch.float32)
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer, **besides
    )
    trainer.train()
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


def _both(ranks: Ranks, recipe: str, tmp_path: Path, more: dict[str, Any] | None = None) -> None:
    more = more or {}
    support.model_folder(tmp_path / "base", scale=4.0)
    support.write_rows(tmp_path / "rows.jsonl", ROWS[recipe](_number(recipe)))
    if recipe == "reward":
        support.scored_folder(tmp_path / "base", tmp_path / "scored")
    folder = str(tmp_path)
    wanted = ranks.run(theirs, recipe, folder, None, more, world_size=1)[0]
    assert len(wanted) == STEPS and wanted[-1] < wanted[0]
    one = ranks.run(ours, recipe, folder, "ddp", None, more, world_size=1)[0]
    two = ranks.run(ours, recipe, folder, "zero3", None, more, world_size=2)[0]
    for found in (one, two):
        assert found == pytest.approx(wanted, abs=TOLERANCE, rel=TOLERANCE)


@pytest.mark.parametrize(
    "recipe",
    ["sft", "dpo", *(pytest.param(name, marks=pytest.mark.soak) for name in ("orpo", "reward", "kto"))],
)
def test_losses_are_those_of_trl(recipe: str, ranks: Ranks, tmp_path: Path) -> None:
    """All parameters trained by AdamW, 20 steps of 4 rows or pairs: within 1e-5, whoever shares them out."""
    _both(ranks, recipe, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("recipe", list(ROWS))
def test_packed_rows_are_rows(recipe: str, ranks: Ranks, tmp_path: Path) -> None:
    """All rows in one step, packed and not, on one rank and two: the same losses of three steps."""
    support.model_folder(tmp_path / "base", scale=4.0)
    support.write_rows(tmp_path / "rows.jsonl", ROWS[recipe](8))
    common = {"steps": 3, "micro_batch": 8}
    one = ranks.run(ours, recipe, str(tmp_path), "ddp", None, common, world_size=1)[0]
    for world, micro_batch in ((1, 8), (2, 4)):
        more = {"steps": 3, "micro_batch": micro_batch, "text": {"pack": True, "length": 128}}
        found = ranks.run(ours, recipe, str(tmp_path), "zero3", None, more, world_size=world)[0]
        assert found == pytest.approx(one, abs=TOLERANCE, rel=TOLERANCE)


def references(folder: str, recipe: str, adapter: dict[str, Any] | None) -> list[float]:
    """Losses of 3 steps over the same rows, whose first one is of a model that is its reference."""
    return ours(recipe, folder, "zero3", adapter, {"steps": 3})[:3]


@pytest.mark.parametrize("adapter", [{"rank": 4}, {"rank": 4, "variant": "pissa"}], ids=["apart", "in the base"])
def test_the_reference_is_the_model_as_it_was(adapter: dict[str, Any], ranks: Ranks, tmp_path: Path) -> None:
    """With an adapter the losses of DPO are those of a reference that was computed before, from its log 2 on; also with
    one that takes its first matrices out of the base."""
    support.model_folder(tmp_path / "base", scale=4.0)
    support.write_rows(tmp_path / "rows.jsonl", support.pairs(_number("dpo")))
    found = ranks.run(references, str(tmp_path), "dpo", adapter, world_size=2)[0]
    assert found[0] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(found[1] - math.log(2)) > 1e-4
    kept = list((tmp_path / "cache" / "reference").glob("*.npy")) if (tmp_path / "cache" / "reference").exists() else []
    assert len(kept) == (1 if adapter.get("variant") else 0)


@pytest.mark.soak
@pytest.mark.parametrize("axis", ["tensor", "sequence", "pipeline"])
@pytest.mark.parametrize("recipe", list(ROWS))
@pytest.mark.parametrize("adapter", [None, {"rank": 4, "targets": "q_proj,v_proj"}], ids=["whole", "lora"])
def test_ranks_that_share_layers_or_sequences(
    recipe: str, axis: str, adapter: dict[str, Any] | None, ranks: Ranks, tmp_path: Path
) -> None:
    """Two ranks along an axis that is none of data come to the losses of one rank, of every recipe."""
    support.model_folder(tmp_path / "base", scale=4.0)
    support.write_rows(tmp_path / "rows.jsonl", ROWS[recipe](_number(recipe)))
    folder = str(tmp_path)
    one = ranks.run(ours, recipe, folder, "ddp", adapter, {}, world_size=1)[0]
    more = {"accumulate": 4, "micro_batch": 1} if axis == "pipeline" else {}
    two = ranks.run(ours, recipe, folder, "zero3", adapter, {axis: 2, **more}, world_size=2)[0]
    assert two == pytest.approx(one, abs=TOLERANCE, rel=TOLERANCE)


@pytest.mark.parametrize("recipe", ["sft", pytest.param("reward", marks=pytest.mark.soak)])
def test_stages_evaluate_and_write_as_one_rank_does(recipe: str, ranks: Ranks, tmp_path: Path) -> None:
    """Two stages: losses and figures of steps and of held-out rows, and what is written, are those of one rank; the
    last window of an epoch has a micro-batch without rows. Rates fall over as many steps as two epochs have."""
    support.model_folder(tmp_path / "base", scale=4.0)
    support.write_rows(tmp_path / "rows.jsonl", ROWS[recipe](7))
    support.write_rows(tmp_path / "held.jsonl", ROWS[recipe](5, seed=1))
    one = ranks.run(written, recipe, str(tmp_path), {"layout": "ddp", "micro_batch": 4}, world_size=1)[0]
    more = {"layout": "zero2", "pipeline": 2, "accumulate": 4, "micro_batch": 1}
    for found in ranks.run(written, recipe, str(tmp_path), more, world_size=2):
        for key, value in one.items():
            assert found[key] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), key
    assert one["rates"] == pytest.approx([LR * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)])


def test_ranks_of_tensor_write_the_adapter_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Each has parts of its matrices; the file has all of them, and figures of steps are those of one rank."""
    support.model_folder(tmp_path / "base", scale=4.0)
    support.write_rows(tmp_path / "rows.jsonl", ROWS["sft"](7))
    support.write_rows(tmp_path / "held.jsonl", ROWS["sft"](5, seed=1))
    one = ranks.run(written, "sft", str(tmp_path), {"layout": "ddp", "micro_batch": 4}, world_size=1)[0]
    more = {"layout": "zero3", "micro_batch": 4, "tensor": 2}
    for found in ranks.run(written, "sft", str(tmp_path), more, world_size=2):
        for key, value in one.items():
            assert found[key] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), key


def written(recipe: str, folder: str, more: dict[str, Any]) -> dict[str, Any]:
    """What a run of two epochs said, and a sum over what it wrote."""
    from safetensors.torch import load_file

    from shardfold.tools.tune.config import config_class
    from shardfold.tools.tune.tuned import tune

    here = Path(folder)
    out = here / f"out-{more['layout']}"
    settings = {
        "model": here / "base", "data": str(here / "rows.jsonl"), "eval_data": str(here / "held.jsonl"),
        "cache": here / "cache", "lr": LR, "epochs": 2.0, "adapter": {"rank": 4}, "out": out, **more,
    }  # fmt: skip
    found = tune(config_class(recipe).load(settings))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # the adapter is written
    values = load_file(out / "adapter" / "adapter_model.safetensors")
    sums = {name: float(value.double().square().sum()) for name, value in sorted(values.items())}
    rates = [json.loads(line)["lr"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {"losses": found.losses, "rates": rates, **found.figures, "held out": list(found.held_out.values()), **sums}


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3", "hsdp", "offload", "infinity"])
def test_every_layout_is_the_same(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    """DPO with LoRA, whose reference is the base, on two ranks."""
    support.model_folder(tmp_path / "base", scale=4.0)
    support.write_rows(tmp_path / "rows.jsonl", support.pairs(_number("dpo")))
    one = ranks.run(ours, "dpo", str(tmp_path), "ddp", {"rank": 4}, {}, world_size=1)[0]
    two = ranks.run(ours, "dpo", str(tmp_path), layout, {"rank": 4}, {}, world_size=2)[0]
    assert two == pytest.approx(one, abs=TOLERANCE, rel=TOLERANCE)


@pytest.mark.soak
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_distillation_is_that_of_trl(divergence: str, ranks: Ranks, tmp_path: Path) -> None:
    """Its trainer of generalized knowledge distillation, without answers of the student, at both ends of its beta."""
    support.model_folder(tmp_path / "base", scale=4.0)
    support.model_folder(tmp_path / "teacher", scale=4.0, seed=1, num_hidden_layers=3)
    support.write_rows(tmp_path / "rows.jsonl", single_turns(_number("distill")))
    folder, beta = str(tmp_path), {"beta": 0.0 if divergence == "forward" else 1.0}
    wanted = ranks.run(theirs, "distill", folder, None, beta, world_size=1)[0]
    assert len(wanted) == STEPS and wanted[-1] < wanted[0]
    more = {"teacher": tmp_path / "teacher", "divergence": divergence}
    for world, layout in ((1, "ddp"), (2, "zero3")):
        found = ranks.run(ours, "distill", folder, layout, None, more, world_size=world)[0]
        assert found == pytest.approx(wanted, abs=TOLERANCE, rel=TOLERANCE)


def distilled(folder: str, more: dict[str, Any]) -> list[float]:
    """Losses of a student that begins as its teacher, or as another model."""
    return ours("distill", folder, "zero3", None, {"steps": STEPS, **more})


def test_distillation_comes_nearer_to_its_teacher(ranks: Ranks, tmp_path: Path) -> None:
    """From its teacher a student has nothing to learn; another one comes nearer, and begins with the divergence that
    plain PyTorch finds, in the direction that is asked for."""
    import torch
    import torch.nn.functional as F

    from shardfold.tools.tune._divergences import divergences
    from shardfold.tools.tune.config import DistillConfig

    support.model_folder(tmp_path / "base", scale=4.0)
    support.model_folder(tmp_path / "teacher", scale=4.0, seed=1, num_hidden_layers=3)
    support.write_rows(tmp_path / "rows.jsonl", support.chats(STEPS * BATCH))
    same = ranks.run(distilled, str(tmp_path), {"teacher": tmp_path / "base"}, world_size=2)[0]
    assert abs(same[0]) < 1e-6
    losses = ranks.run(distilled, str(tmp_path), {"teacher": tmp_path / "teacher"}, world_size=2)[0]
    assert losses[-1] < losses[0] / 2
    draw = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 11, generator=draw)
    for direction, of, to in (("forward", teacher, student), ("reverse", student, teacher)):
        config = DistillConfig.load(
            {"model": "a", "data": "b", "teacher": "c", "divergence": direction, "temperature": 2}
        )
        wanted = 4 * F.kl_div((to / 2).log_softmax(-1), (of / 2).softmax(-1), reduction="none").sum(-1)
        assert torch.allclose(divergences(student, teacher, config), wanted, atol=1e-6)


def test_noise_has_the_law_of_the_paper() -> None:
    """Uniform within alpha over the root of tokens times width, of each sample by its own length; other on other ranks
    and in other steps, the same again in the same ones, and none where nothing is trained."""
    from torch import nn

    from shardfold.tools.tune._noise import EmbeddingNoise, sample_lengths

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 64)

        def get_input_embeddings(self) -> nn.Module:
            return self.table

    model, ids = Model(), torch.zeros(2, 100, dtype=torch.int64)
    documents = torch.zeros(2, 100, dtype=torch.int32)
    documents[0, 75:], documents[1] = 1, 2
    noise = EmbeddingNoise(model, 5.0, seed=0)
    noise.lengths = sample_lengths(documents)
    assert noise.lengths[0].tolist() == [75] * 75 + [25] * 25

    def drawn(rank: int, step: int) -> torch.Tensor:
        noise.step((rank, 0), step)
        return model.table(ids).detach() - model.table.weight[0].detach()

    first = drawn(0, 0)
    for row, part, length in ((0, slice(0, 75), 75), (0, slice(75, 100), 25), (1, slice(0, 100), 100)):
        most = 5.0 / (length * 64) ** 0.5
        found = first[row, part]
        assert 0.99 * most < found.abs().max() <= most * (1 + 1e-5)
        assert found.var() == pytest.approx(most**2 / 3, rel=0.1)
    assert torch.equal(first, drawn(0, 0))
    assert not torch.allclose(first, drawn(1, 0)) and not torch.allclose(first, drawn(0, 1))
    model.eval()
    assert not drawn(0, 0).any()
