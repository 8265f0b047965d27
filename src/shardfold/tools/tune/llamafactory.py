"""LLaMA-Factory's YAML as settings of ``shardfold tune``: every key is taken, noted, or refused in a sentence.

One table has them all, :data:`KEYS`; the page of the documentation is made of it. Keys of TRL's configs that mean the
same are read under their names (:data:`ALSO`). What files of data say of themselves is in ``dataset_info.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardfold.errors import ConfigError, did_you_mean
from shardfold.tools.observe.trackers import TRACKERS
from shardfold.tools.recipes.settings_text import as_toml
from shardfold.tools.tune._dataset_info import sources_of
from shardfold.tools.tune.config import config_class

__all__ = ["ALSO", "KEYS", "Key", "Reading", "key_table", "read_yaml"]

STAGES = {"pt": "pt", "sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto"}
SECTIONS = ("adapter", "base", "text")

Put = Callable[["Reading", Any], None]


class Key(NamedTuple):
    """What becomes of a key.

    Attributes:
        fate: taken: a setting follows from it; noted: nothing here needs it; refused, unless it is as ``without``.
        said: of a taken one the setting, of others the end of a sentence.
        put: writes the setting.
        without: values of a refused key that ask for nothing.
    """

    fate: Literal["taken", "noted", "refused"]
    said: str
    put: Put | None = None
    without: tuple[Any, ...] = (None, False)


@dataclass
class Reading:
    """A YAML file, as it is read.

    Attributes:
        recipe: of ``shardfold tune``.
        settings: of its config file.
        notes: what the user is told, a sentence each.
    """

    path: Path
    given: dict[str, Any]
    recipe: str = "sft"
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: list[str] = field(default_factory=list[str])

    def refuse(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"{str(self.path)!r}: {key} is {self.given.get(key)!r}: {why}.")

    def put(self, place: str, value: Any) -> None:
        """Writes a setting, ``section.name`` or a name."""
        section, _, name = place.rpartition(".")
        (self.settings.setdefault(section, {}) if section else self.settings)[name] = value

    def toml(self) -> str:
        """A config file, with the notes as comments."""
        lines = [f"# of {self.path.name}; shardfold tune {self.recipe} --config THIS_FILE"]
        lines += [f"# {note}" for note in self.notes]
        lines += ["", f'recipe = "{self.recipe}"']
        return "\n".join(lines) + "\n" + as_toml(self.settings, SECTIONS)


def _to(place: str, change: Callable[[Any], Any] = lambda value: value) -> Put:
    return lambda reading, value: reading.put(place, change(value))


def _one_of(place: str, key: str, names: Mapping[str, Any], instead: str) -> Put:
    def put(reading: Reading, value: Any) -> None:
        if str(value) not in names:
            raise reading.refuse(key, f"{instead}{did_you_mean(str(value), names).rstrip('?.')}")
        if (found := names[str(value)]) is not None:
            reading.put(place, found)

    return put


def _if_true(place: str, found: Any) -> Put:
    return lambda reading, value: reading.put(place, found) if value else None


def _steps(reading: Reading, value: Any) -> None:
    if value > 0:
        reading.put("steps", value)
        reading.settings.pop("epochs", None)


def _stage(reading: Reading, value: Any) -> None:
    if value not in STAGES:
        instead = (
            "its rewards are named otherwise here: write the settings of shardfold tune ppo by hand"
            if value == "ppo"
            else "it is pt, sft, rm, dpo or kto"
        )
        raise reading.refuse("stage", instead)
    reading.recipe = STAGES[value]


def _preference(reading: Reading, value: Any) -> None:
    if reading.given.get("stage") != "dpo":
        return
    if value == "orpo":
        reading.recipe = "orpo"
    elif value in ("sigmoid", "hinge", "ipo"):
        reading.put("loss", value)
    else:
        raise reading.refuse("pref_loss", "dpo has sigmoid, hinge and ipo, and orpo is a recipe")


def _kind(reading: Reading, value: Any) -> None:
    if value == "full":
        return
    if value not in ("lora", "freeze"):
        raise reading.refuse("finetuning_type", "it is lora, freeze or full")
    adapter = {"kind": value, **({"rank": 8} if value == "lora" else {"layers": 2})}
    reading.settings["adapter"] = {**adapter, **reading.settings.get("adapter", {})}


def _of(kind: str, place: str, change: Callable[[Any], Any] = lambda value: value) -> Put:
    """A setting of one kind of adapter, which says nothing of others."""

    def put(reading: Reading, value: Any) -> None:
        if reading.given.get("finetuning_type", "lora") == kind:
            reading.put(place, change(value))
        else:
            reading.notes.append(f"{place.rpartition('.')[2]} is of finetuning_type: {kind}, which this is not.")

    return put


def _variant(name: str) -> Put:
    put = _of("lora", "adapter.variant")
    return lambda reading, value: put(reading, name) if value else None


def _layers(reading: Reading, value: Any) -> None:
    if value < 0:
        raise reading.refuse("freeze_trainable_layers", "the last layers are trained, not the first: give a number > 0")
    _of("freeze", "adapter.layers")(reading, value)


def _names(value: Any) -> str:
    return "all-linear" if value == "all" else ",".join(part.strip() for part in str(value).split(","))


def _quantized(reading: Reading, value: Any) -> None:
    if value not in (8, 4, 2):
        raise reading.refuse("quantization_bit", "frozen parameters rest in 8, 4 or 2 bits")
    reading.put("base.bits", value)
    if value == 4 and reading.given.get("double_quantization", True):
        reading.put("base.format", "nf4/64+double")


def _packs(reading: Reading, value: Any) -> None:
    reading.put("text.pack", bool(value))
    if value and not reading.given.get("neat_packing"):
        reading.notes.append("packing: samples that share a sequence see each other there; here none sees another.")


def _warmup_ratio(reading: Reading, value: Any) -> None:
    steps = reading.given.get("max_steps")
    if steps and steps > 0:
        reading.put("warmup", max(1, round(value * steps)))
    elif value:
        reading.notes.append(
            f"warmup_ratio is {value}: --warmup is a number of steps; give {value:.0%} of those that a run prints when "
            "it starts. Nothing is warmed up as it stands."
        )


def _folder(reading: Reading, value: Any) -> None:
    if not isinstance(value, str):
        raise reading.refuse("dataset_dir", "it is the name of a folder")


def _no_more_rows(reading: Reading, value: Any) -> None:
    reading.notes.append(
        f"max_samples is {value}: all rows are trained; cut files to their first {value} rows for that."
    )


def _checkpointing(reading: Reading, value: Any) -> None:
    reading.put("activations", "keep" if value else "recompute")


def _eval(reading: Reading, value: Any) -> None:
    if value == "steps" and not reading.given.get("eval_dataset"):
        reading.notes.append("eval_strategy: there is no eval_dataset, so nothing is evaluated.")
    elif value == "steps":
        reading.put("eval_every", int(reading.given.get("eval_steps") or reading.given.get("logging_steps") or 500))
    elif value not in ("no", False):
        raise reading.refuse("eval_strategy", "rows are evaluated every --eval-every steps and at the end: give steps")


def _saves(reading: Reading, value: Any) -> None:
    if value in ("no", False):
        reading.put("save_every", 0)
    elif value != "steps":
        raise reading.refuse("save_strategy", "checkpoints are written every save_steps: give steps")


def _deepspeed(reading: Reading, value: Any) -> None:
    if not value:
        return
    config: Any = value
    if not isinstance(config, Mapping):
        try:
            config = json.loads(Path(value).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise reading.refuse("deepspeed", f"the file cannot be read: {error}") from None
    zero = config.get("zero_optimization") or {}
    reading.put("layout", ("ddp", "zero1", "zero2", "zero3")[int(zero.get("stage", 0))])
    for part in ("offload_optimizer", "offload_param"):
        device = (zero.get(part) or {}).get("device", "none")
        if device not in ("none", None):
            reading.put("offload", "host" if device == "cpu" else "disk")
    reading.notes.append("deepspeed: the stage and where states rest are taken; the rest of that file is not read.")


def _fsdp(reading: Reading, value: Any) -> None:
    words = value.split() if isinstance(value, str) else list(value or ())
    names = {"full_shard": "zero3", "shard_grad_op": "zero2", "hybrid_shard": "hsdp", "auto_wrap": None}
    for word in words:
        if word not in names:
            raise reading.refuse("fsdp", f"{word} is not known here: give --layout and --offload")
        if names[word]:
            reading.put("layout", names[word])


def _trackers(reading: Reading, value: Any) -> None:
    names = [str(name) for name in (value if isinstance(value, list) else [value]) if name]
    if known := [name for name in names if name in TRACKERS]:
        reading.put("track", ",".join(known))
    if others := [name for name in names if name not in (*TRACKERS, "none")]:
        reading.notes.append(f"report_to: of {', '.join(others)} nothing is told; --track knows {', '.join(TRACKERS)}.")


def _optimizer(reading: Reading, value: Any) -> None:
    names = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adafactor": "adafactor"}
    names |= dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw8bit")
    names |= dict.fromkeys(("lion_32bit", "paged_lion_32bit"), "lion") | {"paged_adamw_32bit": "adamw"}
    if str(value) not in names:
        raise reading.refuse("optim", "the optimizers are adamw, adamw8bit, adafactor, lion, muon and galore")
    reading.put("optimizer", names[str(value)])


SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
HUB = "nothing is downloaded"
LOADED, MEDIA = "rows are prepared once and kept in --cache", "rows are text: images, videos and sounds are not read"


def _noted(why: str, *names: str) -> dict[str, Key]:
    return {name: Key("noted", why) for name in names}


def _refused(why: str, *names: str, without: tuple[Any, ...] = (None, False)) -> dict[str, Key]:
    return {name: Key("refused", why, without=without) for name in names}


def _prefixed(prefix: str, names: str) -> list[str]:
    return [f"{prefix}_{name}" for name in names.split()]


def _taken(said: str, put: Put) -> Key:
    return Key("taken", said, put)


MODEL: dict[str, Key] = {
    "model_name_or_path": _taken("model", _to("model")),
    "finetuning_type": _taken("adapter.kind; full: none", _kind),
    "lora_rank": _taken("adapter.rank", _of("lora", "adapter.rank")),
    "lora_alpha": _taken("adapter.alpha", _of("lora", "adapter.alpha")),
    "lora_dropout": _taken("adapter.dropout", _of("lora", "adapter.dropout")),
    "lora_target": _taken("adapter.targets; all: all-linear", _of("lora", "adapter.targets", _names)),
    "loraplus_lr_ratio": _taken("adapter.lr_ratio", _of("lora", "adapter.lr_ratio")),
    "additional_target": _taken("adapter.modules", _of("lora", "adapter.modules", _names)),
    "use_rslora": _taken('adapter.variant = "rslora"', _variant("rslora")),
    "use_dora": _taken('adapter.variant = "dora"', _variant("dora")),
    "pissa_init": _taken('adapter.variant = "pissa"', _variant("pissa")),
    "freeze_trainable_layers": _taken("adapter.layers", _layers),
    "quantization_bit": _taken("base.bits", _quantized),
    "double_quantization": _taken("base.format, with 4 bits", lambda reading, value: None),
    **_noted("PiSSA is by the exact decomposition", "pissa_iter"),
    **_noted("adapters of pissa are written for the base as it was", "pissa_convert"),
    **_noted("no code of a model's folder is run", "trust_remote_code"),
    **_noted("attention is what torch chooses for the device", "flash_attn", "enable_liger_kernel"),
    **_noted("no rank has a copy of the whole model", "low_cpu_mem_usage", "upcast_layernorm", "use_reentrant_gc"),
    **_noted("what is trained is printed at the start", "print_param_status"),
    **_refused(
        "an adapter as a model is merged as it is read: give it as model_name_or_path, or go on by --resume",
        "adapter_name_or_path",
    ),
    **_refused("frozen parameters rest as nf4, int8 or int2", "quantization_type", without=("nf4",)),
    **_refused("formats are this library's own", "quantization_method", without=("bnb", "bitsandbytes")),
    **_refused("give --rope yarn:4 with the factor", "rope_scaling"),
    **_refused(
        "vocabularies stay as they are", "resize_vocab", "add_tokens", "add_special_tokens", "new_special_tokens_config"
    ),
    **_refused("expand adds new blocks by itself: give --expand 2 without it", "use_llama_pro"),
    **_refused("all modules of a layer are trained with it", "freeze_trainable_modules", without=("all",)),
    **_refused("freeze trains whole layers only", "freeze_extra_modules"),
    **_refused("embeddings have the same ratio", "loraplus_lr_embedding", without=(1e-6, "1e-6")),
    **_refused(
        "it is no part of this library",
        "use_unsloth",
        "use_unsloth_gc",
        "shift_attn",
        "mixture_of_depths",
        "use_kt",
        "use_mca",
        "use_badam",
        "use_apollo",
        "use_adam_mini",
        "use_dft_loss",
        "use_asft_loss",
        "use_eaft_loss",
        "use_hyper_parallel",
        "train_from_scratch",
    ),
    **_refused("give --optimizer galore with --galore-rank, --galore-every and --galore-scale", "use_galore"),
    "use_muon": _taken('optimizer = "muon"', _if_true("optimizer", "muon")),
    **_refused(HUB, "hf_hub_token", "ms_hub_token", "om_hub_token"),
    **_refused(HUB, "model_revision", without=("main",)),
    **_noted("tokenizers are the fast ones", "use_fast_tokenizer", "split_special_tokens"),
    **_noted("files are read where they are", "cache_dir", "offload_folder"),
    **_refused("a folder is named by model_name_or_path", "adapter_folder"),
    **_refused("that is no part of a training", *_prefixed("export", "dir size device quantization_bit hub_model_id")),
    **_noted("that is of another command", *_prefixed("export", "legacy_format quantization_dataset")),
    **_noted("rollouts are the engine's own", "infer_backend", "infer_dtype", "use_kv_cache", "use_v1_kernels"),
    **_noted("rollouts are the engine's own", *_prefixed("vllm", "maxlen gpu_util enforce_eager max_lora_rank config")),
    **_noted("rollouts are the engine's own", *_prefixed("sglang", "maxlen mem_fraction tp_size config")),
    **_refused("devices are the ranks'", "quantization_device_map", without=(None, "auto")),
    **_noted("losses are in fp32", "upcast_lmhead_output"),
    **_refused("experts are balanced as the model has it", "moe_aux_loss_coef"),
    **_refused("an adapter begins as its kind does", "create_new_adapter", "init_special_tokens"),
    **_refused("finetuning_type is lora, freeze or full", "module_dropout", without=(None, 0, 0.0)),
    **_noted("finetuning_type is lora, freeze or full", *_prefixed("oft", "rank block_size target")),
    **_noted("use_galore is false", *_prefixed("galore", "target rank update_interval scale proj_type layerwise")),
    **_noted("use_apollo is false", *_prefixed("apollo", "target rank update_interval scale proj proj_type layerwise")),
    **_noted("use_apollo is false", "apollo_scale_type", "apollo_scale_front"),
    **_noted("use_badam is false", *_prefixed("badam", "mode switch_mode switch_interval start_block update_ratio")),
    **_noted("use_badam is false", "badam_mask_mode", "badam_verbose"),
    **_noted("use_swanlab is false", *_prefixed("swanlab", "project workspace run_name mode api_key logdir")),
}

DATA: dict[str, Key] = {
    "dataset_dir": _taken("where dataset_info.json is", _folder),
    "dataset": _taken("data, by dataset_info.json", lambda reading, value: _data(reading, "data", value)),
    "eval_dataset": _taken("eval_data", lambda reading, value: _data(reading, "eval_data", value)),
    "cutoff_len": _taken("text.length", _to("text.length")),
    "packing": _taken("text.pack", _packs),
    "neat_packing": _taken("text.pack", _if_true("text.pack", True)),
    "train_on_prompt": _taken('text.train_on = "all"', _if_true("text.train_on", "all")),
    "mask_history": _taken('text.train_on = "last"', _if_true("text.train_on", "last")),
    "neftune_noise_alpha": _taken("text.noise", _to("text.noise")),
    "max_samples": Key("noted", "all rows are trained", _no_more_rows),
    **_noted("the tokenizer's own template is taken (text.template), and its stop token trained", "template"),
    **_noted(
        LOADED,
        "overwrite_cache",
        "preprocessing_num_workers",
        "preprocessing_batch_size",
        "streaming",
        "buffer_size",
        "tokenized_path",
        "data_shared_file_system",
        "dataloader_num_workers",
        "dataloader_pin_memory",
    ),
    **_refused("keep rows to evaluate in a file of their own, as eval_dataset", "val_size", without=(None, 0, 0.0)),
    **_refused(
        "files are joined; give weights to the sources in the config file",
        "mix_strategy",
        "interleave_probs",
        without=(None, "concat"),
    ),
    **_refused("tools are told by the model's own template", "tool_format"),
    **_noted("all files are one evaluation", "eval_on_each_dataset"),
    **_noted("answers are those of shardfold generate", "do_sample", "temperature", "top_p", "top_k", "num_beams"),
    **_noted("answers are those of shardfold generate", "max_new_tokens", "repetition_penalty", "length_penalty"),
    **_noted("answers are those of shardfold generate", "skip_special_tokens", "eval_num_beams"),
    **_noted(MEDIA, *_prefixed("image", "max_pixels min_pixels do_pan_and_scan"), "crop_to_patches"),
    **_noted(
        MEDIA, *_prefixed("video", "max_pixels min_pixels fps maxlen"), "use_audio_in_video", "audio_sampling_rate"
    ),
    **_refused("system prompts are in the rows", "default_system"),
    **_refused("the model's own template decides", "enable_thinking", "preserve_thinking", without=(None, True)),
    **_refused("padding is never a target", "ignore_pad_token_for_loss", without=(None, True)),
    **_refused(
        MEDIA,
        "media_dir",
        "freeze_vision_tower",
        "freeze_multi_modal_projector",
        "freeze_language_model",
        without=(None, False, True),
    ),
}

TRAINING: dict[str, Key] = {
    "stage": _taken("the recipe; rm: reward", _stage),
    "pref_beta": _taken("beta", _to("beta")),
    "pref_loss": _taken("loss; orpo: the recipe", _preference),
    "dpo_label_smoothing": _taken("label_smoothing", _to("label_smoothing")),
    "kto_chosen_weight": _taken("desirable", _to("desirable")),
    "kto_rejected_weight": _taken("undesirable", _to("undesirable")),
    "output_dir": _taken("out", _to("out")),
    "per_device_train_batch_size": _taken("micro_batch", _to("micro_batch")),
    "gradient_accumulation_steps": _taken("accumulate", _to("accumulate")),
    "learning_rate": _taken("lr", _to("lr", float)),
    "num_train_epochs": _taken("epochs", _to("epochs")),
    "max_steps": _taken("steps, in place of epochs", _steps),
    "lr_scheduler_type": _taken(
        "schedule", _one_of("schedule", "lr_scheduler_type", SCHEDULES, "schedules are cosine, linear and constant")
    ),
    "warmup_steps": _taken("warmup", _to("warmup")),
    "warmup_ratio": _taken("warmup, beside max_steps; else noted", _warmup_ratio),
    "weight_decay": _taken("weight_decay", _to("weight_decay")),
    "max_grad_norm": _taken("clip_norm", _to("clip_norm")),
    "optim": _taken("optimizer", _optimizer),
    "seed": _taken("seed", _to("seed")),
    "bf16": _taken('precision = "bf16"', _if_true("precision", "bf16")),
    "fp16": _taken('precision = "fp16"', _if_true("precision", "fp16")),
    "pure_bf16": _taken('precision = "bf16-pure"', _if_true("precision", "bf16-pure")),
    "fp8": _taken('precision = "fp8"', _if_true("precision", "fp8")),
    "save_steps": _taken("save_every", _to("save_every", int)),
    "save_strategy": _taken("save_every", _saves),
    "save_total_limit": _taken("keep", _to("keep")),
    "eval_strategy": _taken("eval_every", _eval),
    "eval_steps": _taken("eval_every, with eval_strategy: steps", lambda reading, value: None),
    "disable_gradient_checkpointing": _taken("activations", _checkpointing),
    "deepspeed": _taken("layout, offload", _deepspeed),
    "fsdp": _taken("layout", _fsdp),
    "report_to": _taken("track", _trackers),
    **_noted(
        "every step is a line of metrics.jsonl, and curves are in report.html",
        "logging_steps",
        "logging_dir",
        "plot_loss",
        "logging_first_step",
        "include_num_input_tokens_seen",
        "run_name",
        "include_effective_tokens_per_second",
    ),
    **_noted("a run has a new folder", "overwrite_output_dir"),
    **_noted("checkpoints have all that a run needs to go on", "save_only_model"),
    **_noted("ranks that wait say so after 10 minutes", "ddp_timeout", "ddp_find_unused_parameters"),
    **_noted("rows are evaluated in micro-batches of the training", "per_device_eval_batch_size"),
    **_noted("layouts are settings here", "fsdp_config", "tf32"),
    **_refused("this reads a training", "do_train", without=(True,)),
    **_refused("that is shardfold eval or shardfold generate", "do_eval", "do_predict", "predict_with_generate"),
    **_refused(
        "checkpoints of others are not gone on with: leave it out, or give --resume a run of this library",
        "resume_from_checkpoint",
    ),
    **_refused("betas are 0.9 and 0.999", "adam_beta1", without=(None, 0.9)),
    **_refused("betas are 0.9 and 0.999", "adam_beta2", without=(None, 0.999)),
    **_refused("one seed is of rows too", "data_seed"),
    **_refused("rows are shuffled in each epoch", "disable_shuffling"),
    **_refused("a run ends after its steps", "early_stopping_steps"),
    **_refused(
        "a preference loss stands alone",
        "pref_ftx",
        "pref_bco_weight",
        "simpo_gamma",
        "ld_alpha",
        without=(None, 0, 0.0),
    ),
    **_refused(
        "the reference is the model before it is tuned", "ref_model", "ref_model_adapters", "ref_model_quantization_bit"
    ),
    **_refused("rewards of ppo are named by --reward", "reward_model", "ppo_buffer_size", "ppo_epochs", "ppo_target"),
    **_refused("there is no account to send to", "push_to_hub", "use_swanlab"),
    **_noted("push_to_hub is false", *_prefixed("hub", "model_id strategy token private_repo always_push")),
    **_refused("processes are started by --procs or torchrun", "use_ray", "ray_num_workers", without=(None, False, 1)),
    **_noted("use_ray is false", *_prefixed("ray", "run_name storage_path storage_filesystem scope init_kwargs")),
    **_noted("use_ray is false", "resources_per_worker", "placement_strategy"),
    **_refused("epsilon is 1e-8", "adam_epsilon", without=(None, 1e-8, "1e-8")),
    **_refused("an optimizer has no further settings", "optim_args", "optim_target_modules", "lr_scheduler_kwargs"),
    **_refused("targets are not smoothed", "label_smoothing_factor", without=(None, 0, 0.0)),
    **_refused("each row is read", "dataloader_drop_last", "max_eval_samples"),
    **_refused("a batch has the size that is asked for", "auto_find_batch_size"),
    **_refused("steps are not compiled by tune", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
    **_refused("a run ends after its steps", "metric_for_best_model", "greater_is_better", without=(None, False, True)),
    **_noted("every target of a window counts alike", "average_tokens_across_devices", "prediction_loss_only"),
    **_noted("what is recomputed is told by disable_gradient_checkpointing", "gradient_checkpointing_kwargs"),
    "gradient_checkpointing": _taken("activations", lambda reading, value: _checkpointing(reading, not value)),
    **_noted("rows of a window are sorted by their lengths", "group_by_length", "length_column_name"),
    **_noted(
        "a run does that by itself",
        "logging_strategy",
        "logging_nan_inf_filter",
        "log_level",
        "save_safetensors",
        "remove_unused_columns",
        "skip_memory_metrics",
        "torch_empty_cache_steps",
        "dataloader_prefetch_factor",
        "dataloader_persistent_workers",
        "eval_accumulation_steps",
        "accelerator_config",
        "local_rank",
        "use_cpu",
        "bf16_full_eval",
        "fp16_full_eval",
        "full_determinism",
        "save_on_each_node",
    ),
    **_refused("rows are evaluated from the first step on", "eval_delay", "eval_on_start", without=(None, False, 0)),
    **_refused("rewards of ppo are named by --reward", "reward_model_adapters", "reward_model_quantization_bit"),
    **_noted("rewards of ppo are named by --reward", "reward_model_type", "ppo_score_norm", "ppo_whiten_rewards"),
    **_refused("losses are those of the recipe's evaluation", "compute_accuracy"),
}

KEYS: dict[str, Key] = {**TRAINING, **MODEL, **DATA}
"""All keys; they are read in this order."""

ALSO = {
    "max_length": "cutoff_len",
    "max_seq_length": "cutoff_len",
    "lora_r": "lora_rank",
    "beta": "pref_beta",
    "loss_type": "pref_loss",
    "label_smoothing": "dpo_label_smoothing",
    "desirable_weight": "kto_chosen_weight",
    "undesirable_weight": "kto_rejected_weight",
    "lora_target_modules": "lora_target",
    "use_liger_kernel": "enable_liger_kernel",
    "load_best_model_at_end": "early_stopping_steps",
}
"""TRL's and peft's names of what means the same."""

DEFAULTS: dict[str, Any] = {
    "stage": "sft",
    "finetuning_type": "lora",
    "per_device_train_batch_size": 8,
    "learning_rate": 5e-5,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "linear",
    "cutoff_len": 2048,
    "save_steps": 500,
    "seed": 42,
    "disable_gradient_checkpointing": False,
    "lora_target": "all",
}
"""What LLaMA-Factory takes for keys that are not given, where it is not what stands here."""


def _data(reading: Reading, place: str, value: Any) -> None:
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)
    folder = Path(str(reading.given.get("dataset_dir") or "data"))
    reading.put(place, sources_of(names, folder, reading.recipe))


def read_yaml(path: Path) -> Reading:
    """Settings of a YAML file of LLaMA-Factory's.

    Raises:
        ConfigError: it cannot be read, a key is unknown (the nearest is suggested) or refused, or data are not there.
    """
    try:
        import yaml
    except ImportError:
        raise ConfigError("a YAML file needs the package pyyaml: pip install 'shardfold[tune]'.") from None
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"the YAML file {str(path)!r} cannot be read: {first}.") from None
    if not isinstance(given, dict):
        raise ConfigError(f"the YAML file {str(path)!r} should hold keys and values.")
    for name in given:
        if ALSO.get(name, name) not in KEYS:
            raise ConfigError(f"{str(path)!r}: there is no key {name!r}.{did_you_mean(str(name), [*KEYS, *ALSO])}")
    named: dict[str, Any] = {str(ALSO.get(name, name)): value for name, value in given.items()}
    reading = Reading(path, {**DEFAULTS, **named})
    if reading.given["finetuning_type"] != "lora" and "lora_target" not in named:
        del reading.given["lora_target"]
    if reading.given["stage"] == "pt" and "packing" not in named:
        reading.given["packing"] = True
    for name in KEYS:
        if name in reading.given:
            _read(reading, name, reading.given[name])
    fields = config_class(reading.recipe).model_fields
    for name in [each for each in reading.settings if each not in fields]:
        reading.notes.append(f"{name} is no setting of {reading.recipe}: it is left out.")
        del reading.settings[name]
    return reading


def _read(reading: Reading, name: str, value: Any) -> None:
    key = KEYS[name]
    if key.fate == "refused":
        if value not in key.without:
            raise reading.refuse(name, key.said)
    elif key.put is not None:
        if value is not None:
            try:
                key.put(reading, value)
            except ConfigError:
                raise
            except (TypeError, ValueError, AttributeError):
                raise reading.refuse(name, "a value of another kind is asked for") from None
    else:
        reading.notes.append(f"{name}: {key.said}.")


def key_table() -> str:
    """All keys as a table of the documentation."""
    rows = ["| key | | |", "|---|---|---|"]
    for fate in ("taken", "noted", "refused"):
        together: dict[str, list[str]] = {}
        for name, key in KEYS.items():
            if key.fate == fate:
                together.setdefault(key.said, []).append(f"`{name}`")
        rows += [f"| {', '.join(names)} | {fate} | {said} |" for said, names in together.items()]
    return "\n".join(rows)
