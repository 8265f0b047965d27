"""LLaMA-Factory's YAML: every key is taken, noted or refused, and what is taken makes a config file that loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardfold.errors import ConfigError
from shardfold.tools.cli import app
from shardfold.tools.recipes.train_config import parse_toml
from shardfold.tools.tune.config import config_class

pytest.importorskip("yaml")
factory: Any = pytest.importorskip("shardfold.tools.tune.llamafactory")

YAML = """\
### model
model_name_or_path: base
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: q_proj, v_proj
use_rslora: true
dataset: chats,plain
template: llama3
cutoff_len: 512
max_samples: 100
output_dir: runs/a
logging_steps: 10
save_steps: 50
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
max_steps: 200
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
deepspeed: ds.json
resume_from_checkpoint: null
"""

INFO: dict[str, Any] = {
    "chats": {"file_name": "chats.json", "formatting": "sharegpt"},
    "plain": {"file_name": "plain.jsonl", "columns": {"prompt": "question", "response": "output"}},
    "pairs": {
        "file_name": "pairs.json", "formatting": "sharegpt", "ranking": True,
        "columns": {"messages": "turns", "chosen": "chosen", "rejected": "rejected"},
    },
    "labels": {
        "file_name": "labels.json", "formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "good"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "body"}},
    "hub": {"hf_hub_url": "someone/rows"},
    "pictures": {"file_name": "p.json", "formatting": "sharegpt", "columns": {"messages": "m", "images": "i"}},
    "speakers": {"file_name": "s.json", "formatting": "sharegpt", "tags": {"user_tag": "customer"}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO))
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))


def read(text: str) -> Any:
    Path("y.yaml").write_text(text)
    return factory.read_yaml(Path("y.yaml"))


def settings(text: str) -> Any:
    """The config of a recipe that the printed file is."""
    reading = read(text)
    given = parse_toml(reading.toml())
    assert given.pop("recipe") == reading.recipe
    kind = config_class(reading.recipe)
    return kind.load(kind.checked(given, where="the file"))


def test_what_is_taken_makes_a_config_that_loads() -> None:
    found = settings(YAML)
    assert (found.recipe, found.model, found.out, found.layout, found.offload) == (
        "sft", Path("base"), Path("runs/a"), "zero3", "host",
    )  # fmt: skip
    assert (found.adapter.kind, found.adapter.rank, found.adapter.targets, found.adapter.variant) == (
        "lora", 4, "q_proj,v_proj", "rslora",
    )  # fmt: skip
    assert (found.lr, found.steps, found.warmup, found.schedule) == (1e-4, 200, 20, "cosine")
    assert (found.micro_batch, found.accumulate, found.precision, found.activations) == (2, 8, "bf16", "recompute")
    assert (found.text.length, found.text.pack, found.save_every, found.seed) == (512, False, 50, 42)
    chats, plain = found.data
    assert (chats.path, chats.format, chats.columns) == (Path("data/chats.json"), "sharegpt", None)
    assert (plain.format, plain.columns) == ("alpaca", {"instruction": "question"})


def test_every_key_that_is_given_is_taken_noted_or_refused() -> None:
    """What is noted is said in a sentence of its own; nothing is left out in silence."""
    reading = read(YAML)
    said = "\n".join(reading.notes)
    for line in YAML.splitlines():
        name, _, value = line.partition(": ")
        if value and factory.KEYS[name].fate == "noted":
            assert name in said, name
    assert "all rows are trained" in said and all(note.endswith(".") for note in reading.notes)
    assert "# max_samples is 100" in reading.toml()


@pytest.mark.parametrize(
    ("lines", "recipe", "found"),
    [
        ("stage: dpo\npref_beta: 0.2\npref_loss: ipo\ndataset: pairs", "dpo", {"beta": 0.2, "loss": "ipo"}),
        ("stage: dpo\nbeta: 0.3\nloss_type: orpo\ndataset: pairs", "orpo", {"beta": 0.3}),
        ("stage: kto\nkto_chosen_weight: 2.0\ndataset: labels", "kto", {"desirable": 2.0}),
        ("stage: rm\ndataset: pairs\nper_device_train_batch_size: 1", "reward", {"micro_batch": 1}),
        ("stage: pt\ndataset: texts\nfinetuning_type: full\nuse_muon: true", "pt",
         {"adapter": None, "optimizer": "muon"}),
        ("finetuning_type: freeze\ndataset: chats\noptim: adamw_bnb_8bit", "sft", {"optimizer": "adamw8bit"}),
        ("quantization_bit: 4\ndataset: chats\nfsdp: full_shard auto_wrap", "sft", {"layout": "zero3"}),
        ("max_length: 64\nlora_r: 2\ndataset: chats\neval_strategy: steps\neval_steps: 7\neval_dataset: chats", "sft",
         {"eval_every": 7}),
    ],
)  # fmt: skip
def test_stages_are_recipes(lines: str, recipe: str, found: dict[str, Any]) -> None:
    read_as = settings(f"model_name_or_path: base\n{lines}\n")
    assert read_as.recipe == recipe and {name: getattr(read_as, name) for name in found} == found
    formats = {"dpo": "pair", "orpo": "pair", "reward": "pair", "kto": "label", "pt": "text", "sft": "sharegpt"}
    assert [source.format for source in read_as.data] == [formats[recipe]]
    if "quantization_bit" in lines:
        assert read_as.base.resting == "nf4/64+double"
    if "lora_r" in lines:
        assert (read_as.text.length, read_as.adapter.rank) == (64, 2)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("lora_rnk: 8", "no key 'lora_rnk'. Did you mean 'lora_rank'"),
        ("stage: ppo", "stage is 'ppo': its rewards"),
        ("stage: dpo\npref_loss: simpo", "pref_loss is 'simpo'"),
        ("finetuning_type: oft", "finetuning_type is 'oft'"),
        ("val_size: 0.1", "val_size is 0.1: keep rows"),
        ("resume_from_checkpoint: saves/x", "checkpoints of others"),
        ("use_galore: true", "--optimizer galore"),
        ("optim: sgd", "optim is 'sgd'"),
        ("lr_scheduler_type: polynomial", "schedules are cosine"),
        ("eval_strategy: epoch", "eval_strategy is 'epoch'"),
        ("quantization_type: fp4", "nf4"),
        ("dataset: chat", "no entry 'chat'. Did you mean 'chats'"),
        ("dataset: hub", "nothing is downloaded"),
        ("dataset: pictures", "rows are text"),
        ("dataset: speakers", "user_tag is 'customer'"),
        ("deepspeed: none.json", "deepspeed is 'none.json'"),
        ("[1, 2]", "keys and values"),
        ("a: [", "cannot be read"),
    ],
)
def test_the_rest_is_refused_in_a_sentence(lines: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(lines)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_page_has_the_table() -> None:
    page = Path(__file__).parents[3] / "docs" / "tune-llamafactory.md"
    assert factory.key_table() in page.read_text(encoding="utf-8")


def test_the_command_prints_a_config_file() -> None:
    Path("y.yaml").write_text(YAML)
    found = CliRunner().invoke(app, ["tune", "--from-llamafactory", "y.yaml"], catch_exceptions=False)
    assert found.exit_code == 0 and parse_toml(found.output)["adapter"]["rank"] == 4


EXAMPLES: dict[str, tuple[str, str]] = {
    "lora_sft": ("trust_remote_code: true|stage: sft|do_train: true|finetuning_type: lora|lora_rank: 8|"
                 "lora_target: all|dataset: chats|template: llama3|cutoff_len: 2048|max_samples: 1000|"
                 "preprocessing_num_workers: 16|"
                 "dataloader_num_workers: 4|output_dir: a|logging_steps: 10|save_steps: 500|plot_loss: true|"
                 "overwrite_output_dir: true|save_only_model: false|report_to: none|per_device_train_batch_size: 1|"
                 "gradient_accumulation_steps: 8|learning_rate: 1.0e-4|num_train_epochs: 3.0|lr_scheduler_type: cosine|"
                 "warmup_ratio: 0.1|bf16: true|ddp_timeout: 180000000|resume_from_checkpoint: null|"
                 "val_size: 0|per_device_eval_batch_size: 1|eval_strategy: steps|eval_steps: 500", ""),
    "lora_dpo": ("stage: dpo|do_train: true|finetuning_type: lora|pref_beta: 0.1|pref_loss: sigmoid|dataset: pairs|"
                 "learning_rate: 5.0e-6", ""),
    "lora_kto": ("stage: kto|do_train: true|pref_beta: 0.1|dataset: labels", ""),
    "lora_ppo": ("stage: ppo|reward_model: saves/reward|dataset: chats|max_new_tokens: 512|top_k: 0|top_p: 0.9", "ppo"),
    "lora_pretrain": ("stage: pt|do_train: true|finetuning_type: lora|dataset: texts", ""),
    "lora_reward": ("stage: rm|do_train: true|finetuning_type: lora|dataset: pairs", ""),
    "lora_sft_ray": ("dataset: chats|ray_run_name: a|ray_storage_path: b|ray_num_workers: 4|resources_per_worker: 1|"
                     "placement_strategy: PACK", "procs"),
    "lora_sft_ds3": ("dataset: chats|deepspeed: ds.json", ""),
    "lora_preprocess": ("dataset: chats|tokenized_path: saves/tokens|overwrite_cache: true", ""),
    "full_sft": ("finetuning_type: full|dataset: chats|deepspeed: ds.json|learning_rate: 1.0e-5", ""),
    "full_vl": ("finetuning_type: full|dataset: pictures|image_max_pixels: 262144|video_max_pixels: 16384|"
                "freeze_vision_tower: true|freeze_multi_modal_projector: true|freeze_language_model: false", "text"),
    "qlora_otfq": ("quantization_bit: 4|quantization_method: bnb|double_quantization: false|dataset: chats", ""),
    "qlora_hqq": ("quantization_bit: 4|quantization_method: hqq|dataset: chats", "formats"),
    "fsdp_qlora": ("quantization_bit: 4|dataset: chats|fsdp: full_shard auto_wrap|fsdp_config: f.json", ""),
    "adam_mini": ("finetuning_type: full|use_adam_mini: true|dataset: chats", "no part"),
    "apollo": ("finetuning_type: full|use_apollo: true|apollo_layerwise: true|apollo_target: all|apollo_rank: 128|"
               "apollo_scale: 32.0|apollo_scale_type: channel|dataset: chats|pure_bf16: true", "no part"),
    "badam": ("finetuning_type: full|use_badam: true|badam_mode: layer|badam_switch_mode: ascending|"
              "badam_switch_interval: 50|badam_verbose: 2|dataset: chats", "no part"),
    "galore": ("finetuning_type: full|use_galore: true|galore_layerwise: true|galore_target: all|galore_rank: 128|"
               "galore_scale: 2.0|dataset: chats", "--optimizer galore"),
    "llama_pro": ("finetuning_type: freeze|freeze_trainable_layers: 8|freeze_trainable_modules: all|"
                  "use_llama_pro: true|dataset: chats", "expand"),
    "loraplus": ("loraplus_lr_ratio: 16.0|dataset: chats", ""),
    "mod": ("finetuning_type: full|mixture_of_depths: convert|optim: paged_adamw_8bit|dataset: chats", "no part"),
    "muon": ("finetuning_type: full|use_muon: true|dataset: chats", ""),
    "oft": ("finetuning_type: oft|oft_block_size: 32|oft_target: all|dataset: chats", "lora, freeze or full"),
    "pissa": ("pissa_init: true|pissa_iter: 16|pissa_convert: true|dataset: chats", ""),
    "nlg_eval": ("do_predict: true|predict_with_generate: true|eval_dataset: chats", "shardfold eval"),
    "merge": ("export_dir: out|export_size: 5|export_device: cpu|export_legacy_format: false", "no part of a training"),
}  # fmt: skip
"""Its examples' keys, and words of why one is refused."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_its_examples_are_read(name: str) -> None:
    lines, refused = EXAMPLES[name]
    text = "model_name_or_path: base\n" + lines.replace("|", "\n")
    if refused:
        with pytest.raises(ConfigError, match=refused):
            read(text)
    else:
        assert settings(text).model == Path("base")


OF_KEYS = {
    "dataset": "chats", "eval_dataset": "plain", "stage": "kto", "finetuning_type": "freeze", "quantization_bit": 8,
    "optim": "adamw_torch", "lr_scheduler_type": "linear", "save_strategy": "no", "eval_strategy": "steps",
    "deepspeed": "ds.json", "fsdp": "full_shard", "pref_loss": "ipo", "dataset_dir": "data",
}  # fmt: skip
VALUES = [None, False, True, 0, -1, 3, 2.5, "x", "1e-4", [], ["a"], {"a": 1}]


def test_every_key_with_any_value_has_one_fate() -> None:
    """Of every key of the table, each with a third of the values: what is taken is a setting that loads, or is refused;
    what is noted is told; what is refused is, unless it asks for nothing. No value of another type ends in a
    traceback."""
    from shardfold.errors import ShardfoldError

    plain = read("model_name_or_path: base\ndataset: chats\n")
    for number, (name, key) in enumerate(factory.KEYS.items()):
        fates = set[str]()
        for value in (*VALUES[number % 3 :: 3], OF_KEYS.get(name)):
            given = {"model_name_or_path": "base", "dataset": "chats"} | {name: value}
            Path("y.yaml").write_text(json.dumps(given))
            try:
                reading = factory.read_yaml(Path("y.yaml"))
            except ConfigError as error:
                assert name in str(error) or "entry" in str(error) or name == "dataset_dir", (name, value, str(error))
                assert "\n" not in str(error)
                fates.add("refused")
                continue
            if key.fate == "noted" and value is not None:  # which asks for nothing
                assert any(name in note for note in reading.notes), (name, value)
            if key.fate == "refused":
                assert value in key.without and reading.settings == plain.settings, (name, value)
            if key.fate == "taken":
                kind = config_class(reading.recipe)
                try:
                    found = parse_toml(reading.toml())
                    found.pop("recipe")
                    kind.load(kind.checked(found, where="the file"))
                except ShardfoldError as error:
                    assert "\n" not in str(error)
                    continue
            fates.add(key.fate)
        assert key.fate in fates, name
