"""A script of transformers' Trainer, as users write them; what kills its ranks is in a callback.

python elastic_script.py FOLDER STAGE ACCUMULATE STEPS RANK:STEP:MILLISECONDS ...

A rank dies so many milliseconds behind the beginning of a step: at once, or by a timer, wherever it is then; if they
are below 0, so many behind the end of that many steps, where every fourth time an evaluation and a save follow. As
step 98 counts that the last save is done, and the best is about to be loaded, and as 99 the end of the training. What a
forward of its reads in training is written into FOLDER/read-RANK.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

VOCAB, ROWS, CONTEXT = 61, 50, 12


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Sequences that begin with their number, of whose targets some are left out."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        strides = torch.randint(5, (ROWS, 1), generator=draw)
        self.rows = (torch.arange(ROWS)[:, None] + strides * torch.arange(CONTEXT)) % VOCAB

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.rows[index].clone()
        labels[: index % 7] = -100
        return {"input_ids": self.rows[index], "labels": labels}


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Ends(TrainerCallback):
    """This rank, at those of the moments that are its own."""

    def __init__(self, moments: list[tuple[int, ...]]) -> None:
        self.moments = [(step, later) for rank, step, later in moments if rank == int(os.environ["RANK"])]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for step, later in self.moments:
            if step == state.global_step and later > 0:
                threading.Timer(later / 1e3, end).start()
            elif step == state.global_step and later == 0:
                end()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == state.max_steps and 98 in dict(self.moments):
            end()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if 99 in dict(self.moments):
            end()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for step, later in self.moments:
            if step == state.global_step and later < 0:
                threading.Timer(-later / 1e3, end).start()


def main(folder: Path, stage: int, accumulate: int, steps: int, moments: list[tuple[int, ...]]) -> None:
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed={
            "zero_optimization": {"stage": stage},
            "gradient_clipping": "auto",
            "gradient_accumulation_steps": "auto",
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
        },
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-2,
        warmup_steps=2,
        lr_scheduler_type="linear",
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        per_device_eval_batch_size=2,
        save_steps=4,
        load_best_model_at_end=True,
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, attention_dropout=0.1, **sizes, **tokens))
    whole = Subset(Rows(), [7 * (i % 7) for i in range(24)])  # with as many targets, by which ranks' batches count
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=whole, callbacks=[Ends(moments)])
    log = os.open(folder / f"read-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(module: Any, args: Any, given: dict[str, Any]) -> None:
        if not module.training:
            return
        elastic = trainer.model_wrapped.elastic
        said = [elastic.run.engine.steps, len(elastic.run.recoveries), given["input_ids"][:, 0].tolist()]
        os.write(log, (json.dumps([*said, elastic.factor]) + "\n").encode())

    model.register_forward_pre_hook(note, with_kwargs=True)
    trainer.train()
    trainer.save_model(str(folder / "final"))
    with trainer.model_wrapped._core.gathered():
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    if trainer.is_world_process_zero():
        torch.save({"log": trainer.state.log_history, "weights": weights}, folder / "found")


if __name__ == "__main__":
    place, *numbers = sys.argv[1:]
    first, rest = [int(each) for each in numbers[:3]], [tuple(map(int, each.split(":"))) for each in numbers[3:]]
    main(Path(place), *first, rest)
