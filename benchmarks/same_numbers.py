"""Whether two versions of the package train to the same numbers, bit for bit: for a change that is to change nothing.

    python benchmarks/same_numbers.py now.json                   losses and weights of every case, as digests
    python benchmarks/same_numbers.py now.json --against old.json

Twelve architectures of `transformers` (tests/support/zoo.py), small and with random weights, each under seven layouts
on two ranks: three steps of AdamW with clipping. Of each case the file has the losses of all ranks as hexadecimal
floats and a digest of all weights and buffers behind the last step. To see the numbers of another commit, run this file
with that commit's `src` and root first on PYTHONPATH. A case that a version cannot run has the error in place of its
numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardfold as sf
from shardfold.testing import Ranks
from tests.support import zoo

LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "zeropp", "offload")
MODELS = 12
STEPS = 3
RANKS = 2


def names() -> list[str]:
    """One architecture of each kind, then the next ones, until there are twelve."""
    kinds: dict[str, list[str]] = {}
    for name, entry in zoo.ZOO.items():
        kinds.setdefault(entry.kind, []).append(name)
    ordered = [group[i] for i in range(MODELS) for group in kinds.values() if i < len(group)]
    return ordered[:MODELS]


def digest(state: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        found.update(name.encode())
        if isinstance(value, torch.Tensor):
            found.update(str(value.dtype).encode() + value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trained(name: str, layout: str) -> dict[str, Any]:
    """Losses of this rank and the digest of what is behind the last step."""
    import torch.distributed as dist

    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = partial(torch.optim.AdamW, lr=zoo.ZOO[name].lr, weight_decay=0.1)
    engine = sf.Engine(zoo.build(name), optimizer=optimizer, layout=layout, clip_norm=1.0)
    losses = []
    try:
        for batch in zoo.batches(name, STEPS):
            part = {key: value.chunk(world)[rank] for key, value in batch.items()}
            loss = zoo.loss(name, engine(**part), part)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item().hex())
        return {"losses": losses, "weights": digest(engine.state_dict())}
    finally:
        engine.close()


def measured() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Ranks(RANKS, preload=["transformers"]) as ranks:
        for name in names():
            for layout in LAYOUTS:
                try:
                    found[f"{name} {layout}"] = ranks.run(trained, name, layout, world_size=RANKS)
                except Exception as error:
                    found[f"{name} {layout}"] = str(error).strip().splitlines()[-1][:200]
                print(f"{name} {layout}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    now = measured()
    given.out.write_text(json.dumps(now, indent=1), encoding="utf-8")
    errors = [case for case, value in now.items() if isinstance(value, str)]
    print(f"{len(now)} cases, {len(errors)} with an error: {', '.join(errors) or 'none'}")
    if given.against is not None:
        old = json.loads(given.against.read_text(encoding="utf-8"))
        other = sorted(case for case in now if now[case] != old.get(case))
        print(f"{len(now) - len(other)} equal to the bit, {len(other)} not: {', '.join(other) or 'none'}")


if __name__ == "__main__":
    main()
