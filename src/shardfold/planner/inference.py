"""Memory without training: weights by dtype, the cache of keys and values by length and batch, and a reserve; and of a
generation under a table, what it holds and how long a forward takes.

The cache is not a formula: the model runs once without memory, and what lives behind its forward, beside what it gives,
is the cache. So models that share keys among heads, keep a window or compress them are counted as they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import takewhile
from math import floor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfold.errors import ModelError
from shardfold.plan import presets
from shardfold.plan.bind import Bound, bind
from shardfold.plan.cost import fetched_bytes, resting_bytes
from shardfold.plan.formats import FORMATS
from shardfold.plan.layout import ITEMSIZE, Layout, Precision, Tier
from shardfold.plan.lifetimes import ALONE, Lifetimes
from shardfold.plan.program import MARKERS
from shardfold.planner.given import hollow, hollow_values, not_run
from shardfold.planner.hardware import Device
from shardfold.planner.live import LiveBytes
from shardfold.planner.setting import LINE, Subject
from shardfold.planner.tracing import call, runs_with_memory, silent
from shardfold.sharding.autograd import tensors_in
from shardfold.torch_internals import FakeMode, storage_key, tree_iter

__all__ = [
    "BITS",
    "RESERVE",
    "Generating",
    "Served",
    "Size",
    "activation_bytes",
    "cache_bytes",
    "generating",
    "largest_batch_of",
    "sizes_of",
    "streamed_part",
]

BITS: dict[str, int] = {"fp32": 32, "16-bit": 16, "int8": 8, "int4": 4}
"""Of a weight, by the name of its dtype."""
RESERVE = 0.2
"""Part of weights and cache that a server needs besides: activations of a step, workspaces, what an allocator cannot
use. It is a rule of thumb of those who serve models, not a sum."""


class Size(NamedTuple):
    """A model in one dtype, in bytes.

    Attributes:
        dtype: a name of :data:`BITS`.
        largest: of the largest layer: a block, an embedding or a head.
        weights: with buffers.
        training: of weights, gradients and Adam's states on one device; 0: it is not trained in this.
    """

    dtype: str
    largest: float
    weights: float
    training: float

    def needed(self, cache: float) -> float:
        """Bytes to serve it with such a cache, and the reserve."""
        return (1 + RESERVE) * (self.weights + cache)


class Served(NamedTuple):
    """Sequences of a model that is served.

    Attributes:
        each: bytes of the cache of one, or of its forward's activations.
        sequences: at a time.
        budget: bytes that there are.
    """

    each: float
    sequences: int
    budget: float

    def fits(self, size: Size) -> bool:
        """Whether they do with such weights, and the reserve."""
        return size.needed(self.each * self.sequences) <= self.budget

    def largest(self, size: Size) -> int | None:
        """The most sequences that fit; None: however many, as they take nothing."""
        return largest_batch_of(size, self.each, self.budget) if self.each else None


class Generating(NamedTuple):
    """A generation of many texts at once, on each rank.

    Attributes:
        rows: texts under way.
        resting: bytes of weights, and of buffers, by tier.
        pages: bytes of keys and values in pages.
        window: the most bytes that a forward holds of weights beside those that rest in memory: units whose turn it is
            as values, and what is read for the next.
        moved: bytes of weights that a forward brings from a slower tier.
        seconds: of a forward with a token of each text, which reads the keys and values of all its tokens.
        limit: what takes these: ``disk``, ``host``, ``memory`` (weights, keys and values are read) or ``products``.
    """

    rows: int
    resting: Mapping[Tier, float]
    pages: float
    window: float
    moved: float
    seconds: float
    limit: str

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds

    @property
    def memory(self) -> float:
        """Bytes on the device and in host memory, without activations and what a decoder takes for a moment."""
        return (
            self.pages
            + self.window
            + sum(num_bytes for tier, num_bytes in self.resting.items() if tier is not Tier.DISK)
        )


def streamed_part(
    subject: Subject, table: Layout, precision: str | Precision, stays: float, mesh: Mapping[str, int]
) -> float:
    """The part of the weights that is beyond so many bytes on each rank; 0: all fit."""
    resting = sum(_frozen(subject).resting(table, precision, mesh, 0).values())
    return max(0.0, 1 - stays / resting)


def generating(
    subject: Subject, table: Layout, precision: str, device: Device, *, rows: int, length: int, page: int
) -> Generating:
    """What generating takes with weights as a table has them, which nobody trains.

    Args:
        subject: the model, with a batch of sequences of ``length`` tokens.
        table: for one rank, or each of those that share layers.
        precision: of weights and arithmetic.
        device: what it can do.
        rows: texts under way at once, each of ``length`` tokens at its end.
        length: tokens of a text, with its prompt.
        page: tokens of a page of keys and values.

    Raises:
        ModelError: the model's forward does not run without memory.
    """
    policy, subject = Precision.named(precision), _frozen(subject)
    resting = subject.resting(table, policy, {"intra": 1}, 0)
    width = ITEMSIZE[policy.compute]
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(policy.compute, torch.float32)
    kept = rows * cache_bytes(subject, 1, kind)
    pages = kept * -(-length // page) * page / length
    rules, cuts = subject.cuts(table, policy, subject.mesh)
    segments = [segment for c in cuts if c.spec is not None for segment in c.spec.segments]
    numel: dict[str, int] = {}
    for segment in segments:
        form = segment.codes or policy.compute
        numel[form] = numel.get(form, 0) + segment.numel
    numel[policy.compute] = numel.get(policy.compute, 0) - _looked_up(subject.hollow)
    weights = sum(numel.values())
    tier = rules.layouts[-1].rest.tier
    moved = resting.get(tier, 0.0) if tier is not Tier.DEVICE else 0.0
    rate = device.rate(policy.compute) * device.reached
    products, read = 2 * weights * rows / rate, (weights * width + kept) / device.bandwidth
    copied = (4 if tier is Tier.DISK else 2) * moved / device.bandwidth if not device.streams else 0.0
    drive = device.reads or device.disk
    waits = moved / (drive if tier is Tier.DISK else device.host) if device.streams or tier is Tier.DISK else 0.0
    seen, byte = device.forwards, device.kept
    if subject.division.tensor > 1:
        seen, byte = device.cut_forwards, device.cut_kept
    if all(form in seen for form in numel):
        blocks = sum(c.spec is not None and not c.spec.root for c in cuts)
        computes = copied + _as_measured(seen, numel, blocks, rows) + kept * (byte or 1 / device.bandwidth)
    else:
        decoded = sum(_decoding(form, count, device) for form, count in numel.items() if form != policy.compute)
        computes = max(products, read) + decoded + copied
    seconds = max(waits, computes)
    limit = str(tier) if waits > computes else "products" if products > read else "memory"
    specs = [c.spec for c in cuts if c.spec is not None]
    window = _window(bind(rules.layouts[-1], specs, subject.mesh, num_moments=0))
    return Generating(rows, resting, pages, window, moved, seconds, limit)


def _window(bound: Bound) -> float:
    """See :class:`Generating`. What was read for a unit waits for the next one that is as large; when a forward ends
    the first units of the next one are read."""
    lifetimes, most, made = Lifetimes(bound, ALONE), 0.0, 0.0
    reading: dict[str, float] = {}
    spare: list[float] = []
    ops = bound.sections["eval"]
    ahead = [op for op in takewhile(lambda op: op.verb not in MARKERS, ops) if op.verb == "READ"]
    for op in (*ops, *ahead, *ops):
        unit = bound.by_name.get(op.unit)
        if unit is None:
            continue
        if op.verb == "READ" and op.unit not in reading:
            reading[op.unit] = num_bytes = fetched_bytes(op, bound.layout, unit, bound.mesh)
            if num_bytes in spare:
                spare.remove(num_bytes)
            else:
                made += num_bytes
        elif op.verb == "FILL" and op.unit in reading:
            spare.append(reading.pop(op.unit))
        lifetimes.begin(op)
        most = max(most, lifetimes.total + made)
        lifetimes.end(op)
    return most


def _frozen(subject: Subject) -> Subject:
    """The same model, which nobody trains."""
    found = replace(subject)
    found.hollow.requires_grad_(False)
    return found


def _looked_up(model: nn.Module) -> int:
    """Weights of embeddings that are no head besides: a forward reads a row of them for each token."""
    places = [(each, part) for part in model.modules() for each in part.parameters(recurse=False)]
    shared = {id(each) for each, part in places if not isinstance(part, nn.Embedding)}
    looked = {id(each): each.numel() for each, part in places if isinstance(part, nn.Embedding)}
    return sum(count for key, count in looked.items() if key not in shared)


def _as_measured(
    seen: Mapping[str, Sequence[Sequence[float]]], numel: Mapping[str, int], blocks: int, rows: int
) -> float:
    """Seconds of a forward by what forwards of blocks were seen to take, with weights in these formats."""
    most = max(numel, key=lambda form: numel[form])
    of_block, _ = _between(seen[most], rows)
    return blocks * of_block + sum(count * _between(seen[form], rows)[1] for form, count in numel.items())


def _between(measured: Sequence[Sequence[float]], rows: int) -> tuple[float, float]:
    """Seconds of a block and of a weight for so many texts, on the line between the next numbers that were measured;
    beyond the last one on that which leads there."""
    place = min(bisect_left([each[0] for each in measured], rows, 1), len(measured) - 1)
    (few, *low), (many, *high) = measured[place - 1], measured[place]
    part = (rows - few) / (many - few)
    block, weight = (max(0.0, less + part * (more - less)) for less, more in zip(low, high, strict=True))
    return block, weight


def _decoding(form: str, numel: int, device: Device) -> float:
    """Seconds in which codes become values: as measured, or as bytes that are read and written."""
    for name, codec in device.codecs.items():
        if name == form:
            return codec[1] * numel
    kind = FORMATS[form]
    return numel * (kind.nbytes(kind.block) / kind.block + 4) / device.bandwidth


def sizes_of(subject: Subject) -> list[Size]:
    """The model in each dtype, or the part of it that a rank has; buffers are counted, those of numbers that are no
    floats as they are."""
    model = subject.hollow
    _, cuts = subject.cuts(presets.ddp, Precision(), subject.mesh)
    inner = [module for c in cuts if c.spec is not None and not c.spec.root for module in c.modules]
    inside = {id(part) for module in inner for part in module.modules()}
    layers = [*inner, *(m for m in model.modules() if id(m) not in inside and not list(m.children()))]
    found: list[Size] = []
    for dtype, bits in BITS.items():
        policy = {"fp32": Precision(), "16-bit": Precision(compute="bf16")}.get(dtype)
        training = 0.0
        if policy is not None:
            rules, mine = subject.cuts(presets.ddp, policy, subject.mesh)
            specs = [c.spec for c in mine if c.spec is not None]
            training = sum(resting_bytes(rules.layouts[-1], specs, subject.mesh).values())
        largest = max((_bytes(layer, bits) for layer in layers), default=0.0)
        found.append(Size(dtype, largest, _bytes(model, bits), training))
    return found


def _bytes(module: nn.Module, bits: int) -> float:
    def each() -> Iterator[float]:
        for tensor in {id(t): t for t in (*module.parameters(), *module.buffers())}.values():
            yield tensor.numel() * (bits / 8 if tensor.is_floating_point() else tensor.itemsize)

    return sum(each())


def cache_bytes(subject: Subject, samples: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Bytes of keys and values, on each rank, of so many sequences that are as long as those of the subject's batch; 0:
    the model keeps none.

    Raises:
        ModelError: its forward does not run without memory.
    """
    kept, _ = _forward(subject, 1, dtype)
    return float(kept * samples)


def activation_bytes(subject: Subject, samples: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Bytes, on each rank, at the highest point of a forward of so many samples, without weights.

    Raises:
        ModelError: its forward does not run without memory.
    """
    _, peak = _forward(subject, LINE[0], dtype)
    return peak / LINE[0] * samples


def _forward(subject: Subject, samples: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that live behind a forward beside what it gives, and the most that do in it; by a run on zeros with memory
    where that was asked for, or none without goes and the model is small."""
    small = subject.real is None and runs_with_memory(subject.hollow, subject.rows(samples))
    ways = [True] if subject.real else [False, True] if small else [False]
    labelled = isinstance(subject.batch, dict) and "labels" in subject.batch
    tried = [(real, labels) for real in ways for labels in (False, True)[: 1 + labelled]]
    for real, labels in tried[:-1]:
        try:
            return _run(subject, samples, dtype, real=real, labels=labels)
        except ModelError:  # some models ask for values, and some for labels
            continue
    real, labels = tried[-1]
    return _run(subject, samples, dtype, real=real, labels=labels)


def _run(subject: Subject, samples: int, dtype: torch.dtype, *, real: bool, labels: bool) -> tuple[int, int]:
    """See :func:`_forward`; ``labels``: these are given too, where the micro-batch has some."""
    fake = nullcontext() if real else FakeMode(allow_non_fake_inputs=True)

    def make(tensor: Tensor, kind: torch.dtype) -> Tensor:
        with fake:
            return torch.zeros(tensor.shape, dtype=kind if not kind.is_floating_point else dtype, device="cpu")

    model: nn.Module = hollow(subject.hollow, make, {}).eval()
    batch, undo = subject.division.connect(model, subject.mesh, subject.rows(samples), [])
    batch = hollow_values(batch, make)
    if isinstance(batch, dict):
        batch = {name: value for name, value in batch.items() if labels or name != "labels"}
        if hasattr(model, "generate"):
            batch["use_cache"] = True
    live = LiveBytes([*model.parameters(), *model.buffers(), *(v for v in tree_iter(batch) if isinstance(v, Tensor))])
    with silent(), fake, torch.no_grad(), live:
        try:
            given = call(model, batch)
        except Exception as error:
            raise not_run(model, subject.rows(samples), error, "run") from error
        parts: Any = given if isinstance(given, (tuple, list, dict, Tensor)) else vars(given)
        outputs = {storage_key(t.untyped_storage()): t.untyped_storage().nbytes() for t in _plain(parts)}
        kept = live.level - sum(outputs.values())
    undo()
    return max(kept, 0), live.peak


def _plain(values: Any) -> Iterator[Tensor]:
    """Tensors that a model gives, but those of its cache."""
    if isinstance(values, dict):
        values = {name: value for name, value in values.items() if name != "past_key_values"}
    yield from tensors_in(values)


def largest_batch_of(size: Size, cache_of_one: float, budget: float) -> int:
    """The most sequences with which weights, cache and reserve are within the budget."""
    room = budget / (1 + RESERVE) - size.weights
    if room < cache_of_one or room < 0:
        return 0
    return floor(room / cache_of_one) if cache_of_one else 0
