"""A training loop of Accelerate with its DeepSpeed plugin: a small Llama reads Python's standard library, byte by byte.

    accelerate launch --num_processes 2 --use_deepspeed examples/accelerate_loop.py --stage 3
    shardfold run --as-deepspeed --no_local_rank --nproc-per-node 2 examples/accelerate_loop.py --stage 3

It trains, evaluates, saves its state half way, writes the model in the format of transformers and generates.
``--resume`` goes on from a saved state.
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list, set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser(description="A small Llama under Accelerate and ZeRO.")
parser.add_argument("--stage", type=int, default=2, choices=[0, 1, 2, 3])
parser.add_argument("--precision", default="no", choices=["no", "bf16"])
parser.add_argument("--steps", type=int, default=20, help="optimizer steps in all")
parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
parser.add_argument("--micro-batch", type=int, default=4, help="windows per process and micro-batch")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--context", type=int, default=64, help="bytes per window")
parser.add_argument("--output", type=Path, default=Path("runs/accelerate"))
parser.add_argument("--resume", type=Path, help="a folder step-N of an earlier run")
args = parser.parse_args()

plugin = DeepSpeedPlugin(
    zero_stage=args.stage,
    gradient_accumulation_steps=args.accumulate,
    gradient_clipping=1.0,
    zero3_init_flag=args.stage == 3,  # stage 3 builds the model in shards
    zero3_save_16bit_model=True,
)
# Without a GPU the processes talk over Gloo.
gloo = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
accelerator = Accelerator(mixed_precision=args.precision, deepspeed_plugin=plugin, kwargs_handlers=gloo)
set_seed(0)

text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // args.context * args.context]
windows = windows.view(-1, args.context).long()
held_out, training = windows[:32], windows[32:]
loader = DataLoader(TensorDataset(training), batch_size=args.micro_batch, shuffle=True, drop_last=True)
held_out_loader = DataLoader(TensorDataset(held_out), batch_size=args.micro_batch)

config = LlamaConfig(
    vocab_size=256,
    hidden_size=args.width,
    intermediate_size=3 * args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=4,
    max_position_embeddings=max(256, args.context),
    bos_token_id=None,
    eos_token_id=None,
)
model = LlamaForCausalLM._from_config(config)
decayed = [p for name, p in model.named_parameters() if "norm" not in name]
others = [p for name, p in model.named_parameters() if "norm" in name]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3
)
# Accelerate steps a scheduler once per process, so that it counts batches as one process would.
processes = accelerator.num_processes
schedule = get_cosine_schedule_with_warmup(optimizer, 4 * processes, args.steps * processes)
model, optimizer, loader, held_out_loader, schedule = accelerator.prepare(
    model, optimizer, loader, held_out_loader, schedule
)


def evaluate() -> float:
    """Mean nats per byte of the held-out windows."""
    model.eval()
    losses = []
    for (tokens,) in held_out_loader:
        with torch.no_grad():
            loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(accelerator.gather_for_metrics(loss.float().repeat(len(tokens))))
    model.train()
    return torch.cat(losses).mean().item()


done = 0
if args.resume:
    accelerator.load_state(str(args.resume))
    done = int(args.resume.name.removeprefix("step-"))
    loader = accelerator.skip_first_batches(loader, done * args.accumulate)

if accelerator.is_main_process:
    args.output.mkdir(parents=True, exist_ok=True)
    metrics = (args.output / "metrics.jsonl").open("w")
total, began = 0.0, time.perf_counter()
for (tokens,) in loader:
    if done == args.steps:
        break
    with accelerator.accumulate(model):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    total += accelerator.reduce(loss.detach().float(), "mean").item() / args.accumulate
    if not accelerator.sync_gradients:
        continue
    done += 1
    if accelerator.is_main_process:
        line = {
            "step": done,
            "loss": total,
            "grad_norm": float(norm),
            "lr": schedule.get_last_lr()[0],
            "seconds": time.perf_counter() - began,
        }
        print(json.dumps(line), file=metrics, flush=True)
        print(f"step {done:3}  loss {total:.4f}  norm {line['grad_norm']:.3f}  lr {line['lr']:.5f}")
    if done == args.steps // 2:
        accelerator.save_state(str(args.output / f"step-{done}"))
    total, began = 0.0, time.perf_counter()

accelerator.print(f"held out {evaluate():.4f}")
state = accelerator.get_state_dict(model)  # whole values; under stage 3 on the main process only
bare = accelerator.unwrap_model(model)
bare.save_pretrained(args.output / "model", is_main_process=accelerator.is_main_process, state_dict=state)

bare.eval()
prompt = torch.tensor([list(b"def test_")], device=accelerator.device)
with torch.no_grad():  # all processes generate, because under stage 3 each holds a part
    written = bare.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
        synced_gpus=args.stage == 3,
    )
same = broadcast_object_list([written.tolist()]) == [written.tolist()]
accelerator.print(
    f"written {bytes(written[0].tolist()).decode(errors='replace')!r}", "" if same else "(processes differ)"
)
accelerator.end_training()
