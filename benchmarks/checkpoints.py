"""Time and memory of saving and loading the same training state: Shardfold, torch.save, DCP (FSDP2), DeepSpeed.

python benchmarks/checkpoints.py                          # 40M parameters, 2 ranks, 3 rounds: a table
python benchmarks/checkpoints.py --params 10e6 --folder /mnt/disk --json out.json

AdamW in fp32: 12 bytes per parameter, split over the ranks (`torch.save`: each rank its shards as three flat tensors,
which is the least that it can do). `returns` is when the call is over, `on disk` when the files are synced too: only
Shardfold waits for that by itself. Before loading, the files leave the page cache. `extra` is the largest resident set
of a rank during the call above what it was before it. Rounds alternate; medians.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 1024


def build(params: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(max(2, round(params / WIDTH / (WIDTH + 1))))])


def one_step(model: Callable[[torch.Tensor], torch.Tensor], backward: Callable[[torch.Tensor], Any]) -> None:
    backward(model(torch.randn(4, WIDTH)).square().mean())


def sync(folder: Path) -> None:
    """Waits until all files of a folder are on the disk."""
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def forget(folder: Path) -> None:
    """Takes the files of a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Measured:
    """Seconds of a block, and how far the resident set of this process rose above where it began."""

    def __enter__(self) -> Measured:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        self._before = self._field("VmRSS")
        if dist.is_initialized():
            dist.barrier()
        self._begun = perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = perf_counter() - self._begun
        self.extra = self._field("VmHWM") - self._before

    @staticmethod
    def _field(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(folder: Path, save: Callable[[], Any], load: Callable[[], Any]) -> dict[str, float]:
    with Measured() as saving:
        save()
    sync(folder)
    on_disk = perf_counter() - saving._begun
    dist.barrier()
    forget(folder)
    with Measured() as loading:
        load()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "returns": saving.seconds, "on_disk": on_disk, "save_extra": saving.extra,
        "load": loading.seconds, "load_extra": loading.extra, "bytes": size,
    }  # fmt: skip


def shardfold(folder: Path, params: float, layout: str, wait: bool) -> dict[str, float]:
    import shardfold as sf

    engine = sf.Engine(build(params), optimizer=partial(torch.optim.AdamW, lr=1e-4), layout=layout)
    one_step(engine, engine.backward)
    engine.step()
    target = folder / "step-1"
    saving: list[Any] = []
    if not wait:  # the first one makes the memory of the copy
        saving.append(engine.save(target))
        saving.pop().wait()
    result = measure(
        folder, lambda: saving.append(engine.save(target, wait=wait)), lambda: (saving[0].wait(), engine.load(target))
    )
    if not wait:  # the load has waited, so it says nothing; what is on the disk is said by the save itself
        result |= {"on_disk": saving[0].report.seconds, "load": float("nan"), "load_extra": float("nan")}
    engine.close()
    return result


def torch_save(folder: Path, params: float) -> dict[str, float]:
    numel = sum(p.numel() for p in build(params).parameters()) // dist.get_world_size()
    state = {name: torch.randn(numel) for name in ("master", "exp_avg", "exp_avg_sq")}
    path = folder / f"rank-{dist.get_rank()}.pt"

    def load() -> None:
        for name, value in torch.load(path, mmap=False, weights_only=True).items():
            state[name].copy_(value)

    return measure(folder, lambda: torch.save(state, path), load)


def dcp(folder: Path, params: float) -> dict[str, float]:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    model = build(params)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    one_step(model, lambda loss: loss.backward())
    optimizer.step()
    optimizer.zero_grad()

    def save() -> None:
        weights, states = get_state_dict(model, optimizer)
        checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "step-1")

    def load() -> None:
        weights, states = get_state_dict(model, optimizer)
        checkpoint.load({"model": weights, "optimizer": states}, checkpoint_id=folder / "step-1")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

    return measure(folder, save, load)


def deepspeed(folder: Path, params: float) -> dict[str, float]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    model = build(params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    one_step(engine, engine.backward)
    engine.step()
    return measure(
        folder, lambda: engine.save_checkpoint(str(folder), tag="step-1"), lambda: engine.load_checkpoint(str(folder))
    )


CONTENDERS: dict[str, Callable[[Path, float], dict[str, float]]] = {
    "zero3, waiting": partial(shardfold, layout="zero3", wait=True),
    "zero3, in the background": partial(shardfold, layout="zero3", wait=False),
    "ddp, waiting": partial(shardfold, layout="ddp", wait=True),
    "torch.save of each rank's shards": torch_save,
    "FSDP2 + DCP": dcp,
    "DeepSpeed 2": deepspeed,
}


def on_rank(name: str, folder: str, params: float) -> dict[str, float]:
    return CONTENDERS[name](Path(folder), params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=40e6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from shardfold.testing import run_ranks

    names = [n for n in options.only if n != "DeepSpeed 2" or importlib.util.find_spec("deepspeed")]
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=options.folder))
            try:
                said = run_ranks(on_rank, options.ranks, name, str(folder), options.params, timeout=600)
                rows[name].append({key: max(rank[key] for rank in said) for key in said[0]})
            finally:
                shutil.rmtree(folder)
    print(f"{'':34}{'returns s':>10}{'on disk s':>10}{'load s':>8}{'MiB':>7}{'extra MiB, save':>17}{'load':>6}")
    for name, rounds in rows.items():
        row = {key: median(each[key] for each in rounds) for key in rounds[0]}
        print(
            f"{name:34}{row['returns']:10.2f}{row['on_disk']:10.2f}{row['load']:8.2f}{row['bytes'] / 2**20:7.0f}"
            f"{row['save_extra'] / 2**20:17.0f}{row['load_extra'] / 2**20:6.0f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
