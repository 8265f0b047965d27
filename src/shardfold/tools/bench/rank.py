"""A process that is one rank of one contender: ``python -m shardfold.tools.bench.rank NAME RANK``.

The first line of standard input are the settings; each line after it is an order, answered in one line of JSON. Between
orders it waits on its pipe and takes no time of the others; it ends with the pipe. What libraries print goes to
standard error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from time import perf_counter, process_time
from typing import Any

import torch

from shardfold import accelerator
from shardfold.errors import ShardfoldError
from shardfold.tools.bench import _sides as sides
from shardfold.tools.bench import contenders, jobs
from shardfold.tools.bench._process_memory import (
    clear_peak,
    disk_bytes,
    free_bytes,
    held_bytes,
    minor_faults,
    peak_bytes,
    resident_bytes,
)
from shardfold.tools.bench.settings import Settings
from shardfold.tools.bench.traces import profiled

__all__ = ["BenchRank", "main"]


class BenchRank:
    """The model under one contender, warmed up; what it does on order is a method.

    Memory is in bytes above what was resident before the model was built.
    """

    def __init__(self, name: str, number: int, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        contender = contenders.find(name)
        self._device = torch.device("cpu")
        if accelerator.has_streams(device := torch.device(settings.device)):
            self._device = torch.device(device.type, number % accelerator.count(device))
            accelerator.use(self._device)
        sides.prepare(contender, settings, self._device)
        batches = jobs.batches(settings, number)
        self._batches = [tuple(each.to(self._device) for each in batch) for batch in batches]
        gc.collect()
        clear_peak(self._device)
        self._before = resident_bytes(self._device)
        self._side = sides.build(contender, settings, jobs.build(settings, self._device), self._device)
        self._set_up_peak = peak_bytes(self._device)
        gc.collect()
        clear_peak(self._device)
        self._steps = 0
        self._first = self._step()[0]
        for _ in range(settings.warm - 1):
            self._step()

    def ready(self) -> dict[str, Any]:
        """What it says of itself when it is warm; ``needs`` is all it took at its peak, libraries included."""
        peaks = [each for each in (self._set_up_peak, peak_bytes(self._device)) if each is not None]
        optimizer = self._side.optimizer
        fused = getattr(optimizer, "defaults", {}).get("fused")
        return {
            "needs": max(peaks, default=0),
            "free": free_bytes(self._device),
            "first": self._first,
            "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}, fused={fused}",
            "master": str(self._side.master or self._updated()).removeprefix("torch."),
            "versions": {
                package: version
                for package in ("torch", "deepspeed")
                if (version := getattr(sys.modules.get(package), "__version__", None))
            },
        }

    def turn(self, steps: int) -> dict[str, Any]:
        """One step that is not timed, then ``steps`` that are, in seconds each."""
        losses = [self._step()[2]]
        seconds, compute = [], []
        faults, disk, cpu = minor_faults(), disk_bytes(), process_time()
        for _ in range(steps):
            whole, part, loss = self._step()
            seconds.append(whole)
            compute.append(part)
            losses.append(loss)
        faults, cpu = minor_faults() - faults, process_time() - cpu
        read, written = self._disk_since(disk, steps)
        program, moved = self._side.moved() if self._side.moved is not None else (None, None)
        return {
            "seconds": seconds,
            "free": free_bytes(self._device),
            "compute": compute,
            "losses": [loss.item() for loss in losses],
            "last_step": self._steps,
            "faults": faults / steps,
            "cpu": cpu / steps,
            "held": held_bytes(),
            "resident": self._above(resident_bytes(self._device)),
            "peak": self._above(peak_bytes(self._device)),
            "set_up_peak": self._above(self._set_up_peak),
            "handed": self._side.traffic() if self._side.traffic is not None else None,
            "program": program,
            "moved": moved,
            "read": read,
            "written": written,
        }

    def profile(self, steps: int) -> dict[str, Any]:
        """The events of the last of ``steps`` steps."""
        for _ in range(steps - 1):
            self._step()
        batch = self._batches[self._steps % len(self._batches)]
        self._steps += 1
        return profiled(lambda: self._side.compute(batch), self._update, self._device.type)

    def _step(self) -> tuple[float, float, torch.Tensor]:
        """Seconds of a step and of its forward and backward (on CUDA: of the host's part), and the loss."""
        batch = self._batches[self._steps % len(self._batches)]
        begin = perf_counter()
        loss = self._side.compute(batch)
        computed = perf_counter()
        self._update()
        end = perf_counter()
        self._steps += 1
        return end - begin, computed - begin, loss

    def _update(self) -> None:
        """The second half of a step, and what is still queued of both."""
        self._side.update()
        accelerator.synchronize(self._device)

    def _updated(self) -> torch.dtype:
        """The dtype of what the optimizer updates."""
        return self._side.optimizer.param_groups[0]["params"][0].dtype

    @staticmethod
    def _disk_since(before: tuple[int, int] | None, steps: int) -> tuple[float | None, float | None]:
        """Bytes read from drives and written to them, per step."""
        if before is None or (now := disk_bytes()) is None:
            return None, None
        return (now[0] - before[0]) / steps, (now[1] - before[1]) / steps

    def _above(self, number: int | None) -> int | None:
        return None if number is None or self._before is None else number - self._before


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        rank = BenchRank(sys.argv[1], int(sys.argv[2]), Settings(**json.loads(sys.stdin.readline())))
    except ShardfoldError as error:  # a refusal, which says all there is to say
        raise SystemExit(str(error)) from None
    print(json.dumps(rank.ready()), file=answers)
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        print(json.dumps(getattr(rank, order)(*arguments)), file=answers)
    # Nothing to save, and destructors of process groups may wait for ranks that are gone.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
