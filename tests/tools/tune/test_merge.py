"""Merged is what the adapter was: logits, dtypes, tied heads, and the files beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from shardfold.errors import CheckpointError, ConfigError
from shardfold.tools.cli import app
from tests.tools.tune.support import model_folder

pytest.importorskip("peft")
merging: Any = pytest.importorskip("shardfold.tools.tune.merge")

TOKENS = torch.arange(24).view(2, 12) * 7 % 261


def _adapter(base: Path, folder: Path, kind: type | None = None, **options: Any) -> Any:
    """peft's model with random matrices, saved as an adapter."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    kind = kind or peft.LoraConfig
    if kind is peft.LoraConfig:
        options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **options}
    made = peft.get_peft_model(model, kind(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad and "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif parameter.requires_grad and "lora_" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    made.peft_config["default"].base_model_name_or_path = str(base)
    made.save_pretrained(str(folder))
    return made.eval()


def _logits(folder: Path, adapter: Path | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model.eval()(TOKENS).logits


KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "lora": ("llama", {}, {}),
    "rslora": ("llama", {}, {"use_rslora": True}),
    "dora": ("llama", {}, {"use_dora": True}),
    "patterns": ("llama", {}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.mlp.up_proj": 32}}),
    "biases": ("qwen2", {}, {"bias": "lora_only"}),
    "rows": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "head": ("llama", {}, {"target_modules": ["q_proj", "lm_head"]}),
    "tied head": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["q_proj", "lm_head"]}),
    "tied embedding": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "whole modules": ("llama", {}, {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "tied whole embedding": ("llama", {"tie_word_embeddings": True}, {"modules_to_save": ["embed_tokens"]}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", KINDS)
def test_merged_is_the_adapter(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of what plain transformers loads are those of peft's model to 1e-5, and far from the base's; of linear
    layers a few rows are merged together."""
    monkeypatch.setattr(merging, "AT_ONCE", 7 * 32)
    kind, changes, options = KINDS[name]
    base = model_folder(tmp_path / "base", kind, scale=4.0, **changes)
    _adapter(base, tmp_path / "adapter", **options)
    report = merging.merge(tmp_path / "adapter", tmp_path / "out")
    wanted = _logits(base, tmp_path / "adapter")
    found = _logits(tmp_path / "out")
    assert (wanted - _logits(base)).abs().max() > 1e-2
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max().clamp(min=1.0)
    assert bool(report.untied) == name.startswith("tied")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert bool(said.get("tie_word_embeddings")) == ((bool(changes) and not report.untied) or kind == "gpt2")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_what_is_merged_is_rounded_once(tmp_path: Path, options: dict[str, Any]) -> None:
    """Of a base in bf16: each weight is the one nearest to the sum in fp32, so that the model is not farther from the
    truth than what peft merges."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    wide = model_folder(tmp_path / "wide", scale=4.0)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(wide, dtype=torch.bfloat16).save_pretrained(base)
    for file in wide.glob("tokenizer*"):
        (base / file.name).write_bytes(file.read_bytes())
    _adapter(base, tmp_path / "adapter", **options)
    merging.merge(tmp_path / "adapter", tmp_path / "out")
    ours = load_file(tmp_path / "out" / "model.safetensors")

    def merged(dtype: torch.dtype) -> dict[str, Tensor]:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        made: Any = PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
        return made.merge_and_unload().state_dict()

    truth, theirs = merged(torch.float32), merged(torch.bfloat16)
    far: dict[str, float] = dict.fromkeys(("ours", "theirs"), 0.0)
    for name, value in ours.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, truth[name].bfloat16()), name
        for who, other in (("ours", value), ("theirs", theirs[name])):
            far[who] += (other.double() - truth[name].double()).square().sum().item()
    assert far["ours"] <= far["theirs"]


PEAK = """
import sys
import threading
from pathlib import Path
from shardfold.tools.tune.merge import merge

def held(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

seen, over = [], threading.Event()

def look():
    while not over.wait(0.001):
        if seen:
            seen.append(held("RssAnon:"))

def tick(done, total):
    seen.append(held("RssAnon:"))

looks = threading.Thread(target=look)
looks.start()
merge(sys.argv[1], sys.argv[2], tick=tick, shard_bytes=int(sys.argv[3]))
over.set()
looks.join()
print(max(seen) - seen[0])
"""


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_a_merge_needs_the_memory_of_a_layer(tmp_path: Path, options: dict[str, Any]) -> None:
    """What a process holds more at the peak of a merge than at its first bytes does not grow with the number of layers:
    12 more of them, of 36 MiB in fp32 together, are not seen."""
    import os
    import subprocess
    import sys

    found = []
    for layers in (4, 16):
        folder = tmp_path / str(layers)
        base = model_folder(folder / "base", hidden_size=256, intermediate_size=768, num_hidden_layers=layers)
        _adapter(base, folder / "adapter", **options)
        command = [sys.executable, "-c", PEAK, str(folder / "adapter"), str(folder / "out"), str(8 << 20)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": "65536"}
        ran = subprocess.run(command, capture_output=True, check=False, text=True, env=environment, timeout=300)
        assert ran.returncode == 0, ran.stderr
        found.append(int(ran.stdout))
    assert found[1] - found[0] < 4 << 20, found


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_a_merge_needs_the_memory_of_one_tensor(tmp_path: Path, options: dict[str, Any]) -> None:
    """Matrices of 64 MiB: at the peak a process holds one of them as it is written, and parts of 2 MiB, of which DoRA
    needs some more; never two."""
    import os
    import subprocess
    import sys

    sizes = {"hidden_size": 1024, "intermediate_size": 16384, "num_hidden_layers": 1}
    base = model_folder(tmp_path / "base", **sizes)
    _adapter(base, tmp_path / "adapter", **options)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "adapter"), str(tmp_path / "out"), str(1 << 40)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": "65536"}
    ran = subprocess.run(command, capture_output=True, check=False, text=True, env=environment, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 1.5 * (64 << 20), int(ran.stdout)


@pytest.mark.filterwarnings("ignore")
def test_the_command_writes_a_folder_that_transformers_reads(tmp_path: Path) -> None:
    """With the tokenizer, its chat template, and a generation config that ends where turns end."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    base = model_folder(tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "temperature": 0.5}))
    _adapter(base, tmp_path / "run" / "adapter")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"recipe": "sft", "base": {}}))
    arguments = ["ckpt", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hf", "--dtype", "bf16"]
    found = CliRunner().invoke(app, [*arguments, "--shard-size", "30kB"], catch_exceptions=False)
    assert found.exit_code == 0 and "merged in fp32 and rounded once" in found.output
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    turns = [{"role": "user", "content": "one"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == "<user>one<assistant>"
    said = GenerationConfig.from_pretrained(tmp_path / "out")
    assert said.eos_token_id == [tokenizer.eos_token_id, 7, 9] and said.pad_token_id == tokenizer.pad_token_id
    with pytest.raises(CheckpointError, match="exists"):
        merging.merge(tmp_path / "run", tmp_path / "out")


@pytest.mark.filterwarnings("ignore")
def test_a_base_that_rested_in_codes_is_said_with_its_error(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    _adapter(base, tmp_path / "run" / "adapter")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"recipe": "sft", "base": {"bits": 4}}))
    report = merging.merge(tmp_path / "run", tmp_path / "out")
    assert report.resting == "nf4/64" and 0.05 < report.error < 0.15 and "%" in str(report)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_merged_is_refused_in_a_sentence(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = model_folder(tmp_path / "base")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    _adapter(base, tmp_path / "adapter")
    tensors = load_file(file)
    name = next(iter(tensors))
    for changed, words in (
        ({key: value for key, value in tensors.items() if key != name}, "has no 'base_model"),
        ({**tensors, "base_model.model.other.lora_A.weight": tensors[name].clone()}, "which its config does not say"),
        ({**tensors, name: tensors[name][:, :3].contiguous()}, "does not fit its base"),
    ):
        save_file(changed, file)
        with pytest.raises(ConfigError, match=words) as error:
            merging.merge(tmp_path / "adapter", tmp_path / "out")
        assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
    save_file(tensors, file)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(ConfigError, match=r"quantized.*base_model_name_or_path"):
        merging.merge(tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(ConfigError, match="no adapter to merge"):
        merging.merge(model_folder(tmp_path / "plain"), tmp_path / "out")
