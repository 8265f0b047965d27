"""A transformers Llama that is built without memory, trained with its parameters split, and asked to write.

    python examples/transformers_meta.py
    torchrun --nproc-per-node 2 examples/transformers_meta.py

Here the weights are random; `sf.Init(weights="path/to/model")` reads safetensors files into the shards instead.
"""

from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardfold as sf

TEXT = b"A table says what rests where, a program says what moves when, an engine runs the program. "
STEPS, CONTEXT = 100, 48

config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=256,
)
with sf.meta_init():  # shapes and dtypes, no memory
    model = LlamaForCausalLM(config)

engine = sf.Engine(model, optimizer=partial(torch.optim.AdamW, lr=3e-3), layout="zero3", clip_norm=1.0)
if engine.rank == 0:
    print("units:", ", ".join(unit.name for unit in engine.units))

text = torch.tensor(list(TEXT * 8), device=engine.device)
draw = torch.Generator().manual_seed(engine.rank)  # each rank reads other parts of the text
for step in range(STEPS):
    starts = torch.randint(len(text) - CONTEXT, (8,), generator=draw).to(engine.device)
    tokens = text[starts[:, None] + torch.arange(CONTEXT, device=engine.device)]
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    mean = engine.mean(loss.item())
    if engine.rank == 0 and (step % 10 == 0 or step == STEPS - 1):
        print(f"step {step + 1:3}  loss {mean:.4f}")

prompt = text[None, :16]
with engine.gathered(), torch.no_grad():  # inside, every rank has all values and nothing is sent
    written = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False, pad_token_id=0
    )
if engine.rank == 0:
    print(f"written: {bytes(written[0].tolist()).decode(errors='replace')!r}")
engine.close()
