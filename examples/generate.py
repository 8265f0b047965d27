"""Generation with parameters that are split: by a gather of everything, unit by unit in less memory, and together.

python examples/generate.py
torchrun --nproc-per-node 2 examples/generate.py
"""

from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardfold as sf

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
))  # fmt: skip
engine = sf.Engine(model, optimizer=partial(torch.optim.AdamW, lr=1e-3), layout="zero3")
prompt = torch.arange(1, 5, device=engine.device)[None]
options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}

model.eval()
with engine.gathered(), torch.no_grad():  # everything is whole in here: ranks may do different things
    fast = model.generate(prompt, max_new_tokens=8 + 4 * engine.rank, **options)
with torch.no_grad():  # each forward gathers a unit and frees it: all ranks generate equally long
    small = model.generate(prompt, max_new_tokens=8, **options)
assert torch.equal(fast[:, :12], small)
prompts = [prompt[0].tolist(), [5, 6]]  # of any lengths, together; ranks may have others
for answer in sf.generate(engine, prompts, max_tokens=8, temperature=0):
    assert answer.request or answer.tokens == small[0, 4:].tolist()
if engine.rank == 0:
    print("tokens:", len(small[0]))
engine.close()
