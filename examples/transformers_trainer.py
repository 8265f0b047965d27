r"""A transformers Trainer with a DeepSpeed config: a small GPT-2 reads Python's standard library, byte by byte.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py --deepspeed examples/ds_zero3.json
    shardfold run --as-deepspeed --no_local_rank --nproc-per-node 2 examples/transformers_trainer.py \
        --deepspeed examples/ds_zero3.json

It trains, evaluates, saves checkpoints and the model, and generates. ``--resume`` goes on from the newest checkpoint.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

parser = argparse.ArgumentParser(description="A small GPT-2 under the Trainer and ZeRO.")
parser.add_argument("--deepspeed", type=Path, help="a DeepSpeed config; without one the Trainer uses DDP")
parser.add_argument("--precision", default="no", choices=["no", "bf16"])
parser.add_argument("--steps", type=int, default=20, help="optimizer steps in all")
parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
parser.add_argument("--micro-batch", type=int, default=4, help="windows per process and micro-batch")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--context", type=int, default=64, help="bytes per window")
parser.add_argument("--output", type=Path, default=Path("runs/trainer"))
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

# Under stage 3 the arguments come before the model: transformers then builds it in shards.
arguments = TrainingArguments(
    output_dir=str(args.output),
    deepspeed=str(args.deepspeed) if args.deepspeed else None,
    bf16=args.precision == "bf16",
    use_cpu=not torch.cuda.is_available(),
    max_steps=args.steps,
    per_device_train_batch_size=args.micro_batch,
    per_device_eval_batch_size=args.micro_batch,
    gradient_accumulation_steps=args.accumulate,
    learning_rate=1e-3,
    weight_decay=0.1,
    warmup_steps=4,
    lr_scheduler_type="cosine",
    max_grad_norm=1.0,
    logging_steps=1,
    save_steps=max(1, args.steps // 2),
    report_to="none",
    disable_tqdm=True,
    seed=0,
)


class Windows(Dataset):
    """Windows of bytes that lie end to end."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return len(self.text) // self.context

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = torch.tensor(list(self.text[index * self.context : (index + 1) * self.context]))
        return {"input_ids": window, "labels": window}


text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
cut = 32 * args.context
config = GPT2Config(
    vocab_size=256,
    n_embd=args.width,
    n_layer=args.layers,
    n_head=4,
    n_positions=max(256, args.context),
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=None,
    eos_token_id=None,
)
torch.manual_seed(0)
model = GPT2LMHeadModel._from_config(config)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Windows(text[cut:], args.context),
    eval_dataset=Windows(text[:cut], args.context),
)
trainer.train(resume_from_checkpoint=args.resume)
held_out = trainer.evaluate()["eval_loss"]
trainer.save_model(str(args.output / "model"))
trainer.save_state()

bare = trainer.accelerator.unwrap_model(trainer.model_wrapped)
bare.eval()
prompt = torch.tensor([list(b"def test_")], device=bare.device)
with torch.no_grad():  # all processes generate, because under stage 3 each holds a part
    written = bare.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
        synced_gpus=is_deepspeed_zero3_enabled(),
    )
if trainer.is_world_process_zero():
    for line in trainer.state.log_history:
        if "loss" in line:
            print(f"step {line['step']:3}  loss {line['loss']:.4f}  norm {float(line['grad_norm']):.3f}")
    print(f"held out {held_out:.4f}")
    print(f"written {bytes(written[0].tolist()).decode(errors='replace')!r}")
trainer.accelerator.end_training()
