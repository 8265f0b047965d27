"""LoRA with peft on a transformers model under zero3: the base is frozen and split, adapters are saved alone.

    python examples/lora.py
    torchrun --nproc-per-node 2 examples/lora.py

The weights here are random; `sf.Init(weights="path/to/model")` reads safetensors into the shards.
"""

import shutil
import tempfile
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import shardfold as sf

STEPS = 40
TEXT = torch.tensor(list(b"Adapters are small, so their checkpoints are small. " * 16))

torch.manual_seed(0)
base = LlamaForCausalLM(LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
))  # fmt: skip
model = get_peft_model(
    base, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
)
engine = sf.Engine(model, optimizer=partial(torch.optim.AdamW, lr=2e-2), layout="zero3")
trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
everything = sum(p.numel() for p in engine.module.parameters())
if engine.rank == 0:
    print(f"{trained:,} of {everything:,} parameters are trained")

draw = torch.Generator().manual_seed(engine.data_rank)
for step in range(STEPS):
    starts = torch.randint(len(TEXT) - 32, (8,), generator=draw)
    tokens = TEXT[starts[:, None] + torch.arange(32)].to(engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    if step % 10 == 0 or step == STEPS - 1:
        mean = engine.mean(loss.item())
        if engine.rank == 0:
            print(f"step {step + 1:3}  loss {mean:.4f}")

if engine.world_size == 1:  # on several ranks give a folder that all of them see
    folder = tempfile.mkdtemp()
    report = engine.save(f"{folder}/step-{STEPS}", frozen="skip", wait=True).wait()
    print(f"{report.num_bytes:,} bytes saved: adapters and their moments, without the base")
    shutil.rmtree(folder)
engine.close()
