"""What this machine can do: rates of products by dtype, of copies, of collectives by size, of the disk.

The result is a profile that ``shardfold plan --gpus 2xFILE.json`` reads. Times are medians; two processes that this one
starts measure, over Gloo (NCCL where there are two CUDA devices). On CPUs all of them compute at once, each with its
share of the cores, as ranks of a step do: what one core reaches alone it does not reach beside others. The link is
measured over the transport that engines have there.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardfold import accelerator
from shardfold.comm.backend import device_backend
from shardfold.comm.links import measured
from shardfold.comm.runtime import Runtime
from shardfold.engine.engine import Engine
from shardfold.errors import ShardfoldError
from shardfold.plan.auto_wire import LOSSY
from shardfold.plan.formats import format_named
from shardfold.plan.program import COLLECTIVES
from shardfold.plan.rewrites import Overlap
from shardfold.planner.hardware import Device, Interconnect
from shardfold.planner.memory import plan_memory
from shardfold.planner.seconds import MEETS, Work, plan_seconds
from shardfold.planner.setting import Subject
from shardfold.planner.tracing import loss_of
from shardfold.tiers.limit import memory_limit
from shardfold.tools.answering.open_config import BASES
from shardfold.tools.doctor._forward_rates import forward_rates, kept_rate
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from shardfold.torch_internals import scaled_mm

__all__ = ["MeasuredMachine", "measure"]

SIZE, ON_CPU = 2048, (128, 384)  # of the matrices: CPUs may have no instructions for a dtype
ROWS, TOKENS, HEADS, PER_HEAD = 8, 128, 4, 32  # of attention, and of a model of two blocks
COPIED = 2**27  # bytes
SENT = (2**12, 2**18, 2**22, 2**24)  # bytes of a collective
ROUNDS = 7
LEAST = 0.5  # seconds of what is short
RANKS = 2
UPDATED, UPDATE_BYTES = (64, 3072), 2 * 3 * 4 + 4  # sides of what is updated; master and moments read and written
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VERBS = ("all_gather", "reduce_scatter", "all_reduce")


class MeasuredMachine(NamedTuple):
    """The profile, and seconds of each collective by bytes of its whole tensor."""

    device: Device
    collectives: dict[str, dict[int, float]]


def measure(folder: Path, say: Callable[[str], None] = lambda what: None) -> MeasuredMachine:
    """Takes about two minutes; files of the disk's part are in ``folder``, and ``say`` is told what is measured next.

    Raises:
        ShardfoldError: the processes that measure could not be started, or failed.
    """
    device = accelerator.found() or torch.device("cpu")
    say("two processes together")
    ranks = _ranks(device)
    found = {verb: {int(size): t for size, t in row.items()} for verb, row in ranks["collectives"].items()}
    say("products and copies")
    computes = ranks["computes"] or computed(device)
    memory = accelerator.total_memory(device) or (memory_limit() or 0) / RANKS
    update = ranks["update"]
    if accelerator.has_streams(device):  # its host has these cores for each of its devices
        update *= RANKS / max(accelerator.count(device), 1)
    link = Interconnect(*ranks["link"]) if ranks["link"] else _link(found)
    forwards: dict[str, list[list[float]]] = {}
    kept = 0.0
    if device.type == "cpu":
        say("texts")
        forwards, kept = forward_rates(), kept_rate()
    say("disk")
    writes, reads = _disk(folder)
    profile = Device(
        name=f"{os.uname().nodename}-{device.type}",
        memory=memory,
        near=link,
        far=link,
        disk=writes,
        reads=reads,
        forwards=forwards,
        kept=kept,
        cut_forwards=ranks["cut_forwards"],
        cut_kept=ranks["cut_kept"],
        reached=1.0,
        reserve=0.0 if device.type == "cpu" else Device.reserve,
        source="measured by shardfold doctor --measure",
        streams=accelerator.has_streams(device),
        codecs=ranks["codecs"],
        update=ranks["update"]
        * RANKS
        / max(accelerator.count(device), 1 if accelerator.has_streams(device) else RANKS),
        **ranks["host"],
        **computes,
    )
    return MeasuredMachine(profile, found)


def computed(device: torch.device) -> dict[str, Any]:
    """Fields of a profile that say how fast a device computes."""
    bandwidth = _bandwidth(device)
    found: dict[str, Any] = {"bandwidth": bandwidth, "launch": 0.0, "flops": {}, "attention": {}}
    if accelerator.has_streams(device):
        found["flops"] = {name: 2 * SIZE**3 / _product(device, dtype, SIZE) for name, dtype in DTYPES.items()}
        if accelerator.multiplies_fp8(device):
            found["flops"]["fp8"] = 2 * SIZE**3 / _fp8_product(device, SIZE)
    else:
        small, large = ON_CPU
        found |= {"call": {}, "host": bandwidth}
        for name, dtype in DTYPES.items():
            less, more = (_product(device, dtype, size) for size in ON_CPU)
            rate = 2 * (large**3 - small**3) / max(more - less, more / 2)
            found["flops"][name] = rate
            found["call"][name] = max(0.0, less - 2 * small**3 / rate)
    for name, dtype in DTYPES.items():
        found["attention"][name] = _attention(device, dtype)
    found["launch"] = _launch(device, found)
    if not accelerator.has_streams(device):
        found["others"] = _others(found)
    return found


def _others(found: Mapping[str, Any]) -> float:
    """Bytes per second of operations that are no products: what is left of a forward and backward of a small model when
    its products, as they were measured by themselves, are taken off. In a step tensors are new, strided and in no
    cache, which no operation is that runs in a loop."""
    model = GPT(GPTConfig(d_model=HEADS * PER_HEAD, layers=2, heads=HEADS, context=TOKENS))
    batch = torch.zeros(ROWS, TOKENS, dtype=torch.int64), torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    trace = Subject(model, batch).trace("fp32", samples=ROWS, exact=True)
    took = _seconds(lambda: loss_of(model, batch).backward(), torch.device("cpu"), 2 * LEAST)
    device = Device(name="", memory=0.0, reached=1.0, streams=False, **{**found, "others": float("inf")})
    left = took - float(Work(device, trace).until[-1][0])
    return float(trace.works.other_bytes.sum()) / max(left, took / 20)


def _seconds(function: Callable[[], Any], device: torch.device, least: float = 0.0) -> float:
    """The median of some runs, and of as many more as ``least`` seconds take; ranks that wait for each other run alike
    often."""
    function()
    times: list[float] = []
    while len(times) < ROUNDS or sum(times) < least:
        began = _now(device)
        function()
        times.append(_now(device) - began)
    return statistics.median(times)


def _now(device: torch.device) -> float:
    """The time behind all that was asked of the device."""
    accelerator.synchronize(device)
    return time.perf_counter()


def _product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    return _seconds(lambda: a @ b, device, LEAST)


def _fp8_product(device: torch.device, size: int) -> float:
    codes, scale = torch.ones(size, size, device=device).to(torch.float8_e4m3fn), torch.ones((), device=device)
    return _seconds(lambda: scaled_mm(codes, codes.t(), scale, scale, out_dtype=torch.bfloat16), device, LEAST)


def _attention(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of attention's forward and backward."""
    shape = ROWS, HEADS, TOKENS, PER_HEAD
    q, k, v = (torch.ones(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.ones(shape, device=device, dtype=dtype)

    def both() -> None:
        torch.autograd.grad(functional.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

    return 2 * (2 + 5) * q.numel() * TOKENS / _seconds(both, device, LEAST)


def _bandwidth(device: torch.device) -> float:
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / _seconds(lambda: target.copy_(source), device)  # read and written


def _launch(device: torch.device, found: Mapping[str, Any]) -> float:
    """Seconds of an operation that has next to nothing to compute, in a forward and backward as models have them: with
    what modules and autograd do around it. ``found``: what products take."""
    model = GPT(GPTConfig(d_model=16, layers=2, heads=2, context=8))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    trace = Subject(model, (tokens, tokens)).trace("fp32", samples=1, exact=True)
    here = model.to(device), (tokens.to(device), tokens.to(device))
    took = _seconds(lambda: loss_of(*here).backward(), device, LEAST)
    alone = Device(name="", memory=0.0, reached=1.0, streams=False, **{**found, "others": float("inf")})
    return max(took - float(Work(alone, trace).until[-1][0]), took / 2) / float(trace.works.calls.sum())


def _disk(folder: Path) -> tuple[float, float]:
    """Bytes per second of a write that has reached the disk, and of a read past the page cache; 0: there is none."""
    block, times = os.urandom(2**24), 8
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(times):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        writes = times * len(block) / (time.perf_counter() - began)
        try:
            direct = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        except (OSError, AttributeError):  # of a file system, or a system, that has no such reads
            return writes, 0.0
        try:
            with mmap(-1, len(block)) as into:
                began = time.perf_counter()
                for place in range(times):
                    os.preadv(direct, [into], place * len(block))
                return writes, times * len(block) / (time.perf_counter() - began)
        finally:
            os.close(direct)


def _link(found: dict[str, dict[int, float]]) -> Interconnect:
    """Latency and rate from the smallest and the largest all-gather: each rank sends half of it to the other."""
    gathers = found["all_gather"]
    small, large = min(gathers), max(gathers)
    rate = (large - small) * (RANKS - 1) / RANKS / max(gathers[large] - gathers[small], 1e-9)
    return Interconnect(rate, gathers[small])


def _ranks(device: torch.device) -> dict[str, Any]:
    """What processes measure together: see :func:`rank`."""
    environment = dict(os.environ)
    if device.type == "cpu":
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // RANKS))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, folder]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), device.type],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(RANKS)
        ]
        said = [rank.communicate() for rank in ranks]
        for number, rank in enumerate(ranks):
            if rank.returncode:
                last = (said[number][1].strip().splitlines() or ["without a word"])[-1]
                raise ShardfoldError(f"rank {number} of {RANKS} that measured collectives ended with {last!r}.")
    return json.loads(said[0][0].splitlines()[-1])


def rank(folder: str, number: int, kind: str) -> None:
    """One of the processes: rank 0 prints seconds by collective and bytes; on CPUs or devices of their own what each
    computes while the others do, too, and what the transport and formats take."""
    here = torch.device(kind)
    two = accelerator.count(here) >= RANKS and accelerator.has_streams(here)
    device = torch.device(kind, number) if two else torch.device("cpu")
    if two:
        accelerator.use(device)
    where = f"file://{os.path.join(folder, 'store')}"
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    dist.init_process_group(device_backend(device), init_method=where, rank=number, world_size=RANKS)
    collectives: dict[str, dict[int, float]] = {verb: {} for verb in VERBS}
    for size in SENT:
        full = torch.zeros(size // 4, device=device)
        part = full.chunk(RANKS)[number].clone()
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": lambda full=full, part=part: dist.all_gather_into_tensor(full, part),
            "reduce_scatter": lambda full=full, part=part: dist.reduce_scatter_tensor(part, full),
            "all_reduce": lambda full=full: dist.all_reduce(full),
        }
        for verb, call in calls.items():
            collectives[verb][size] = _seconds(call, device)
    found: dict[str, Any] = {"collectives": collectives, "computes": None, "link": None, "codecs": {}, "host": {}}
    found["cut_forwards"], found["cut_kept"] = (
        (forward_rates(RANKS), kept_rate(RANKS)) if here.type == "cpu" else ({}, 0.0)
    )
    found["update"] = _updating()
    if two or not accelerator.has_streams(here):
        dist.barrier()
        found["computes"] = computed(device)
        found |= _transport()
    if number == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def _transport() -> dict[str, Any]:
    """Bytes per second and seconds of a collective over an engine's transport, what formats take, and what operations
    of a program take the host."""
    engine = Engine(nn.Linear(8, 8), optimizer=partial(torch.optim.AdamW, lr=0.0), layout="zero3")
    comm, axes = engine.sharded.comm, ("intra",)
    verbs = ("ALL_GATHER", "REDUCE_SCATTER")
    formats = [*(format_named(name, "a wire") for name in LOSSY), *BASES.values()]
    found = measured(comm, [(verb, axes) for verb in verbs], formats)
    links = [found.links[verb, axes] for verb in verbs]
    rate, latency = len(links) / sum(1 / link.rate for link in links), statistics.mean(link.latency for link in links)
    engine.close()
    codecs = {name: list(codec) for name, codec in found.codecs.items()}
    return {"link": [rate, latency], "codecs": codecs, "host": _hosting(Interconnect(rate, latency))}


def _updating() -> float:
    """Bytes of states and gradients per second that AdamW goes through in host memory, while the other ranks do: by a
    large and a small step, whose gradients are there already."""
    adam = partial(torch.optim.AdamW, lr=0.0)
    took: list[float] = []
    for side in UPDATED:
        engine = Engine(nn.Linear(side, side, bias=False), optimizer=adam, layout="ddp", runtime=Runtime(device="cpu"))
        took.append(_stepping(engine, torch.ones(1, side)))
        engine.close()
    small, large = UPDATED
    return UPDATE_BYTES * (large**2 - small**2) / max(took[1] - took[0], took[1] / 2)


def _stepping(engine: Engine, x: torch.Tensor) -> float:
    """Seconds of the second half of a step, the median of a few."""
    times: list[float] = []
    for _ in range(ROUNDS + 1):  # in the first one states are made
        engine.backward(engine(x).sum())
        dist.barrier()
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


FEW_LAYERS, MANY_LAYERS = 2, 6
ALONE = Overlap(bucket=None)  # each layer is a unit
FEW_TOKENS = 4, 32


def _small(layers: int) -> GPT:
    """One that computes for about as long as an engine does something else beside it."""
    return GPT(GPTConfig(d_model=64, layers=layers, heads=2, context=FEW_TOKENS[1]))


def _hosting(link: Interconnect) -> dict[str, float]:
    """Seconds of an operation, of what a collective takes besides ``link``, and of a meeting: those with which steps of
    few and of many units, in layouts that send little and much, take as long as they were seen to take."""
    adam, sizes = partial(torch.optim.AdamW, lr=0.0), (FEW_LAYERS, MANY_LAYERS)
    cases = [(size, layout) for size in sizes for layout in ("ddp", "zero1", "zero3", "offload")]
    engines = [Engine(_small(size), optimizer=adam, layout=layout, overlap=ALONE) for size, layout in cases]
    device = engines[0].sharded.comm.mesh.device
    tokens = torch.zeros(FEW_TOKENS, dtype=torch.int64, device=device)
    runs = [*engines, *(_small(size).to(device) for size in sizes)]
    turns: list[list[float]] = [[] for _ in runs]
    for _ in range(3 * ROUNDS):  # one behind the other: what the machine does besides meets all of them
        for turn, one in zip(turns, runs, strict=True):
            turn.append(_few_steps(one, tokens))
    took = [statistics.median(turn) for turn in turns]
    counts, left = list[list[int]](), list[float]()
    for (size, layout), engine, whole in zip(cases, engines, took, strict=False):
        ops = [op for section in ("forward", "last", "step") for op in engine.program.section(section)]
        counts.append([len(ops), sum(op.verb in COLLECTIVES for op in ops), sum(op.verb in MEETS for op in ops)])
        left.append(whole - took[len(cases) + sizes.index(size)] - _sent(_small(size), layout, link))
        engine.close()
    return dict(zip(("operation", "collective", "meeting"), at_least_zero(counts, left), strict=True))


def _sent(model: GPT, layout: str, link: Interconnect) -> float:
    """Seconds of what a step sends."""
    tokens = torch.zeros(FEW_TOKENS, dtype=torch.int64)
    subject = Subject(model, (tokens, tokens))
    trace = subject.trace("fp32", exact=True)
    setting = subject.setting(trace, layout=layout, mesh={"intra": RANKS}, overlap=ALONE)
    free = float("inf")
    device = Device(
        name="", memory=free, flops={"fp32": free}, bandwidth=free, near=link, host=free, launch=0.0, streams=False
    )
    return plan_seconds(setting, plan_memory(setting, trace), device).step


def _few_steps(one: Engine | GPT, tokens: torch.Tensor, steps: int = 3) -> float:
    """Seconds of a step of an engine, or of what its model computes in one."""
    dist.barrier()
    began = _now(tokens.device)
    for _ in range(steps):
        loss = one(tokens, tokens)
        if isinstance(one, Engine):
            one.backward(loss)
            one.step()
        else:
            loss.backward()
    return (_now(tokens.device) - began) / steps


def at_least_zero(counts: Sequence[Sequence[float]], sums: Sequence[float]) -> list[float]:
    """What each of some things takes by least squares, nothing less than 0.

    Args:
        counts: of each thing in each sum.
        sums: what they take together.
    """
    table, right = np.array(counts, dtype=float), np.array(sums)
    best, least = np.zeros(table.shape[1]), float("inf")
    for many in range(table.shape[1] + 1):
        for which in itertools.combinations(range(table.shape[1]), many):
            found = np.zeros(table.shape[1])
            found[list(which)] = np.linalg.lstsq(table[:, which], right, rcond=None)[0] if which else []
            error = float(((table @ found - right) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = found, error
    return [float(one) for one in best]


if __name__ == "__main__":
    rank(sys.argv[1], int(sys.argv[2]), sys.argv[3])
