"""What a tuning leaves behind that others read: an adapter in peft's format, or a folder of transformers."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfold.checkpoint import Checkpoint, export_to
from shardfold.tools.tune.adapters import NAME, AdaptedTensors, merged_tensors
from shardfold.tools.tune.models import hollow_model
from shardfold.tools.tune.run import TuneRun

__all__ = ["write_model"]

SHARD_BYTES = 2 * 10**9


def write_model(run: TuneRun, out: Path) -> str:
    """Write ``adapter/``, or where parameters of the model itself were trained ``model/``, into the run folder; all
    ranks call it. Return the name of what was written."""
    adapter = run.config.adapter
    if adapter is not None and adapter.kind in ("lora", "prefix"):
        _write_adapter(run, out / "adapter", out / "base")
        return "adapter"
    _write_whole(run, out)
    return "model"


def beside(run: TuneRun, folder: Path) -> None:
    """Write config, tokenizer and generation config; the last ends where the tokenizer's turns do."""
    from transformers import GenerationConfig

    if run.model_config.pad_token_id is None:  # a reward model is read by it
        run.model_config.pad_token_id = run.tokenizer.pad_token_id
    run.model_config.dtype = torch.float32
    run.model_config.save_pretrained(folder)
    run.tokenizer.save_pretrained(folder)
    if run.config.task != "lm":
        return
    if (run.place.folder / "generation_config.json").is_file():
        made = GenerationConfig.from_pretrained(run.place.folder)
    else:
        made = GenerationConfig.from_model_config(run.model_config)
    made.eos_token_id = run.stops()
    if made.pad_token_id is None:
        made.pad_token_id = run.tokenizer.pad_token_id
    made.save_pretrained(folder)


def _write_whole(run: TuneRun, out: Path) -> None:
    """By a checkpoint, which every rank writes its part of, and which is read one tensor at a time."""
    draft = out / "model-draft"
    run.engine.save(draft / "whole", wait=True, latest=False)
    if run.leads:
        export_to(draft / "whole", out / "model", "hf", shard_bytes=SHARD_BYTES)
        beside(run, out / "model")
        shutil.rmtree(draft)


def _write_adapter(run: TuneRun, folder: Path, base: Path) -> None:
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    model: Any = run.model
    config = copy.copy(model.peft_config[NAME])
    config.inference_mode = True
    if config.is_prompt_learning:
        names = [name for name, _ in model.named_parameters() if name.startswith("prompt_encoder.")]
        with run.engine.gathered(*names), torch.no_grad():
            values = {"prompt_embeddings": model.get_prompt_embedding_to_save(NAME).detach().cpu().clone()}
    else:
        state = run.engine.state_dict(frozen="skip")
        if run.config.tensor > 1:
            state = _joined(run, state, folder.with_name("adapter-draft"))
        whole = [name for name, _ in model.named_parameters() if ".modules_to_save." in name]
        # peft asks modules that are trained whole for the names of their tensors by their own state dict.
        with run.engine.gathered(*whole) if whole and run.config.pipeline == 1 else nullcontext():
            values = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
        for name in state:  # those of other stages too
            if (inner := f".modules_to_save.{NAME}.") in name:
                values[name.replace(inner, ".")] = state[name]
    if not run.leads:
        return
    folder.mkdir()
    variant = run.config.adapter.variant if run.config.adapter is not None else ""
    if variant in ("pissa", "olora"):
        config, values = _on_the_base_as_it_was(run, config, values)
    if (changed := _base_of_its_own(run)) is not None:
        _write_base(run, changed, base)
        config.base_model_name_or_path = str(base.resolve())
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True
    save_file(
        {name: value.contiguous() for name, value in values.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    config.save_pretrained(str(folder))
    run.tokenizer.save_pretrained(folder)


def _joined(run: TuneRun, state: Mapping[str, Tensor], draft: Path) -> dict[str, Tensor]:
    """All of what ranks along the axis of tensor have parts of, on the rank that writes: by a checkpoint of the model,
    base included, which puts parts of any shape together."""
    run.engine.save(draft / "whole", wait=True, latest=False)
    found = dict(state)
    if run.leads:
        with Checkpoint(draft / "whole") as saved:
            found |= {
                name: saved.parameter(name, dtype=state[name].dtype) for name in state if name in saved.parameters
            }
        shutil.rmtree(draft)
    return found


def _on_the_base_as_it_was(run: TuneRun, config: Any, values: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """A plain LoRA of twice the rank, of the base before its first matrices were taken out: ``B A - B0 A0``."""
    made = dict[str, Tensor]()
    for name, value in values.items():
        if ".lora_A." in name or ".lora_B." in name:
            first = run.tensors[name.removesuffix(".weight") + f".{NAME}.weight"].to(value.dtype)
            value = torch.cat([value, first], 0) if ".lora_A." in name else torch.cat([value, -first], 1)
        made[name] = value
    config.r, config.lora_alpha = 2 * config.r, 2 * config.lora_alpha
    return config, made


def _base_of_its_own(run: TuneRun) -> Mapping[str, Tensor] | None:
    """Values of the base with which an adapter was trained, where those, or its config, are not what ``--model`` names:
    LoftQ has rounded it, another adapter was merged into it, or its positions are others."""
    if isinstance(run.tensors, AdaptedTensors) and run.config.adapter is not None:
        if run.config.adapter.variant == "loftq":
            return run.tensors.base()
        if run.place.adapter is not None or run.config.text.rope is not None:
            return merged_tensors(
                hollow_model(copy.deepcopy(run.model_config), run.config.task), run.place, run.config.task
            )
    return None


def _write_base(run: TuneRun, values: Mapping[str, Tensor], folder: Path) -> None:
    """A folder of transformers, a file of at most so many bytes at a time."""
    from safetensors.torch import save_file

    folder.mkdir()
    part, size, written = dict[str, Tensor](), 0, list[Path]()
    places: dict[str, str] = {}

    def write() -> None:
        path = folder / f"part-{len(written) + 1:05d}.safetensors"
        save_file(part, path, metadata={"format": "pt"})
        written.append(path)
        places.update(dict.fromkeys(part, path.name))
        part.clear()

    for name in values:
        part[name] = values[name].contiguous().clone()
        size += part[name].nbytes
        if size > SHARD_BYTES:
            write()
            size = 0
    if part:
        write()
    _write_index(folder, written, places)
    beside(run, folder)


def _write_index(folder: Path, written: list[Path], places: dict[str, str]) -> None:
    import json

    if len(written) == 1:
        written[0].rename(folder / "model.safetensors")
        return
    total = sum(path.stat().st_size for path in written)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")
