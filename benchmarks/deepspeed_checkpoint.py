"""Runs that DeepSpeed begins and Shardfold continues, as a Markdown table of how far their losses are apart.

python benchmarks/deepspeed_checkpoint.py [--only zero2 zero3]

Each case is trained by DeepSpeed on 2 ranks. After half of its steps it saves a checkpoint of its own, and goes on. The
checkpoint is imported, and continued here on 1, 2 and 3 ranks. A step has the same rows for any number of ranks.

    differs      elements of fp32 weights and moments that are not bitwise what DeepSpeed held when it saved, of how
                 many; DeepSpeed's own accessors (``safe_get_full_*``) tell what it held
    losses       of DeepSpeed, in the first and the last step after the checkpoint
    1, 2, 3      ranks here: the largest relative difference of a loss from DeepSpeed's, over the steps that follow

The model is a small decoder with a tied embedding, a frozen table and a buffer that changes; its sizes are odd, so that
partitions are padded; two parameter groups; a schedule of DeepSpeed's, gradients clipped at norm 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.checkpoint.imports import import_from
from shardfold.launch import free_port, rank_environment
from shardfold.testing import run_ranks

ROWS, CONTEXT, VOCAB, WIDTH = 12, 16, 61, 33
RANKS, HERE = 2, (1, 2, 3)
RATE, DECAY = 1e-2, 0.1
SCHEDULE = {"total_num_steps": 60, "warmup_max_lr": RATE, "warmup_num_steps": 8, "warmup_type": "linear"}

#: DeepSpeed's configuration of each case, beside what all have.
CASES: dict[str, dict[str, Any]] = {
    **{f"zero{stage} fp32": {"zero_optimization": {"stage": stage}} for stage in (1, 2, 3)},
    **{f"zero{stage} bf16": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}} for stage in (1, 2, 3)},
    "zero1 bf16, fp32 gradients": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    **{
        f"zero{stage} fp32, offload": {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
        for stage in (2, 3)
    },
    "zero2 fp32, round robin": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "zero2 bf16, aligned": {
        "zero_optimization": {"stage": 2, "parameter_alignment": True},
        "bf16": {"enabled": True},
    },
    "zero3 fp32, sub-groups": {"zero_optimization": {"stage": 3, "sub_group_size": 3000}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shifted = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.down(F.gelu(self.up(self.norm(x + self.mix(shifted)))))


class Decoder(nn.Module):
    """Mean cross-entropy of the next token of ``(rows, CONTEXT + 1)`` tokens."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) / 10, requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embedding(tokens[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def build() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def batch(step: int, rank: int, ranks: int) -> Tensor:
    """The rank's rows of a step's ``ROWS``: arithmetic sequences with a few tokens replaced."""
    draw = torch.Generator().manual_seed(step)
    starts, strides = torch.randint(VOCAB, (2, ROWS, 1), generator=draw)
    tokens = (starts + strides % 5 * torch.arange(CONTEXT + 1)) % VOCAB
    noise = torch.rand(tokens.shape, generator=draw) < 0.1
    tokens[noise] = torch.randint(VOCAB, tokens.shape, generator=draw)[noise]
    return tokens.chunk(ranks)[rank]


# -- DeepSpeed's side


def deepspeed(case: str, folder: Path, half: int) -> None:
    """One rank of DeepSpeed's run: saves at ``half`` of its steps; rank 0 writes what the run was."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build()
    config = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // RANKS,
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupDecayLR", "params": SCHEDULE},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **CASES[case],
    }
    optimizer = torch.optim.AdamW(groups(model), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses: list[float] = []
    for step in range(2 * half):
        loss = engine(batch(step, rank, RANKS))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / RANKS)
        if step + 1 == half:
            engine.save_checkpoint(str(folder), client_state={"seen": ROWS * half})
            held: dict[str, Tensor] = {}
            if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
                # It links the states of all groups when the first group has its own: so later ones are not found.
                engine.optimizer._hp_optimizer_states_linked = False
                engine.optimizer._lazy_init_hp_params_optimizer_state()
            for name, parameter in engine.module.named_parameters():
                if parameter.requires_grad:
                    held[f"{name}/weight"] = safe_get_full_fp32_param(parameter)
                    for state in ("exp_avg", "exp_avg_sq"):
                        held[f"{name}/{state}"] = safe_get_full_optimizer_state(parameter, state)
            if rank == 0:
                torch.save({name: values.clone() for name, values in held.items()}, folder / "held.pt")
    if rank == 0:
        said = {"losses": losses, "rate": engine.get_lr()[0]}
        (folder / "losses.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def run_deepspeed(case: str, folder: Path, half: int) -> None:
    port = free_port()
    processes: list[subprocess.Popen[str]] = []
    for rank in range(RANKS):
        environment = rank_environment(rank, RANKS, port) | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--deepspeed", case, str(folder), "--half", str(half)]
        log = folder / f"deepspeed-{rank}.log"
        with log.open("w") as out:
            processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out, text=True))
    try:
        for rank, process in enumerate(processes):
            if process.wait(timeout=300):
                raise SystemExit(
                    f"{case}: DeepSpeed failed:\n" + (folder / f"deepspeed-{rank}.log").read_text()[-3000:]
                )
    finally:
        for process in processes:
            process.kill()


# -- our side


def go_on(case: str, path: Path, first: int, steps: int) -> tuple[list[float], float]:
    """Losses of the steps from ``first`` on, and the rate of the step after them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    narrow = sf.Precision(compute="bf16", reduce="bf16", grads="bf16")  # as DeepSpeed, unless told otherwise
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    engine = sf.Engine(
        model,
        optimizer=torch.optim.AdamW(groups(model), lr=RATE),
        layout=case.split(maxsplit=1)[0],
        precision="fp32" if "fp32" in case.split(",", maxsplit=1)[0] else "bf16" if "fp32" in case else narrow,
        lr_schedule=partial(sf.optim.WarmupDecayLR, **SCHEDULE),
        clip_norm=1.0,
    )
    engine.load(path)
    assert engine.steps == first, engine.steps
    losses: list[float] = []
    for step in range(first, first + steps):
        loss = engine(batch(step, rank, ranks))
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(loss.detach()))
    assert int(model.calls) == first + steps, int(model.calls)
    rate = engine.optimizer.param_groups[0]["lr"]
    engine.close()
    return losses, rate


def differing(path: Path, held: dict[str, Tensor]) -> tuple[int, int]:
    """Elements of the checkpoint that are not bitwise what DeepSpeed held, and all."""
    different = 0
    with sf.Checkpoint(path) as checkpoint:
        for key, values in held.items():
            name, _, state = key.rpartition("/")
            different += int((checkpoint.read(name, state) != values.reshape(-1)).sum())
    return different, sum(values.numel() for values in held.values())


def compare(case: str, folder: Path, half: int) -> str:
    """A row of the table."""
    run_deepspeed(case, folder, half)
    said = json.loads((folder / "losses.json").read_text())
    path = import_from(folder, folder / "here/imported", "deepspeed").path
    told = "not told"
    if not CASES[case]["zero_optimization"].get("round_robin_gradients"):  # its accessors then mix parameters up
        told = "{} of {:,}".format(*differing(path, torch.load(folder / "held.pt")))
    cells = [case, told, f"{said['losses'][half]:.3f} - {said['losses'][-1]:.3f}"]
    for ranks in HERE:
        losses, rate = run_ranks(go_on, ranks, case, path, half, half)[0]
        assert math.isclose(rate, said["rate"], rel_tol=1e-12), (rate, said["rate"])
        apart = [abs(mine - theirs) / theirs for mine, theirs in zip(losses, said["losses"][half:], strict=True)]
        cells.append(f"{max(apart):.1e}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names contain one of these")
    parser.add_argument("--half", type=int, default=10, help="steps before the checkpoint, and after it")
    parser.add_argument("--keep", type=Path, help="a folder that the checkpoints and logs are left in")
    parser.add_argument("--deepspeed", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.deepspeed:
        deepspeed(given.deepspeed[0], Path(given.deepspeed[1]), given.half)
        return
    print(f"| | differs | losses | {' | '.join(map(str, HERE))} |")
    print(f"|{'---|' * (3 + len(HERE))}")
    with tempfile.TemporaryDirectory() as temporary:
        for case in (case for case in CASES if any(part in case for part in given.only)):
            folder = (given.keep or Path(temporary)) / case.replace(", ", "-").replace(" ", "-")
            folder.mkdir(parents=True)
            print(compare(case, folder, given.half), flush=True)


if __name__ == "__main__":
    main()
