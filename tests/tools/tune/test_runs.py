"""Runs of the command: what they leave behind, how they go on elsewhere, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from shardfold.tools.tune.config import DPOConfig, SFTConfig, from_options, option_fields, resumed_settings
from tests.support.clients import needs
from tests.tools.tune import support

pytestmark = needs("transformers", "peft")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft-lora": ("sft", {"adapter": {"rank": 4}, "text": {"noise": 5.0}}),
    "dpo-whole": ("dpo", {}),
    "kto-lora": ("kto", {"adapter": {"rank": 4, "variant": "dora"}}),
    "sft-packed": ("sft", {"text": {"pack": True, "length": 64}, "eval_data": "more.jsonl", "eval_every": 2}),
    "reward-freeze": ("reward", {"adapter": {"kind": "freeze", "layers": 1}}),
}


def _tuned(folder: str, recipe: str, settings: dict[str, Any]) -> dict[str, Any]:
    from shardfold.tools.tune.config import config_class, resumed_settings
    from shardfold.tools.tune.tuned import tune

    os.chdir(folder)
    kind = config_class(recipe)
    if "resume" in settings:
        settings = resumed_settings(kind, Path(settings["resume"]), settings)
    result = tune(kind.load(settings))
    return {"losses": result.losses, "held_out": result.held_out, "steps": result.steps}


def _folder(tmp_path: Path, recipe: str) -> str:
    rows = {"sft": support.chats, "kto": support.labelled}.get(recipe, support.pairs)
    support.model_folder(tmp_path / "base", scale=4.0)
    support.write_rows(tmp_path / "rows.jsonl", rows(24))
    support.write_rows(tmp_path / "more.jsonl", rows(7, seed=1))
    return str(tmp_path)


@pytest.mark.parametrize(
    "case",
    [each if each in ("dpo-whole", "sft-packed") else pytest.param(each, marks=pytest.mark.soak) for each in CASES],
)
def test_a_run_goes_on_on_other_ranks(case: str, ranks: Ranks, tmp_path: Path) -> None:
    """From a checkpoint of two ranks under zero3, one rank with twice the micro-batches under ddp comes to the same
    losses: data, noise of none, reference and optimizer stand where they stood. What was prepared is gone by then."""
    recipe, more = CASES[case]
    if case == "sft-lora":
        more = {"adapter": more["adapter"]}  # noise is drawn by rank
    folder = _folder(tmp_path, recipe)
    common = {
        "model": "base", "data": "rows.jsonl", "cache": "cache", "lr": 1e-3, "steps": 6, "save_every": 2, "keep": 5,
        "micro_batch": 2, **more,
    }  # fmt: skip
    whole = ranks.run(_tuned, folder, recipe, {**common, "layout": "zero3", "out": "first"}, world_size=2)[0]
    shutil.rmtree(tmp_path / "cache")
    given = {"resume": "first/checkpoints/step-000002", "layout": "ddp", "accumulate": 2, "out": "second"}
    rest = ranks.run(_tuned, folder, recipe, given, world_size=1)[0]
    assert rest["losses"] == pytest.approx(whole["losses"][2:], abs=1e-5, rel=1e-5)
    assert rest["held_out"] == pytest.approx(whole["held_out"], abs=1e-5, rel=1e-5)
    assert rest["steps"] == 6


def test_what_a_run_leaves_behind(ranks: Ranks, tmp_path: Path) -> None:
    """Settings that repeat it, a line for each step, the model as transformers reads it, which answers end as they were
    trained to, and a run that takes it as its model."""
    folder = _folder(tmp_path, "sft")
    settings = {"model": "base", "data": "rows.jsonl", "cache": "cache", "lr": 1e-3, "steps": 3, "micro_batch": 4}
    ranks.run(_tuned, folder, "sft", {**settings, "out": "a", "adapter": {"rank": 2}}, world_size=1)
    out = tmp_path / "a"
    names = {each.name for each in out.iterdir()}
    assert names == {
        "adapter", "config.json", "data.json", "metrics.jsonl", "program.txt", "report.html", "run.status",
        "summary.json",
    }  # fmt: skip
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and all("accuracy" in row for row in rows)
    kept = json.loads((out / "config.json").read_text())
    assert kept["recipe"] == "sft" and kept["adapter"]["rank"] == 2 and kept["derived"]["trained"] > 0
    again = {name: value for name, value in kept.items() if name not in ("derived", "procs")}
    repeated = ranks.run(_tuned, folder, "sft", {**again, "out": "b"}, world_size=1)[0]
    assert repeated["losses"] == [row["loss"] for row in rows]
    ranks.run(_tuned, folder, "sft", {**settings, "model": "a", "out": "c"}, world_size=1)
    made = json.loads((tmp_path / "c" / "model" / "generation_config.json").read_text())
    assert made["eos_token_id"] in (1, [1])
    assert json.loads((tmp_path / "c" / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    page = (out / "report.html").read_text()
    assert "sft of base" in page and "tune sft --config" in page


@pytest.mark.soak
def test_answers_end_by_themselves(tmp_path: Path) -> None:
    """Of a model that did not end any, behind SFT, at least 99 of 100 questions' greedy answers; the folder that was
    written says with which token."""
    from shardfold.tools.tune.eval_config import EvalConfig
    from shardfold.tools.tune.evaluate import evaluate
    from shardfold.tools.tune.tuned import tune

    support.model_folder(tmp_path / "base", scale=4.0)
    rows = [
        {"messages": [{"role": "user", "content": f"{a} {b}"}, {"role": "assistant", "content": f"{b} it is"}]}
        for a in support.WORDS
        for b in support.WORDS
    ]
    support.write_rows(tmp_path / "rows.jsonl", rows)
    settings = {"model": tmp_path / "base", "data": str(tmp_path / "rows.jsonl"), "cache": tmp_path / "cache"}
    tune(SFTConfig.load({**settings, "steps": 150, "micro_batch": 16, "lr": 5e-3, "out": tmp_path / "run"}))
    asked = {"data": str(tmp_path / "rows.jsonl"), "answers": 100, "max_tokens": 32, "out": tmp_path / "eval"}
    before, after = (
        evaluate(EvalConfig.load({**asked, "model": model})).answers for model in (tmp_path / "base", tmp_path / "run")
    )
    assert before is not None and before.stopped < 0.5
    assert after is not None and after.prompts == 100 and after.stopped >= 0.99
    said = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert said["eos_token_id"] in (1, [1])


def merged_logits(folder: str) -> tuple[list[float], list[float]]:
    """First logits of a run whose model is an adapter, and of that adapter as peft merges it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from shardfold.tools.tune.adapters import beginning
    from shardfold.tools.tune.models import ModelPlace, hollow_model

    place = ModelPlace.find(Path(folder, "a"))
    model, tensors = beginning(hollow_model(place.config, "lm"), place, None, "lm", 0)
    model.load_state_dict({name: tensors[name] for name in tensors}, strict=False, assign=True)
    base = AutoModelForCausalLM.from_pretrained(Path(folder, "base"), dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # peft asks for it
        theirs = PeftModel.from_pretrained(base, str(Path(folder, "a", "adapter"))).eval()
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        return [each(input_ids=ids).logits[0, -1].tolist() for each in (model.eval(), theirs)]  # type: ignore[return-value]


def test_an_adapter_as_a_model_is_merged(ranks: Ranks, tmp_path: Path) -> None:
    """Its base answers with it as peft's model does."""
    folder = _folder(tmp_path, "sft")
    settings = {"model": "base", "data": "rows.jsonl", "cache": "cache", "lr": 1e-2, "steps": 3, "micro_batch": 4}
    ranks.run(_tuned, folder, "sft", {**settings, "out": "a", "adapter": {"rank": 2, "variant": "dora"}}, world_size=1)
    ours, theirs = ranks.run(merged_logits, folder, world_size=1)[0]
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        each if each == "galore" else pytest.param(each, marks=pytest.mark.soak)
        for each in ("galore", "galore8bit", "muon", "lion", "adafactor", "adamw8bit")
    ],
)
def test_optimizers_train_alike_on_ranks(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """All parameters by an optimizer that may need whole matrices: two ranks under zero3 have the losses of one."""
    folder = _folder(tmp_path, "sft")
    more = {"galore_rank": 4, "galore_every": 2} if name.startswith("galore") else {}
    common = {
        "model": "base",
        "data": "rows.jsonl",
        "cache": "cache",
        "lr": 1e-3,
        "steps": 5,
        "optimizer": name,
        **more,
    }
    one = ranks.run(_tuned, folder, "sft", {**common, "layout": "ddp", "out": "a", "micro_batch": 4}, world_size=1)[0]
    two = ranks.run(_tuned, folder, "sft", {**common, "layout": "zero3", "out": "b", "micro_batch": 2}, world_size=2)[0]
    assert one["losses"][-1] < one["losses"][0]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5 if name != "adamw8bit" else 1e-3)


def test_what_is_left_out_is_told_and_a_refused_run_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that are not trained, by why, before the first step; without any others the run is refused, of which nothing
    is left."""
    from shardfold.tools.tune.tuned import tune

    _folder(tmp_path, "sft")
    monkeypatch.chdir(tmp_path)
    support.write_rows(tmp_path / "rows.jsonl", [*support.chats(4), {"messages": []}])
    common = {"model": "base", "cache": "cache", "steps": 1, "adapter": {"rank": 2}}
    tune(SFTConfig.load({**common, "data": "rows.jsonl", "eval_data": "more.jsonl", "out": "a"}))
    assert "train: 1 row left out as empty\n" in capsys.readouterr().out
    support.write_rows(tmp_path / "rows.jsonl", [{"messages": []}])
    with pytest.raises(ConfigError, match="no row is left to train on"):
        tune(SFTConfig.load({**common, "data": "rows.jsonl", "out": "b"}))
    assert not (tmp_path / "b").exists()


def test_steps_take_the_place_of_epochs_in_a_run_that_goes_on(tmp_path: Path) -> None:
    """And epochs that of steps; everything else stays."""
    begun = {"recipe": "sft", "model": "base", "data": "rows.jsonl", "lr": 1e-3}
    for first, then in (("epochs", "steps"), ("steps", "epochs")):
        (tmp_path / "config.json").write_text(json.dumps({**begun, first: 2}))
        config = SFTConfig.load(resumed_settings(SFTConfig, tmp_path, {then: 9, "resume": str(tmp_path)}))
        assert (config.steps, config.epochs) == ((9, 1) if then == "steps" else (None, 9))
        assert config.lr == 1e-3


def test_options_and_files_say_the_same() -> None:
    """An option for each setting, and what they make is what a file has."""
    given = from_options(SFTConfig, {"model": "base", "data": "a.jsonl,b.jsonl", "lora": "8", "variant": "dora",
                                     "bits": "4", "length": "64", "pack": True, "rope": "yarn:4"})  # fmt: skip
    config = SFTConfig.load(given)
    assert config.adapter is not None and config.adapter.rank == 8 and config.adapter.variant == "dora"
    assert config.base.resting == "nf4/64" and config.table().base is not None
    assert config.text.pack and config.text.rope == {"type": "yarn", "factor": 4.0} and len(config.data) == 2
    assert SFTConfig.load(config.plain()) == config
    most = SFTConfig.load({"model": "base", "data": "a.jsonl", "micro_batch": "max"})
    assert most.micro_batch == 0 and most.plain()["micro_batch"] == "max" and SFTConfig.load(most.plain()) == most
    with pytest.raises(ConfigError, match="should be at least 1, or max"):
        SFTConfig.load({"model": "base", "data": "a.jsonl", "micro_batch": 0})
    short = SFTConfig.load({"model": "base", "data": "a.jsonl"}).plain(given=True)  # what the command tells its ranks
    assert short == {"recipe": "sft", "model": "base", "data": [{"path": "a.jsonl"}]}
    assert {"beta", "loss", "label_smoothing", "lora", "pre_seq_len"} <= option_fields(DPOConfig).keys()
    with pytest.raises(ConfigError, match="--label-smoothing has no effect here"):
        DPOConfig.load({"model": "base", "data": "a", "loss": "ipo", "label_smoothing": 0.1})


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    """Each with what it is, and what to give."""
    from shardfold.tools.tune.models import ModelPlace

    with pytest.raises(ConfigError, match=r"there is no folder .* Nothing is downloaded"):
        ModelPlace.find(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"neither config\.json nor adapter_config\.json"):
        ModelPlace.find(tmp_path)
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a checkpoint: go on with it by --resume"):
        ModelPlace.find(tmp_path)
    (tmp_path / "index.json").unlink()
    (tmp_path / "config.json").write_text('{"recipe": "sft"}')
    with pytest.raises(ConfigError, match="has no model yet"):
        ModelPlace.find(tmp_path)
    (tmp_path / "config.json").write_text('{"size": "demo"}')
    with pytest.raises(ConfigError, match="export it first"):
        ModelPlace.find(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "far/away"}')
    with pytest.raises(ConfigError, match="of the model 'far/away', which is no folder here"):
        ModelPlace.find(tmp_path)
