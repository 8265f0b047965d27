"""Figures that papers print, computed by the sums that the library plans with, each with its formula and precision.

``FIGURES`` is one list: the page ``docs/figures.md`` is made of it, and a test holds each within its tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from shardfold.plan import presets
from shardfold.plan.axes import Mesh
from shardfold.plan.bind import bind
from shardfold.plan.cost import resting_bytes, ring_bytes, traffic
from shardfold.plan.layout import Layout, Precision
from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec

__all__ = ["FIGURES", "KNOWN_ERRORS", "Figure", "OffloadCut", "as_markdown", "offload_cuts"]

GB, MIB, GIB = 1e9, 2**20, 2**30
HALF = Precision(compute="bf16", grads="bf16", reduce="bf16")
"""Gradients in 16 bits, as the papers count; this library's own ``bf16`` sums them in fp32."""


class Figure(NamedTuple):
    """A figure.

    Attributes:
        what: it is of.
        formula: how it is computed.
        printed: in its source.
        compute: gives ours.
        tolerance: by how much ours may differ, as a part.
        unit: of both.
    """

    what: str
    formula: str
    printed: float
    compute: Callable[[], float]
    tolerance: float
    unit: str = ""


def states(layout: str | Layout, parameters: float, ranks: int, precision: Precision = HALF, moments: int = 2) -> float:
    """Bytes at rest on each rank, by the table."""
    mesh = Mesh.of({"inter": 1, "intra": ranks})
    numel = int(parameters)
    unit = UnitSpec("(root)", (SegmentSpec((Slot("w", (numel,), 0),), numel, precision.compute),), True)
    return sum(resting_bytes(presets.named(layout).bind(precision, mesh), [unit], mesh, num_moments=moments).values())


def sent(layout: str, ranks: int, parameters: int = 1 << 20) -> float:
    """Elements that all ranks send together in a step, for each parameter and each of the other ranks."""
    mesh = Mesh.of({"inter": 1, "intra": ranks})
    spec = SegmentSpec((Slot("w", (parameters,), 0),), parameters, "bf16")
    units = [UnitSpec("(root)", (spec,), True)]
    bound = presets.named(layout).bind(HALF, mesh)
    each = sum(n for _, n in traffic(bind(bound, units, mesh).program, bound, units, mesh).values())
    return each * ranks / (2 * parameters * (ranks - 1))


class OffloadCut(NamedTuple):
    """A way to divide the data flow of mixed-precision training between a GPU and the host.

    Attributes:
        host: what is there.
        traffic: bytes for each parameter and step that cross.
        device: bytes for each parameter that stay on the GPU.
    """

    host: frozenset[str]
    traffic: int
    device: int


FLOW: tuple[tuple[str, str, int], ...] = (
    ("params16", "forward", 2),
    ("params16", "backward", 2),
    ("backward", "grads16", 2),
    ("grads16", "update", 2),
    ("update", "params32", 4),
    ("params32", "update", 4),
    ("update", "momentum", 4),
    ("momentum", "update", 4),
    ("update", "variance", 4),
    ("variance", "update", 4),
    ("params32", "cast", 4),
    ("cast", "params16", 2),
)
"""Who gives how many bytes of each parameter to whom in a step (ZeRO-Offload, arXiv 2101.06840, section 3)."""
HELD = {"params16": 2, "grads16": 2, "params32": 4, "momentum": 4, "variance": 4}


def offload_cuts() -> Iterator[OffloadCut]:
    """All ways in which the GPU does forward and backward and the host something."""
    nodes = ["params16", "grads16", "update", "params32", "momentum", "variance", "cast"]
    for bits in product((False, True), repeat=len(nodes)):
        host = frozenset(node for node, there in zip(nodes, bits, strict=True) if there)
        if host:
            crossing = sum(n for source, target, n in FLOW if (source in host) != (target in host))
            yield OffloadCut(host, crossing, sum(n for name, n in HELD.items() if name not in host))


def best_cut() -> OffloadCut:
    """Of the cuts with the least traffic the one that leaves the least on the GPU."""
    return min(offload_cuts(), key=lambda cut: (cut.traffic, cut.device))


def _zero(printed: float, layout: str, precision: Precision, words: str) -> Figure:
    bits = "16-bit" if precision is HALF else "fp32"
    return Figure(
        f"7.5B on 64 ranks, {layout}, {bits} gradients",
        words,
        printed,
        lambda: states(layout, 7.5e9, 64, precision) / GB,
        0.03,
        "GB",
    )


FP32_GRADS = Precision(compute="bf16")
SEVEN = 7_000_559_616
ROTARY = 128 * MIB
RATE = 3158.7

FIGURES: tuple[Figure, ...] = (
    _zero(120, "ddp", HALF, "16Ψ"),
    _zero(31.4, "zero1", HALF, "(4 + 12/N)Ψ"),
    _zero(16.6, "zero2", HALF, "(2 + 14/N)Ψ"),
    _zero(1.9, "zero3", HALF, "16Ψ/N"),
    _zero(135, "ddp", FP32_GRADS, "18Ψ"),
    _zero(46.4, "zero1", FP32_GRADS, "(6 + 12/N)Ψ"),
    _zero(16.9, "zero2", FP32_GRADS, "(2 + 16/N)Ψ"),
    _zero(2.1, "zero3", FP32_GRADS, "18Ψ/N"),
    Figure("GPT-2 of 1.5B, Adam in mixed precision", "16Ψ", 24, lambda: states("ddp", 1.5e9, 1) / GB, 1e-9, "GB"),
    Figure("GPT-2 of 1.5B, weights", "2Ψ", 3, lambda: 2 * 1.5e9 / GB, 1e-9, "GB"),
    Figure("7B: 14 + 14 + 84", "2Ψ + 2Ψ + 12Ψ", 112, lambda: states("ddp", 7e9, 1) / GB, 1e-9, "GB"),
    Figure("largest model in 24 GB", "M/16", 1.5, lambda: 24e9 / states("ddp", 1e9, 1), 1e-9, "B"),
    Figure("largest model in 80 GB", "M/16", 5, lambda: 80e9 / states("ddp", 1e9, 1), 1e-9, "B"),
    *(
        Figure(
            f"{name} in fp32, of the weights",
            f"{2 + moments}",
            2 + moments,
            lambda moments=moments: states("ddp", 1e6, 1, Precision(), moments) / 4e6,
            1e-9,
            "x",
        )
        for name, moments in (("SGD", 0), ("momentum", 1), ("Adam", 2))
    ),
    Figure("Adam's states", "12Ψ/16Ψ", 0.75, lambda: 12e6 / states("ddp", 1e6, 1), 1e-9),
    Figure("zero1, many ranks", "4Ψ/16Ψ", 0.25, lambda: states("zero1", 2**30, 2**20) / states("ddp", 2**30, 1), 1e-3),
    Figure("zero2, many ranks", "2Ψ/16Ψ", 0.125, lambda: states("zero2", 2**30, 2**20) / states("ddp", 2**30, 1), 1e-3),
    Figure("zero3, 64 ranks", "1/N", 1 / 64, lambda: states("zero3", 2**30, 64) / states("ddp", 2**30, 1), 1e-9),
    *(
        Figure(
            f"sent in a step, {layout}, all ranks",
            f"{times}(n-1)Ψ",
            times,
            lambda layout=layout: sent(layout, 8),
            1e-9,
            "(n-1)Ψ",
        )
        for layout, times in (("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3))
    ),
    Figure(
        "ring all-reduce, sent by a rank of 1,000",
        "2S(N-1)/N",
        2,
        lambda: ring_bytes("ALL_REDUCE", 1.0, 1000),
        2e-3,
        "S",
    ),
    Figure("pipeline, 4 micro-batches a stage", "M/(M + K - 1)", 0.80, lambda: 4e4 / (4e4 + 1e4 - 1), 5e-3),
    Figure("pipeline, 8 micro-batches a stage", "M/(M + K - 1)", 0.889, lambda: 8e4 / (8e4 + 1e4 - 1), 5e-3),
    Figure("GPT-3 1.3B, tensor: all-reduces of a step", "24 layers x 4", 96, lambda: 24 * 4, 0),
    Figure("elements of each", "32 x 1024 x 2048", 67, lambda: 32 * 1024 * 2048 / 1e6, 3e-3, "M"),
    Figure("in all, beside 1.3B of data parallelism", "96 x 67M", 6.4, lambda: 96 * 32 * 1024 * 2048 / 1e9, 1e-2, "B"),
    Figure("checkpoints of n = 10,000 layers", "n/k + k at k = √n", 200, lambda: 10_000 / 100 + 100, 0, "layers"),
    Figure("its computation", "F/(F + 2F)", 1 / 3, lambda: 1 / 3, 1e-9),
    Figure(
        "bert-base-cased in fp32",
        "(108,310,272 x 4 + 2 x 512 x 8) / 2^20",
        413.18,
        lambda: (108_310_272 * 4 + 2 * 512 * 8) / MIB,
        3e-5,
        "MiB",
    ),
    Figure(
        "a 7B in fp32", "(7,000,559,616 x 4 + 128 MiB) / 2^30", 26.2, lambda: (SEVEN * 4 + ROTARY) / GIB, 1e-3, "GiB"
    ),
    Figure("in 16 bits", "half", 13.1, lambda: (SEVEN * 4 + ROTARY) / 2 / GIB, 1e-3, "GiB"),
    Figure("in 8 bits", "a quarter", 6.55, lambda: (SEVEN * 4 + ROTARY) / 4 / GIB, 1e-3, "GiB"),
    Figure("in 4 bits", "an eighth", 3.28, lambda: (SEVEN * 4 + ROTARY) / 8 / GIB, 2e-3, "GiB"),
    Figure(
        "its largest layer in fp32", "64,000 x 4,096 x 4 / 2^20", 1000, lambda: 64_000 * 4096 * 4 / MIB, 1e-3, "MiB"
    ),
    Figure("its training by Adam", "x 4", 104.8, lambda: 4 * (SEVEN * 4 + ROTARY) / GIB, 1e-3, "GiB"),
    Figure(
        "LLaMA-6B, activations of a sample",
        "(4096 + 11008) x 2048 x 32",
        990,
        lambda: (4096 + 11008) * 2048 * 32 / 1e6,
        1e-3,
        "MB",
    ),
    Figure(
        "50 samples and 25.3 GB of states",
        "25.3 + 50 x 0.99",
        74.8,
        lambda: 25.3 + 50 * (4096 + 11008) * 2048 * 32 / 1e9,
        1e-3,
        "GB",
    ),
    Figure("MFU on A100, 7B, 3,158.7 tokens/s", "6Ψ x rate / 312e12", 0.41, lambda: 6 * 6.74e9 * RATE / 312e12, 0.0125),
    Figure(
        "with attention counted",
        "(6Ψ + 12 L d s) x rate / 312e12",
        0.47,
        lambda: (6 * 6.74e9 + 12 * 32 * 4096 * 4096) * RATE / 312e12,
        0.0125,
    ),
    Figure(
        "with causal attention counted",
        "half of it",
        0.44,
        lambda: (6 * 6.74e9 + 6 * 32 * 4096 * 4096) * RATE / 312e12,
        0.0125,
    ),
    Figure(
        "FSDP with masters in fp32, against 16-bit states",
        "16Ψ/8Ψ",
        2,
        lambda: (
            states("ddp", 1e6, 1)
            / states(
                "ddp", 1e6, 1, Precision(compute="bf16", grads="bf16", reduce="bf16", master="bf16", moments="bf16")
            )
        ),
        1e-9,
        "x",
    ),
    Figure("10^12 parameters", "16Ψ", 16, lambda: states("ddp", 1e12, 1) / 1e12, 1e-9, "TB"),
    Figure("on each of 1,024 ranks", "16Ψ/N", 15.6, lambda: states("zero3", 1e12, 1024) / GB, 0.03, "GB"),
    Figure("ranks of 6 x 8 x 64", "the product", 3072, lambda: 6 * 8 * 64, 0),
    Figure("ZeRO++ between nodes", "3Ψ / (0.5 + 0 + 0.25)Ψ", 4, lambda: 3 / (0.5 + 0 + 0.25), 1e-9, "x"),
    Figure("1-bit Adam behind a warm-up of 15 %", "1/(w + (1 - w)/16)", 5, lambda: 1 / (0.15 + 0.85 / 16), 0.03, "x"),
    Figure(
        "ZeRO-Offload, least traffic of all cuts",
        "2 of gradients down, 2 of parameters up",
        4,
        lambda: best_cut().traffic,
        0,
        "bytes a parameter",
    ),
    Figure("what it leaves on the GPU", "params16", 2, lambda: best_cut().device, 0, "bytes a parameter"),
    Figure("largest in fp16", "(2 - 2^-10) x 2^15", 65504, lambda: (2 - 2**-10) * 2**15, 0),
    Figure("A100, fp16 against fp32", "312/19.5", 16, lambda: 312 / 19.5, 0, "x"),
    Figure("+30 % on 39 % of the time", "1/(0.61 + 0.39/1.3) - 1", 0.10, lambda: 1 / (0.61 + 0.39 / 1.3) - 1, 0.02),
)

KNOWN_ERRORS: tuple[tuple[str, str], ...] = (
    ('the largest number in fp16 is "65506"', "65504"),
    ('"near 120 times less" for 120 GB against 1.875', "64 times"),
    ('"ZeRO-1 sends three times the parameters"', "twice, as stages 0 and 2"),
    ('"8Ψ + KΨ" with K = 12', "2Ψ + 2Ψ + KΨ = 16Ψ"),
    ('"3,076 GPUs" of 6 x 8 x 64', "3,072"),
    ('"stage 2 with offload needs more than stage 3"', "for more than 8 ranks only: 2Ψ > 16Ψ/N"),
)
"""What documents print, and what it is."""


def as_markdown() -> str:
    """The tables of ``docs/figures.md``."""
    lines = ["| what | formula | printed | computed | |", "|---|---|---|---|---|"]
    lines += [f"| {f.what} | {f.formula} | {f.printed:.5g} | {f.compute():.5g} | {f.unit} |" for f in FIGURES]
    lines += ["", "| printed | computed |", "|---|---|", *(f"| {a} | {b} |" for a, b in KNOWN_ERRORS)]
    return "\n".join(lines)
