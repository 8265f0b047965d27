"""Tensor and sequence axes on two ranks: steps beside DDP and PyTorch's tensor parallelism, a large head, the wire.

    python benchmarks/axes.py step      # a step of the GPT of 46.9M parameters
    python benchmarks/axes.py head      # a vocabulary of 131,072, the head of twice the backbone: memory and steps
    python benchmarks/axes.py wire      # bytes between two network namespaces, by the kernel's count; needs root

Of ``step`` and ``head`` all contenders live in the same two processes, of one thread each, and take turns: a round is
one step that is not timed and some that are, in an order that is reversed in every second round. A step's time is the
slower rank's, a round's figure the median of its steps, the table's the median over rounds; ratios are taken in each
round. All do the same work in a step: the same sequences, all parameters, fused AdamW. Along ``tensor`` each rank has
all sequences and half of each layer, along ``sequence`` half of each sequence, and under ``ddp`` half of the sequences.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.plan.checks import human
from shardfold.testing import run_ranks
from shardfold.tools.bench.settings import gpt_shape
from shardfold.tools.recipes.gpt import GPT, Embedding, GPTConfig, Linear
from tests.support.held import HeldBytes

RANKS = 2
ADAMW = partial(torch.optim.AdamW, lr=1e-4, fused=True)
Step = Callable[[], float]
"""Trains one step, and returns the loss of all sequences."""


# -- contenders


def batch(shape: GPTConfig, rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab, (rows, shape.context + 1), generator=draw)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def model(shape: GPTConfig) -> GPT:
    torch.manual_seed(0)
    return GPT(shape)


def ours(shape: GPTConfig, rows: int, **options: Any) -> Step:
    engine = sf.Engine(model(shape), optimizer=ADAMW, **{"layout": "ddp", **options})
    tokens, targets = (each.chunk(engine.data_ranks)[engine.data_rank] for each in batch(shape, rows))
    cut = "sequence" in options.get("mesh", {})

    def step() -> float:
        given = {"tokens": tokens, "targets": targets}
        loss = engine(**(sf.sequence_shard(given, engine=engine) if cut else given))
        engine.backward(loss)
        engine.step()
        return engine.mean(loss.item())

    return step


def torch_ddp(shape: GPTConfig, rows: int) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model(shape))
    optimizer = ADAMW(wrapped.parameters())
    tokens, targets = (each.chunk(RANKS)[dist.get_rank()] for each in batch(shape, rows))

    def step() -> float:
        loss = wrapped(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / RANKS

    return step


class OfTorch(nn.Module):
    """The same GPT of PyTorch's own layers, which ``parallelize_module`` takes, and a loss over its logits."""

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.gpt = model(shape)
        for path, module in list(self.gpt.named_modules()):
            new: nn.Module | None = None
            if type(module) is Linear:
                new = nn.Linear(module.weight.shape[1], module.weight.shape[0], bias=False)
            elif type(module) is Embedding:
                new = nn.Embedding(*module.weight.shape)
            if new is not None:
                new.load_state_dict(module.state_dict())
                self.gpt.set_submodule(path, new)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.gpt(tokens).flatten(0, 1), targets.flatten())


def torch_tensor(shape: GPTConfig, rows: int) -> Step:
    """As PyTorch's tutorial of tensor parallelism: columns, rows, and a loss over logits that are cut. Queries, keys
    and values in one matrix are cut at other places than ours, so that losses differ; the work is the same."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (RANKS,))
    made = OfTorch(shape)
    plan: dict[str, Any] = {
        "gpt.embedding": RowwiseParallel(input_layouts=Replicate()),
        "gpt.blocks.*.attention.qkv": ColwiseParallel(),
        "gpt.blocks.*.attention.out": RowwiseParallel(),
        "gpt.blocks.*.feed_forward.gate_up": ColwiseParallel(),
        "gpt.blocks.*.feed_forward.down": RowwiseParallel(),
        "gpt.head": ColwiseParallel(use_local_output=False),
    }
    parallelize_module(made, mesh, plan)
    cut = [p for p in made.parameters() if isinstance(p, DTensor)]
    # In groups of their own: fused AdamW takes no list of both kinds.
    optimizer = ADAMW([{"params": cut}, {"params": [p for p in made.parameters() if not isinstance(p, DTensor)]}])
    tokens, targets = batch(shape, rows)

    def step() -> float:
        with loss_parallel():
            loss: Any = made(tokens, targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).item()

    return step


def replicated_head(shape: GPTConfig, rows: int) -> Step:
    """Blocks are cut, embedding and head are not: each rank computes all logits."""
    plan = {pattern: word for pattern, word in GPT.tensor_plan.items() if word != "vocabulary"}
    return ours(shape, rows, parallel=sf.Parallel(mesh={"tensor": RANKS}, tensor=plan))


STEPS: dict[str, Callable[[GPTConfig, int], Step]] = {
    "torch-ddp": torch_ddp,
    "torch-tensor": torch_tensor,
    "ddp": ours,
    "tensor=2": partial(ours, parallel=sf.Parallel(mesh={"tensor": RANKS}, tensor="auto")),
    "sequence=2, ulysses": partial(ours, parallel=sf.Parallel(mesh={"sequence": RANKS}, attention="ulysses")),
    "sequence=2, ring": partial(ours, parallel=sf.Parallel(mesh={"sequence": RANKS}, attention="ring")),
}
HEADS: dict[str, Callable[[GPTConfig, int], Step]] = {
    "tensor=2, head replicated": replicated_head,
    "ddp": ours,
    "tensor=2": partial(ours, parallel=sf.Parallel(mesh={"tensor": RANKS}, tensor="auto")),
}


# -- rounds


def take_turns(
    contenders: Sequence[str], which: str, shape: GPTConfig, rows: int, rounds: int, steps: int
) -> dict[str, tuple[list[float], float]]:
    """Seconds of a step by round, and the last loss, by contender; on each rank."""
    torch.set_num_threads(1)
    every = STEPS if which == "step" else HEADS
    made = {name: every[name](shape, rows) for name in contenders}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    for step in made.values():
        step()
        step()
    for number in range(rounds):
        for name in reversed(contenders) if number % 2 else contenders:
            taken: list[float] = []
            for timed in range(steps + 1):
                dist.barrier()
                begun = perf_counter()
                losses[name] = made[name]()
                spent = torch.tensor(perf_counter() - begun)
                dist.all_reduce(spent, dist.ReduceOp.MAX)
                if timed:
                    taken.append(spent.item())
            seconds[name].append(median(taken))
    return {name: (seconds[name], losses[name]) for name in contenders}


def table(found: dict[str, tuple[list[float], float]], bases: Sequence[str]) -> None:
    print("| | step, ms | " + " | ".join(f"/ {base}" for base in bases) + " | loss |")
    print("|---" * (len(bases) + 3) + "|")
    for name, (seconds, loss) in found.items():
        ratios = [median(a / b for a, b in zip(seconds, found[base][0], strict=True)) for base in bases]
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {name} | {median(seconds) * 1000:.0f} | {cells} | {loss:.4f} |")


def compare(which: str, shape: GPTConfig, rows: int, given: argparse.Namespace, bases: Sequence[str]) -> None:
    every = STEPS if which == "step" else HEADS
    names = [name for name in every if any(part in name for part in given.only)]
    answers = run_ranks(take_turns, RANKS, names, which, shape, rows, given.rounds, given.steps, timeout=1200)
    print(f"{shape.num_parameters / 1e6:.1f}M parameters, {rows} x {shape.context} tokens in all, {RANKS} ranks\n")
    table(answers[0], [base for base in bases if base in names])


# -- a large head


class Head(nn.Module):
    """The head of :data:`HEAD` by itself."""

    tensor_plan: Mapping[str, str] = {"words": "vocabulary"}

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        from shardfold.parallel.module_group import group_of

        self.words, self.vocab = Linear(shape.d_model, shape.vocab), shape.vocab
        self.ranks = group_of(self.words, "tensor")

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return sf.nn.parallel_cross_entropy(x, self.words.weight, targets, ranks=self.ranks, classes=self.vocab)


def head_bytes(shape: GPTConfig, rows: int, tensor: int) -> tuple[int, int]:
    """Of one rank: the states at rest, and the most that operations made besides, in forward and backward."""
    options: dict[str, Any] = {"parallel": sf.Parallel(mesh={"tensor": tensor}, tensor="auto")} if tensor > 1 else {}
    engine = sf.Engine(Head(shape), optimizer=ADAMW, layout="ddp", **options)
    tokens, targets = (each.chunk(engine.data_ranks)[engine.data_rank] for each in batch(shape, rows))
    x = torch.randn(*tokens.shape, shape.d_model, requires_grad=True)
    for _ in range(2):  # states are made in the first
        with HeldBytes([x, tokens, targets, *engine.module.parameters()]) as made:
            engine.backward(engine(x, targets))
        engine.step()
    held = engine.memory().held
    engine.close()
    return held, made.live


def head(given: argparse.Namespace) -> None:
    backbone = HEAD.num_parameters - HEAD.vocab * HEAD.d_model
    print(
        f"head: {HEAD.vocab} x {HEAD.d_model}, {HEAD.vocab * HEAD.d_model / backbone:.2f} of the backbone's parameters"
    )
    print("| | states | besides, at most | in all |\n|---|---|---|---|")
    sums: list[int] = []
    for tensor, name in ((1, "ddp"), (RANKS, "tensor=2")):
        held, besides = run_ranks(head_bytes, RANKS, HEAD, given.rows or 2, tensor, timeout=600)[0]
        sums.append(held + besides)
        print(f"| {name} | {human(held)} | {human(besides)} | {human(held + besides)} |")
    print(f"\n{sums[1] / sums[0]:.1%} of the memory\n", flush=True)
    compare("head", HEAD, given.rows or 2, given, ("tensor=2",))


HEAD = GPTConfig(vocab=131_072, d_model=384, layers=14, heads=6, context=128, tied=True)


# -- the wire

SPACES = ("sf-axes-0", "sf-axes-1")
WIRED: dict[str, dict[str, Any]] = {
    "ddp": {},
    "tensor=2": {"parallel": sf.Parallel(mesh={"tensor": RANKS}, tensor="auto")},
    "sequence=2, ulysses": {"parallel": sf.Parallel(mesh={"sequence": RANKS}, attention="ulysses")},
    "sequence=2, ring": {"parallel": sf.Parallel(mesh={"sequence": RANKS}, attention="ring")},
}
WIRE = GPTConfig(vocab=256, d_model=512, layers=4, heads=8, context=512)


def on_the_wire(rank: int, store: str) -> None:
    """One rank in its namespace; prints what it sent in a step, by the kernel's count and by ours."""
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    rows: list[dict[str, Any]] = []
    for name, options in WIRED.items():
        engine = sf.Engine(model(WIRE), optimizer=ADAMW, **{"layout": "ddp", **options})
        tokens, targets = (each.chunk(engine.data_ranks)[engine.data_rank] for each in batch(WIRE, 2))
        for _ in range(3):
            given = {"tokens": tokens, "targets": targets}
            if engine.sequence is not None:
                given = sf.sequence_shard(given, engine=engine)
            dist.barrier()
            before = int(counter.read_text())
            engine.backward(engine(**given))
            engine.step()
            dist.barrier()
            sent = int(counter.read_text()) - before
        said = {f"{row.purpose} {row.op} {'+'.join(row.axes)}": row.sent for row in engine.traffic().rows}
        rows.append({"name": name, "wire": sent, "rows": said})
        engine.close()
    dist.destroy_process_group()
    print(json.dumps(rows))


def wire() -> None:
    commands = [
        f"netns add {SPACES[0]}", f"netns add {SPACES[1]}",
        f"link add name eth0 netns {SPACES[0]} type veth peer name eth0 netns {SPACES[1]}",
        *(word for number, space in enumerate(SPACES, 1) for word in (
            f"-n {space} addr add 10.99.8.{number}/24 dev eth0", f"-n {space} link set eth0 up",
            f"-n {space} link set lo up",
        )),
    ]  # fmt: skip
    try:
        for command in commands:
            made = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
            if made.returncode:
                print(f"No network namespaces can be made here, which needs root: {made.stderr.strip()}: skipped.")
                return
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "SHARDFOLD_NEAR": "0"}
            words = [sys.executable, __file__, "wire", "--store", f"{folder}/store", "--rank"]
            ranks = [
                subprocess.Popen(
                    ["ip", "netns", "exec", space, *words, str(rank)],
                    stdout=subprocess.PIPE,
                    env=environment,
                    text=True,
                )
                for rank, space in enumerate(SPACES)
            ]
            answers = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
    print("| | counted by the engine | tx_bytes of the kernel | more | of which |\n|---|---|---|---|---|")
    for found in json.loads(answers[0].splitlines()[-1]):
        said = sum(found["rows"].values())
        parts = ", ".join(f"{what} {human(sent)}" for what, sent in found["rows"].items() if sent)
        print(f"| {found['name']} | {said:,} | {found['wire']:,} | {found['wire'] / said - 1:.2%} | {parts} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "head", "wire"])
    parser.add_argument("--params", type=float, default=46e6, help="of the GPT of `step`")
    parser.add_argument("--rows", type=int, help="sequences in all; 2 unless given")
    parser.add_argument("--context", type=int, default=128, help="tokens of a sequence of `step`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a round")
    parser.add_argument("--only", nargs="*", default=[""], help="contenders whose names contain one of these")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.what == "step":
        compare("step", gpt_shape(given.params, given.context), given.rows or 2, given, ("ddp", "torch-tensor"))
    elif given.what == "head":
        head(given)
    elif given.rank is not None:
        with suppress(KeyboardInterrupt):
            on_the_wire(given.rank, given.store)
    else:
        wire()


if __name__ == "__main__":
    main()
