"""Generation with weights on disk, under a quarter of their bytes of memory and a drive of a known rate.

python benchmarks/streamed_generation.py                                  # a table
python benchmarks/streamed_generation.py --rate 100 --rows 1 8 --contenders disk disk-nf4 accelerate
python benchmarks/streamed_generation.py --least accelerate disk          # how little memory they run in
python benchmarks/streamed_generation.py --contenders disk accelerate=1.2 # that one in 1.2 times the weights

A random LLaMA of ``--layers`` blocks is written once into the folder. Each contender is a process in a control group
(v1 or v2) whose memory, page cache included, the kernel limits to ``--part`` of the weights' bytes, and whose reads it
slows to ``--rate`` MB a second: ``raw`` reads the file once, by direct I/O, for the rate that the drive then has;
``disk``, ``disk-int8`` and ``disk-nf4`` generate with weights on disk; ``disk-stays`` keeps in memory what fits;
``accelerate`` has the blocks on its "disk" by ``load_checkpoint_and_dispatch``, ``accelerate-offload`` everything by
``disk_offload``, whose files were written before by a process without a limit. ``NAME=PART`` gives a contender another
part of the weights' bytes than the others'. ``memory``, ``host`` and their kinds with few bits have neither limit; the
first says which tokens are expected. Of each: seconds of a forward behind the first two, tokens a second, the part of
the drive's rate, the most bytes of storages that live when a block or the head begins, whether tokens are those in
memory, and with ``--profile FILE`` of `shardfold doctor --measure` the seconds and the bytes that a plan says. Needs
root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from control_group import Group

MB, BLOCK = 10**6, 4 * 2**20
BITS = {"int8": 8, "nf4": 4}
PROMPT = 4
TITLES = (
    "contender",
    "rows",
    "seconds a forward",
    "planned",
    "tokens/s",
    "MB read",
    "of the rate",
    "MB held",
    "planned",
    "peak, MiB",
    "same",
)


def prompts(rows: int) -> list[list[int]]:
    return [[*range(1, PROMPT), PROMPT + row] for row in range(rows)]


def write(folder: Path, layers: int) -> Path:
    """The model's folder, made if it is not there."""
    model = folder / f"llama-{layers}"
    if not (model / "config.json").is_file():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
        config = LlamaConfig(vocab_size=2048, num_hidden_layers=layers, max_position_embeddings=512, **sizes)
        LlamaForCausalLM(config).save_pretrained(model)
    return model


# -- in the group


def raw(model: Path) -> dict[str, Any]:
    """Bytes a second of one pass over the file."""
    import mmap

    file = os.open(model / "model.safetensors", os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    block, total, begun = mmap.mmap(-1, BLOCK), 0, perf_counter()
    while total < 512 * MB and (got := os.preadv(file, [block], total)) == BLOCK:
        total += got
    return {"rate": total / (perf_counter() - begun)}


def without_memory(model: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    import shardfold as sf

    with sf.meta_init():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).requires_grad_(False)


def table_of(name: str, stays: float) -> Any:
    """Of a contender; that part of the weights stays in memory."""
    from shardfold.tools.answering.open_config import table_of_weights

    tier, _, kind = name.partition("-")
    return table_of_weights("ddp", BITS.get(kind), tier, 1 - stays)


def planned(
    name: str, model: Path, rows: int, tokens: int, stays: int, profile: str, rate: float
) -> tuple[float, float]:
    """Seconds of a forward, and bytes in memory, as `shardfold plan --inference` has them."""
    from dataclasses import replace

    import torch

    from shardfold.planner.hardware import read_device
    from shardfold.planner.inference import generating
    from shardfold.planner.setting import Subject

    hollow, length = without_memory(model), PROMPT + tokens
    held = sum(p.numel() * 4 for p in hollow.parameters())
    subject = Subject(hollow, {"input_ids": torch.empty((2, length), dtype=torch.int64, device="meta")})
    device, table = replace(read_device(Path(profile)), disk=rate), table_of(name, stays / held)
    found = generating(subject, table, "fp32", device, rows=rows, length=length, page=16)
    return found.seconds, found.memory


def ours(name: str, model: Path, rows: int, tokens: int, stays: int) -> dict[str, Any]:

    import shardfold as sf
    from shardfold.generation import Continuation, Generation, SamplingRule

    tempfile.tempdir = str(model.parent)
    hollow = without_memory(model)
    held = sum(p.numel() * 4 for p in hollow.parameters())
    engine = sf.Engine(hollow, layout=table_of(name, stays / held), init=sf.Init(weights=model))
    staged = staging_of(engine)
    running, rule = Generation(engine), SamplingRule(0.0, 1.0, 0, 0)
    texts = [Continuation(i, 0, list(p), len(p), tokens, rule, frozenset()) for i, p in enumerate(prompts(rows))]
    for text in texts:
        running.add(text)
    seconds: list[float] = []
    while running.busy:
        begun = perf_counter()
        running.step()
        seconds.append(perf_counter() - begun)
    moved = sum(row.moved for row in engine.traffic().evaluated if row.tier == "disk") / len(seconds)
    held = most_held(engine, running, Continuation(rows, 0, [1, 2], 2, 2, rule, frozenset())) - staged
    running.close()
    engine.close()
    return {
        "seconds": seconds[2:],
        "bytes": moved,
        "tokens": [text.tokens[text.start :] for text in texts],
        "held": held,
    }


def staging_of(engine: Any) -> int:
    """Bytes of the fixed buffers through which values go to a drive, before any is in use."""
    staged: dict[int, int] = {}
    for tier in engine.sharded.tiers._made.values():
        for part in (getattr(tier, "incoming", None), getattr(tier, "outgoing", None)):
            for each in part._spare[:1] if part is not None else ():
                storage = each.memory.untyped_storage()
                staged[storage.data_ptr()] = storage.nbytes()
    return sum(staged.values())


def most_held(engine: Any, running: Any, text: Any) -> int:
    """Bytes of all storages that live when a block or the head begins, of one more text."""
    from shardfold.tools.bench._process_memory import held_bytes

    found: list[int] = []
    places = [*engine.module.model.layers[::8], engine.module.lm_head]
    hooks = [each.register_forward_pre_hook(lambda *_: found.append(held_bytes())) for each in places]
    running.add(text)
    while running.busy:
        running.step()
    for hook in hooks:
        hook.remove()
    return max(found)


def accelerated(name: str, model: Path, rows: int, tokens: int) -> dict[str, Any]:
    import torch
    from accelerate import disk_offload, init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with init_empty_weights():
        made: Any = AutoModelForCausalLM.from_config(config)
    if name == "accelerate-offload":
        made = disk_offload(made, offload_folder(model), execution_device=torch.device("cpu"))
    else:
        places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        places |= {f"model.layers.{i}": "disk" for i in range(config.num_hidden_layers)}
        with tempfile.TemporaryDirectory(dir=model.parent) as offloaded:
            made = load_checkpoint_and_dispatch(made, model, device_map=places, offload_folder=offloaded)
            return told_by(made, rows, tokens)
    return told_by(made, rows, tokens)


def offload_folder(model: Path) -> Path:
    """Where the weights lie as accelerate's ``disk_offload`` reads them, written if they are not there."""
    folder = model.parent / f"{model.name}-offloaded"
    if not (folder / "index.json").is_file():
        from accelerate.utils import offload_state_dict
        from safetensors.torch import load_file

        offload_state_dict(folder, load_file(model / "model.safetensors"))
    return folder


def told_by(made: Any, rows: int, tokens: int) -> dict[str, Any]:
    """What transformers' own generation gives with a model that accelerate has hooked."""
    import torch

    seconds: list[float] = []
    forward = made.forward

    def timed(*given: Any, **named: Any) -> Any:
        begun = perf_counter()
        out = forward(*given, **named)
        seconds.append(perf_counter() - begun)
        return out

    made.forward = timed
    ids = torch.tensor(prompts(rows))
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        whole = made.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return {"seconds": seconds[2:], "bytes": 0, "tokens": whole[:, ids.shape[1] :].tolist()}


# -- around it


def stays_of(name: str, limit: int) -> int:
    """Bytes of weights that are kept in memory."""
    return limit // 4 if name == "disk-stays" else 0


def measured(name: str, given: argparse.Namespace, model: Path, rows: int) -> dict[str, Any]:
    """One contender in a group of its own."""
    size = (model / "model.safetensors").stat().st_size
    name, _, part = name.partition("=")
    limit = int(size * float(part or given.part))
    if name.startswith("accelerate"):
        forgotten(offload_folder(model) if name == "accelerate-offload" else model)
    words = [sys.executable, __file__, "--work", name, "--folder", given.folder, "--layers", str(given.layers)]
    words += ["--tokens", str(given.tokens), "--rows", str(rows), "--stays", str(stays_of(name, limit))]
    threads = {"OMP_NUM_THREADS": str(given.threads)}
    environment = {**os.environ, **threads}
    if not name.startswith(("disk", "accelerate", "raw")):
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment, check=False)
        return json.loads(done.stdout) if not done.returncode else {"ended": done.returncode}
    group = Group("stream", limit, given.rate * MB, given.folder)
    try:
        done = group.start(words, threads, stdout=subprocess.PIPE, text=True)
        told, _ = done.communicate()
        found = json.loads(told) if not done.returncode else {"ended": done.returncode}
        return {**found, "peak": group.peak()}
    finally:
        group.close()


def forgotten(folder: Path) -> None:
    """The page cache has nothing of a folder's files: what another process left there nobody would read again."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def least(name: str, given: argparse.Namespace, model: Path) -> float:
    """The smallest part of the weights' bytes, to a tenth of it, in which a contender generates at all."""
    low, high = 0.1, 2.5
    while high > low * 1.1:
        middle = (low * high) ** 0.5
        ended = measured(f"{name}={middle}", given, model, given.rows[0]).get("ended")
        print(f"{name} in {middle:.2f} of the weights: {'ended' if ended else 'runs'}", file=sys.stderr, flush=True)
        low, high = (middle, high) if ended else (low, middle)
    return high


def row(name: str, rows: int, found: dict[str, Any], rate: float, expected: Any, plan: tuple[str, str]) -> str:
    if "ended" in found:
        return f"| {name} | {rows} | ended by {-found['ended']}{' |' * (len(TITLES) - 2)}"
    seconds, moved = statistics.median(found["seconds"]), found["bytes"]
    of_rate = f"{moved / seconds / rate:.0%}" if moved else ""
    peak = f"{found['peak'] / 2**20:.0f}" if "peak" in found else ""
    same = "" if name.partition("-")[2] in BITS else "yes" if found["tokens"] == expected else "no"
    held = f"{found['held'] / MB:.1f}" if "held" in found else ""
    told = (name, rows, f"{seconds:.3f}", plan[0], f"{rows / seconds:.2f}", f"{moved / MB:.0f}", of_rate, held, plan[1])
    told += peak, same
    return f"| {' | '.join(map(str, told))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on a drive with room for the weights twice")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--part", type=float, default=0.25)
    parser.add_argument("--rate", type=int, default=200, help="MB a second; 0: the drive's own")
    parser.add_argument("--rows", type=int, nargs="+", default=[8])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument(
        "--contenders", nargs="+", default=["disk", "disk-stays", "disk-int8", "disk-nf4", "accelerate"]
    )
    parser.add_argument("--threads", type=int, default=1, help="a profile is of as many as there are cores")
    parser.add_argument("--least", nargs="+", default=[], help="contenders, of which only that is found out")
    parser.add_argument("--profile", default="", help="a file of `shardfold doctor --measure`, by which to plan")
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    parser.add_argument("--stays", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = Path(given.folder)
    model = folder / f"llama-{given.layers}"
    if given.work == "raw":
        print(json.dumps(raw(model)))
    elif given.work.startswith("accelerate"):
        print(json.dumps(accelerated(given.work, model, given.rows[0], given.tokens)))
    elif given.work:
        print(json.dumps(ours(given.work, model, given.rows[0], given.tokens, given.stays)))
    elif os.geteuid():
        print("streamed_generation: control groups are root's to make: run it as root.")
    elif given.least:
        for name in given.least:
            print(f"{name}: {least(name, given, write(folder, given.layers)):.2f} of the weights' bytes")
    else:
        table(given, write(folder, given.layers))


def table(given: argparse.Namespace, model: Path) -> None:
    rate = measured("raw", given, model, 1)["rate"]
    size = (model / "model.safetensors").stat().st_size
    print(f"weights {size / MB:.0f} MB, memory {size * given.part / 2**20:.0f} MiB", end=", ")
    print(f"the drive reads {rate / MB:.0f} MB/s\n")
    print(f"| {' | '.join(TITLES)} |\n{'|---' * len(TITLES)}|")
    for rows in given.rows:
        first = measured("memory", given, model, rows)
        for name in given.contenders:
            plan = "", ""
            if given.profile and not name.startswith("accelerate"):
                stays = stays_of(name, int(size * given.part))
                seconds, held = planned(name, model, rows, given.tokens, stays, given.profile, rate)
                plan = f"{seconds:.3f}", f"{held / MB:.1f}"
            found = first if name == "memory" else measured(name, given, model, rows)
            print(row(name, rows, found, rate, first["tokens"], plan), flush=True)


if __name__ == "__main__":
    main()
