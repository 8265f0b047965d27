"""Updates in host memory in three ways: in the step, begun before it (``speculate``), behind it (``delayed_update``).

    python benchmarks/update_overlap.py [ROUNDS]

One rank, ``zero2`` with ``offload="host"``, linear layers in bf16. In each round the three take turns. Printed are
medians and ranges of ``exposed``, milliseconds from the end of backward to the end of ``step()``, and of the step; and,
of two steps under the profiler, how much of the time in which updates ran lies in forward, backward and ``step()``.
Where host and device are one machine an update takes cores from what it runs beside, so that steps are not faster: what
is shown is where the update went.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import shardfold as sf
from shardfold.torch_internals import profiler_config

LAYERS, WIDTH, ROWS = 8, 1024, 512
WAYS: Mapping[str, sf.Overlap] = {
    "in the step": sf.Overlap(),
    "speculate": sf.Overlap(speculate="1GiB"),
    "delayed": sf.Overlap(delayed_update=True),
}
PHASES = ("forward", "backward", "step")


def make(overlap: sf.Overlap) -> sf.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return sf.Engine(
        model, optimizer=partial(torch.optim.AdamW, lr=1e-4), layout="zero2", offload="host", precision="bf16",
        init=sf.Init(units=[nn.Linear]), clip_norm=1e9, overlap=overlap,
    )  # fmt: skip


def step(engine: sf.Engine, x: Tensor) -> tuple[float, float]:
    """Seconds of a step, and of it behind backward."""
    begin = perf_counter()
    with record_function("forward"):
        loss = engine(x).float().square().mean()
    with record_function("backward"):
        engine.backward(loss)
    middle = perf_counter()
    with record_function("step"):
        engine.step()
    end = perf_counter()
    return end - begin, end - middle


def traced(engine: sf.Engine, x: Tensor) -> dict[str, float]:
    """Of two steps, the share of the time of the fused update's kernels that lies in each phase of the main thread."""
    with profile(
        activities=[ProfilerActivity.CPU], experimental_config=profiler_config(profile_all_threads=True)
    ) as profiler:
        for _ in range(2):
            step(engine, x)
    events = list(profiler.events() or ())
    kernels = [e.time_range for e in events if e.name.startswith("aten::_fused_adamw_")]
    phases = {name: [e.time_range for e in events if e.name == name] for name in PHASES}
    total = sum(k.end - k.start for k in kernels)
    return {
        name: sum(max(0.0, min(k.end, p.end) - max(k.start, p.start)) for k in kernels for p in spans) / total
        for name, spans in phases.items()
    }


def main(rounds: int) -> None:
    x = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)
    engines = {name: make(overlap) for name, overlap in WAYS.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for engine in engines.values():
        for _ in range(3):
            step(engine, x)
        with engine.gathered():
            pass
    for _ in range(rounds):
        for name, engine in engines.items():
            step(engine, x)  # what another one left in the caches
            found[name].append(step(engine, x))
            with engine.gathered():  # nothing of this one goes on while another one steps
                pass
    print(f"{'':<14}{'exposed, ms':>22}{'step, ms':>22}   update in {' / '.join(PHASES)}")
    for name, engine in engines.items():
        columns = []
        for which in (1, 0):
            times = sorted(1e3 * each[which] for each in found[name])
            columns.append(f"{median(times):8.1f} ({times[0]:.0f}-{times[-1]:.0f})")
        shares = " / ".join(f"{share:.0%}" for share in traced(engine, x).values())
        print(f"{name:<14}{columns[0]:>22}{columns[1]:>22}   {shares}")
        engine.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
