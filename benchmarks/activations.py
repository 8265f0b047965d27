"""Bytes and time of a step under each mode of ``activations=``, beside formulas and beside PyTorch's own ways.

    python benchmarks/activations.py                               # the table of docs/activations.md
    python benchmarks/activations.py --picture activations.png     # bytes over the time of one step

A GPT on one rank and one thread. Bytes are those of all tensors made since forward began, looked at after every
operation, with those of what is back from outside and without copies outside. Times are CPU times of whole steps,
taken in turn, so that what else runs on the machine meets all of them.

PyTorch's own ways, by hand on the plain model: ``checkpoint`` around each block, with
``create_selective_checkpoint_contexts`` for the same operations as ``select``, and ``save_on_cpu(pin_memory=True)``,
which copies on a CPU too, around forward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardfold as sf
from shardfold.activations.modes import KEPT, MODES
from shardfold.tools.recipes.gpt import GPT
from shardfold.tools.recipes.train_config import GPTConfig

ROUNDS = 3
ROWS = 4
CONFIG = GPTConfig(vocab=256, d_model=256, layers=6, heads=4, context=256)
MIB = 2**20
INK, MUTED, GRID = "#22252b", "#6b7480", "#e7e9ec"
KEEP, CHANGED = "#b8bfc7", "#2166ac"

# -- what is made in a step


class Live(TorchDispatchMode):
    """Bytes of live storages that operations made, after each of them.

    Args:
        back: bytes that are back from outside, in backward.

    Attributes:
        samples: CPU time since the beginning in seconds, and bytes.
        backward: the number of samples when backward began.
        outside: bytes that rested outside then.
    """

    def __init__(self, back: Callable[[], int]) -> None:
        super().__init__()
        self._back = back
        self._known: dict[int, tuple[int, int]] = {}  # storage -> (weak reference, bytes)
        self._began = time.process_time()
        self.samples: list[tuple[float, int]] = []
        self.backward = self.outside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in given:
                    self._known[storage._cdata] = (storage._weak_ref(), storage.nbytes())
        self.sample()
        return out

    def sample(self) -> None:
        for key, (weak, _) in list(self._known.items()):
            if torch.UntypedStorage._expired(weak):
                torch.UntypedStorage._free_weak_ref(weak)
                del self._known[key]
        now = sum(size for _, size in self._known.values()) + (self._back() if self.backward else 0)
        self.samples.append((time.process_time() - self._began, now))

    def begin_backward(self, outside: int) -> None:
        self.sample()
        self.outside = outside
        self.backward = len(self.samples)

    @property
    def between(self) -> int:
        """Bytes between forward and backward."""
        return self.samples[self.backward - 1][1]

    @property
    def peak(self) -> int:
        return max(size for _, size in self.samples)


class Ours:
    """One mode of an engine; with ``accumulate=2`` a second micro-batch finds gradients where it adds its own."""

    def __init__(self, mode: str, accumulate: int = 1) -> None:
        adamw = partial(torch.optim.AdamW, lr=1e-4)
        self.engine = sf.Engine(GPT(CONFIG), optimizer=adamw, layout="ddp", activations=mode, accumulate=accumulate)

    def outside(self) -> int:
        """Bytes that rest there now."""
        return sum(row.outside for row in self.engine.memory().activations)

    def back(self) -> int:
        return self.engine._replaced._movers.tally.device

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.engine(tokens, targets)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()

    def close(self) -> None:
        self.engine.close()


class Theirs:
    """The plain model, changed by hand."""

    def __init__(self, way: str, accumulate: int = 1) -> None:
        self.accumulate, self._micro = accumulate, 0
        self.model = GPT(CONFIG)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.way, self.copied = way, 0
        contexts: dict[str, Any] = {}
        if way == "selective checkpoint":
            contexts["context_fn"] = partial(create_selective_checkpoint_contexts, list(KEPT))
        for block in self.model.blocks if "checkpoint" in way else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **contexts)

    def outside(self) -> int:
        return self.copied

    def back(self) -> int:
        return 0

    def _hooks(self) -> AbstractContextManager[Any]:
        return save_on_cpu(pin_memory=True) if self.way == "save_on_cpu" else nullcontext()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self._hooks():
            return self.model(tokens, targets)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self._micro += 1
        if self._micro % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        """Nothing is held outside of Python."""


WAYS = {
    "plain PyTorch": "keep",
    "checkpoint": "recompute",
    "selective checkpoint": "select",
    "save_on_cpu": "host",
}


class OnDevice(Theirs):
    """``save_on_cpu`` with what it copies apart, and with what comes back in memory of its own, as on a GPU."""

    def _hooks(self) -> AbstractContextManager[Any]:
        self.copied = 0
        hooks = save_on_cpu(pin_memory=True)

        def pack(tensor: Tensor) -> Any:
            with _disable_current_modes():
                self.copied += tensor.nbytes
                return hooks.pack_hook(tensor)  # type: ignore[attr-defined]

        return saved_tensors_hooks(pack, lambda packed: packed[1].clone())


def step(job: Ours | Theirs, batch: tuple[Tensor, Tensor]) -> float:
    """Seconds of CPU time."""
    before = time.process_time()
    job.backward(job.forward(*batch))
    job.update()
    return time.process_time() - before


def watched(job: Ours | Theirs, batch: tuple[Tensor, Tensor]) -> Live:
    """The second micro-batch of a step: gradients rest, as parameters do."""
    step(job, batch)
    with Live(job.back) as live:
        loss = job.forward(*batch)
        live.begin_backward(job.outside())
        job.backward(loss)
        del loss
        live.sample()
    return live


# -- the table


def formulas() -> dict[str, tuple[str, float, str, float]]:
    """By mode: bytes of a block between forward and backward as a multiple of s b h elements, and what comes on top of
    all blocks' at most; as text and in MiB.

    A block saves, in multiples of s b h: 3 for each of two norms (input, normalized, scaled), 5 of the projection of
    queries, keys and values and their rotation, 2 of what attention gives, and 2 f + 2 f of the gated feed-forward
    layer of width f h.
    """
    f = CONFIG.d_ff / CONFIG.d_model
    one = ROWS * CONFIG.context * CONFIG.d_model * 4 / MIB
    n, unit = CONFIG.layers, (13 + 4 * f) * one
    return {
        "keep": ("n (13 + 4f)", n * unit, "", 0.0),
        "recompute": ("n", n * one, "+ (13 + 4f)", unit),
        "select": ("n (7 + 2f)", n * (7 + 2 * f) * one, "+ (6 + 2f)", (6 + 2 * f) * one),
        "host": ("0", 0.0, "+ 2 (13 + 4f)", 2 * unit),
        "disk": ("0", 0.0, "+ 2 (13 + 4f)", 2 * unit),
    }


def table(batch: tuple[Tensor, Tensor]) -> None:
    ways = [(mode, mode, Ours, Ours) for mode in MODES]
    ways += [(way, mode, Theirs, Theirs) for way, mode in WAYS.items() if way != "save_on_cpu"]
    ways += [("save_on_cpu", "host", Theirs, OnDevice)]
    jobs = {way: make(way) for way, _, make, _ in ways}
    seconds: dict[str, list[float]] = {way: [] for way in jobs}
    for number in range(ROUNDS + 1):
        for way, job in jobs.items():
            taken = step(job, batch)
            if number:  # the first is a warm-up
                seconds[way].append(taken)
    for job in jobs.values():
        job.close()
    print("| | between, MiB | formula | peak, MiB | formula | outside, MiB | CPU ms, least | median |")
    print("|---|---|---|---|---|---|---|---|")
    for way, mode, _, make in ways:
        job = make(way, accumulate=2)
        live = watched(job, batch)
        text, between, more, unit = formulas()[mode]
        formula = "" if make is OnDevice else f"{text}: {between:.1f}"
        cells = [f"{live.between / MIB:.1f}", formula, f"{live.peak / MIB:.1f}"]
        cells += [f"{more}: {between + unit:.1f}" if more and make is not OnDevice else ""]
        cells += [f"{live.outside / MIB:.1f}" if live.outside else ""]
        cells += [f"{min(seconds[way]) * 1000:.0f}", f"{median(seconds[way]) * 1000:.0f}"]
        print(f"| {f'`{way}`' if make is Ours else way} | {' | '.join(cells)} |", flush=True)
        job.close()


# -- the picture

PANELS = ("keep", "recompute", "select", "host")


def draw(file: Path, batch: tuple[Tensor, Tensor]) -> None:
    found: dict[str, Live] = {}
    for mode in PANELS:
        job = Ours(mode, accumulate=2)
        for _ in range(2):  # the first warms up
            found[mode] = watched(job, batch)
            job.update()
        job.close()
    figure = Figure(figsize=(13, 3.5), dpi=140, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
    kept = curve(found["keep"])
    longest = max(curve(live)[0][-1] for live in found.values())
    for axes, mode in zip(panels, PANELS, strict=True):
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.grid(visible=True, axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, colors=MUTED, labelsize=9)
        axes.set_title(f'activations="{mode}"', loc="left", fontsize=10.5, color=INK, pad=10)
        live = found[mode]
        at, sizes = curve(live)
        if mode != "keep":
            axes.plot(*kept, color=KEEP, linewidth=1.2)
            middle = (found["keep"].backward + len(kept[0])) // 2
            axes.annotate(
                "keep", (kept[0][middle], kept[1][middle]), (8, 4), textcoords="offset points", fontsize=9, color=MUTED
            )
        axes.fill_between(at, sizes, step="post", color=CHANGED, alpha=0.18, linewidth=0)
        axes.step(at, sizes, where="post", color=CHANGED, linewidth=1.4)
        turn = at[live.backward - 1]
        axes.axvline(turn, color=MUTED, linewidth=0.8, linestyle=(0, (3, 3)))
        highest = sizes.index(max(sizes))
        axes.annotate(
            f"{max(sizes):.0f} MiB", (at[highest], sizes[highest]), (4, 4), textcoords="offset points",
            ha="left", fontsize=10, color=CHANGED, weight="bold",
            bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5},
        )  # fmt: skip
        axes.set_xlim(0, longest * 1.02)
        axes.set_ylim(0, max(kept[1]) * 1.14)
        axes.set_xlabel("CPU time of the step, ms", fontsize=9, color=MUTED, loc="right")
        axes.annotate("forward", (turn, 0.97), (-4, 0), xycoords=("data", "axes fraction"),
                      textcoords="offset points", ha="right", va="top", fontsize=8.5, color=MUTED)  # fmt: skip
        axes.annotate("backward", (longest, 0.97), (0, 0), xycoords=("data", "axes fraction"),
                      textcoords="offset points", ha="right", va="top", fontsize=8.5, color=MUTED)  # fmt: skip
    panels[0].set_ylabel("activations on the device, MiB", fontsize=9, color=MUTED)
    figure.subplots_adjust(left=0.048, right=0.985, top=0.88, bottom=0.14, wspace=0.08)
    figure.savefig(file)


def curve(live: Live) -> tuple[list[float], list[float]]:
    """Milliseconds and MiB."""
    return [at * 1000 for at, _ in live.samples], [size / MIB for _, size in live.samples]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="draw bytes over time into this file instead")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tokens, targets = torch.randint(CONFIG.vocab, (2, ROWS, CONFIG.context))
    if given.picture is not None:
        draw(given.picture, (tokens, targets))
    else:
        table((tokens, targets))


if __name__ == "__main__":
    main()
