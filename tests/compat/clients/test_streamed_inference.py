"""A program as those who measure ZeRO-Inference write it runs unchanged, and says what transformers says alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfold.plan.formats import FORMATS
from tests.compat.clients.test_trl import tokenizer
from tests.support.clients import needs

pytestmark = needs("accelerate", "transformers")

PROMPT, NEW = "the drive is read", 6

PROGRAM = '''
"""Greedy text with weights in host memory or on a drive, and how long it took."""
import argparse
import gc
import json
import time

import torch
import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.deepspeed import HfDeepSpeedConfig

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--prompt")
parser.add_argument("--batch_size", type=int, default=2)
parser.add_argument("--gen_len", type=int, default=6)
parser.add_argument("--cpu_offload", action="store_true")
parser.add_argument("--disk_offload")
parser.add_argument("--pin_memory", type=int, default=0)
parser.add_argument("--quant_bits", type=int, default=16)
parser.add_argument("--quant_group_size", type=int, default=64)
parser.add_argument("--kv_offload", action="store_true")
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()

deepspeed.init_distributed(get_accelerator().communication_backend_name())
shape = AutoConfig.from_pretrained(args.model)
kind = shape.dtype or torch.float16
width = shape.hidden_size
settings = {
    "fp16": {"enabled": kind == torch.float16},
    "bf16": {"enabled": kind == torch.bfloat16},
    "train_batch_size": args.batch_size,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 2 * width * width,
        "stage3_param_persistence_threshold": width,
        "stage3_max_live_parameters": 2 * width * width,
    },
}
if args.quant_bits < 16:
    rule = {"num_bits": args.quant_bits, "group_size": args.quant_group_size, "group_dim": 1, "symmetric": False}
    settings["weight_quantization"] = {"quantized_initialization": rule}
if args.cpu_offload:
    settings["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": bool(args.pin_memory)}
if args.disk_offload:
    settings["zero_optimization"]["offload_param"] = {
        "device": "nvme", "nvme_path": args.disk_offload, "pin_memory": bool(args.pin_memory),
        "buffer_count": 5, "buffer_size": 2 << 30,
    }
    settings["aio"] = {
        "block_size": 16 << 20, "queue_depth": 64, "thread_count": 8, "use_gds": False, "single_submit": False,
        "overlap_events": True,
    }

alive = HfDeepSpeedConfig(settings)  # from_pretrained() looks for it
get_accelerator().empty_cache()
gc.collect()
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=kind).eval()
engine = deepspeed.initialize(model=model, config_params=settings)[0]
engine.module.eval()
model = engine.module
if args.kv_offload:
    model.set_kv_cache_offload(True, args.gen_len, True, True)

marks = []
before = model.register_forward_pre_hook(lambda module, given: marks.append(time.time()))
after = model.register_forward_hook(lambda module, given, out: marks.append(time.time()))
reader = AutoTokenizer.from_pretrained(args.model)
reader.pad_token = reader.eos_token
prompts = [args.prompt] * (args.batch_size // dist.get_world_size())
batch = reader(prompts, return_tensors="pt", padding="max_length", max_length=24, padding_side="left")
batch = {name: each.to(get_accelerator().current_device_name()) for name, each in batch.items()}
with torch.no_grad():
    model.stage = "prefill"
    out = model.generate(**batch, max_new_tokens=args.gen_len, do_sample=False)
before.remove()
after.remove()
get_accelerator().synchronize()
if dist.get_rank() == 0:
    peak = get_accelerator().max_memory_allocated()
    print(json.dumps({"tokens": out[:, 24:].tolist(), "forwards": len(marks) // 2, "peak": peak}))
'''


def _made(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = tokenizer()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "initializer_range": 0.3,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": 257}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(reader), max_position_embeddings=64, **sizes, **heads))
    model.save_pretrained(folder)
    reader.save_pretrained(folder)
    return folder


def _coded(folder: Path, target: Path) -> Path:
    """The model with the values that 4 bits of its blocks' matrices stand for."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    form = FORMATS["int4/32"]
    for module in (each for each in model.model.modules() if isinstance(each, torch.nn.Linear)):
        values = module.weight.data.flatten()
        payload = torch.empty(form.nbytes(values.numel()), dtype=torch.uint8)
        form.encode_tensor(values, payload)
        form.decode(payload.view(1, -1), values.view(1, -1))
        module.weight.data.copy_(values.view_as(module.weight))
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target


def _alone(folder: Path) -> list[int]:
    """transformers' text, without any engine."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = model.generate(**given, max_new_tokens=NEW, do_sample=False)
    return whole[0, given["input_ids"].shape[1] :].tolist()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_program_of_zero_inference_runs_unchanged(tmp_path: Path) -> None:
    """On two ranks, as `deepspeed program.py` starts it: weights in host memory, on a drive, and there in 4 bits;
    keys and values in host memory."""
    folder = _made(tmp_path / "model")
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    cpu, disk = ["--cpu_offload", "--pin_memory", "1"], ["--disk_offload", str(tmp_path)]
    four = ["--quant_bits", "4", "--quant_group_size", "32"]

    def told(*options: str) -> list[list[int]]:
        line = [sys.executable, "-m", "shardfold", "run", "--as-deepspeed", "--num_gpus", "2"]
        given = ["--model", str(folder), "--prompt", PROMPT, "--gen_len", str(NEW), *options]
        done = subprocess.run(
            [*line, str(tmp_path / "program.py"), *given],
            env=environment, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        said = re.search(r'{"tokens".*}', done.stdout)
        assert said is not None, done.stdout
        found = json.loads(said[0])
        assert found["forwards"] == NEW
        return found["tokens"]

    expected, coded = ([_alone(each)] for each in (folder, _coded(folder, tmp_path / "coded")))
    assert expected != coded
    assert [told(*cpu), told(*disk, "--kv_offload"), told(*four, *disk)] == [expected, expected, coded]


def test_keys_and_values_rest_in_host_memory(capfd: pytest.CaptureFixture[str]) -> None:
    """The method of ZeRO-Inference's programs: on a GPU it names transformers' cache in host memory and says what it
    does not do, on a CPU nothing is to be moved; a model that trains has no such method."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardfold.compat.deepspeed.initialize import _offer_kv_offload

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    for device, named in (("cuda", "offloaded"), ("cpu", None)):
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_attention_heads=2, **sizes))
        _offer_kv_offload(model, torch.device(device), trains=False)
        model.set_kv_cache_offload(True, 8, True, False)
        assert model.generation_config.cache_implementation == named
        assert ("are not pinned" in "".join(capfd.readouterr())) == (device == "cuda")
        model.set_kv_cache_offload(False)
        assert model.generation_config.cache_implementation is None
