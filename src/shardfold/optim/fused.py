"""AdamW, Adam and SGD in one pass over a shard, block by block while a block is in cache.

For each block of a shard: cast and scale the gradients, update master and moments with torch's fused kernel, write
the compute-dtype copy. Done in separate passes the same steps move every byte through memory three times; in blocks
that fit a core's cache they run at the speed of a plain copy. In host memory blocks are shared out among threads; each
element is computed alike on any number of them.

Steps are counted per parameter, and a parameter that no rank used in a step is left alone, as PyTorch leaves alone
what has no gradient. A shard is therefore updated in runs: ranges whose parameters were used and have equal counts.
Normally that is one run.

Sources: Adam (arXiv 1412.6980), AdamW (arXiv 1711.05101), SGD with momentum as in ``torch.optim.SGD``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from shardfold import accelerator
from shardfold.optim.compiled import constants
from shardfold.optim.speculation import ByteBuffer, Speculation, Terms
from shardfold.optim.threads import UpdateThreads
from shardfold.plan.layout import Tier
from shardfold.sharding.segment import Segment
from shardfold.tiers.tier import Region
from shardfold.torch_internals import fused_adam_, fused_adamw_, fused_sgd_

__all__ = ["FusedShard", "fused_moments", "num_moments", "options_of", "terms_of", "why_not_fused"]

T = TypeVar("T")

CPU_BLOCK = 64 * 1024  # with all that is read and written, 1.4 MB of fp32 states and 16-bit gradients and copies
OPTIONS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "decoupled_weight_decay",
    "momentum",
    "dampening",
    "nesterov",
)
"""What an update reads of its group."""
DEVICE_BLOCK = 64 * 1024 * 1024
COMPILED_BLOCK = 4 * 1024 * 1024  # it reads and writes every byte once, so cache sets no limit, and calls cost


def fused_moments(optimizer: Optimizer) -> tuple[str, ...] | None:
    """Names of the moments that the fused update keeps for this optimizer, or None if it cannot stand in for it
    (:func:`why_not_fused` says why).

    A class of another name, whose update is that of torch's, says so in an attribute ``same_as``.
    """
    if why_not_fused(optimizer):
        return None
    groups = optimizer.param_groups
    if getattr(optimizer, "same_as", type(optimizer)) is SGD:
        return ("momentum_buffer",) if any(group["momentum"] for group in groups) else ()
    largest = ("max_exp_avg_sq",) if any(group.get("amsgrad") for group in groups) else ()
    return ("exp_avg", "exp_avg_sq", *largest)


def num_moments(optimizer: Optimizer | None) -> int:
    """How many moments the fused update keeps of each element; 0 where there is none."""
    return len((fused_moments(optimizer) if optimizer is not None else None) or ())


def why_not_fused(optimizer: Optimizer) -> str:
    """Why the fused update cannot stand in for this optimizer, and what would mend it, as the end of a sentence; empty
    where it can."""
    groups, name = optimizer.param_groups, type(optimizer).__name__
    if getattr(optimizer, "same_as", type(optimizer)) not in (Adam, AdamW, SGD):
        return f"{name} has an update and a state of its own: take one of these"
    if any(group.get("differentiable") for group in groups):
        return f"{name}(differentiable=True) is updated by torch: leave differentiable out"
    if any(isinstance(group.get("lr"), Tensor) for group in groups):
        return f"{name} with a tensor as lr is updated by torch: give lr as a number"
    if len({bool(group.get("amsgrad")) for group in groups}) > 1:
        return f"{name} with amsgrad=True in some groups only is updated by torch: give it to all groups, or to none"
    return ""


@dataclass
class FusedShard:
    """The optimizer's state for one segment's master range, and its update.

    Attributes:
        segment: whose ``master`` ``(n,)`` is updated.
        moments: by name, what each rests in: ``(n,)``, zero at first.
        here: the moments where the update is, in their order, from then until they are stored; else empty.
        steps: how many updates each parameter of the segment has had.
        stochastic: seed of stochastic rounding, the same on all ranks that hold this range; None: to the nearest.
        threads: what updates blocks in host memory.
        empty: memory of the host for a short while.
        compiled: a pass of :func:`~shardfold.optim.compiled.compiled_adam` to update with; None: torch's fused kernel.
    """

    segment: Segment
    kind: type[Optimizer]
    moments: dict[str, Region]
    steps: list[int] = field(default_factory=list)
    stochastic: int | None = None
    threads: UpdateThreads = field(default_factory=partial(UpdateThreads, 1))
    empty: Callable[[int, torch.dtype], Tensor] = lambda numel, dtype: torch.empty(numel, dtype=dtype)
    compiled: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        self.steps = [0] * len(self.segment.spec.slots)
        self.here: list[Tensor] = []

    def fetch(self, empty: Callable[[int, torch.dtype], Tensor]) -> None:
        """Begins to bring the moments to memory that ``empty`` gives, ahead of their update."""
        for region in self.moments.values():
            region.fetch(empty(self.segment.shard_numel, region.dtype))

    def keep_in(self, moments: dict[str, Region]) -> None:
        """The moments rest in these from now on."""
        self.moments = moments

    def count_as(self, other: FusedShard) -> None:
        """Its parameters have had as many updates as the other's."""
        self.steps = [*other.steps]

    def leave(self) -> list[tuple[Region, Tensor]]:
        """The moments that were fetched and updated, each with the region that is to take it; they are not this shard's
        any more."""
        here, self.here = self.here, []
        return list(zip(self.moments.values(), here, strict=True))

    @property
    def nbytes(self) -> int:
        """Of all moments."""
        return sum(region.nbytes for region in self.moments.values())

    def speculate(
        self, terms: Terms, block: int, room: ByteBuffer, begin: Callable[[Callable[[], None]], Future[None]], name: str
    ) -> None:
        """Begins the update of a step that is not known yet, in host memory, by ``begin``, behind a snapshot in
        ``room``. The next :meth:`update` keeps or undoes it."""
        segment, steps = self.segment, self.steps
        dtypes = [segment.dtypes["master"], *(region.dtype for region in self.moments.values())]
        copies = [room.take(segment.shard_numel, dtype) for dtype in dtypes]
        out = room.take(segment.shard_numel, segment.dtype) if segment.keeps_copy else None
        factor = None if terms.factor is None else torch.full((), terms.factor)

        def update(terms: Terms, out: Tensor | None) -> None:
            self._update(terms.options, terms.used, factor, block, out)

        def states() -> list[Tensor]:
            assert segment.master is not None
            return [segment.master, *(region.values() for region in self.moments.values())]

        def restore() -> None:
            self.steps = steps

        Speculation(segment, terms, update, states, restore, out, copies, name, begin)

    def update(
        self,
        group: Mapping[str, Any],
        used: Sequence[bool],
        coefficient: Tensor | None,
        block: int,
        aside: Tensor | None = None,
    ) -> None:
        """One step for the parameters that some rank used; ``coefficient`` (0-d) multiplies the gradients. One that
        raises is not counted. What was done of it before stands, if it is the same. ``aside``: memory of the host in
        which the compute-dtype copy waits until it is asked for (:meth:`Segment.write_updated`)."""
        segment = self.segment
        if isinstance(before := segment.under_way, Speculation):
            if before.stands(terms_of(group, used, coefficient)):
                segment.write_updated()
                return
            before.settle()
        if not any(used):  # of a unit of which others were: what was fetched goes back as it is
            if segment.moments_come:
                self.here = [region.get() for region in self.moments.values()]
            return
        self._update(group, used, coefficient, block, aside)

    def _update(
        self,
        group: Mapping[str, Any],
        used: Sequence[bool],
        coefficient: Tensor | None,
        block: int,
        aside: Tensor | None,
    ) -> None:
        """``aside``: memory of the host that takes the compute-dtype copy; None: it goes where it rests, or on its way
        there."""
        steps = [count + was_used for count, was_used in zip(self.steps, used, strict=True)]
        away = self.segment.moments_come
        comes = away or self.segment.table.updates_on is Tier.DEVICE
        try:
            # What was fetched is waited for here, not before.
            self.here = [region.get() if comes else region.values() for region in self.moments.values()]
            runs = list(self._runs(used, steps))
            out = self._out(aside, whole=[run[:2] for run in runs] == [(0, self.segment.shard_numel)])
            for start, stop, step in runs:
                self._update_run(start, stop, step, group, coefficient, block, out)
        except BaseException:
            self.here = []
            raise
        self.steps = steps
        if not away:
            self.here = []  # nothing stores them: the regions alone have their memory

    def _out(self, aside: Tensor | None, *, whole: bool) -> Tensor | None:
        """Where the compute-dtype copy of the master range is written, ``(n,)``, if there is one: memory of the host,
        ``Segment.updated``, from which it goes to the device or a file, where the update is on the host and that copy
        is not, or where it goes ``aside``."""
        segment = self.segment
        if not segment.keeps_copy:
            return None
        out, master = segment.compute_range, segment.master
        assert master is not None
        near = out is not None and out.device == master.device
        if near and aside is None:
            return out
        aside = self.empty(segment.shard_numel, segment.dtype) if aside is None else aside
        segment.lay_aside(aside)
        if not whole:
            aside.copy_(out if near and out is not None else master)
        return aside

    def _runs(self, used: Sequence[bool], steps: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Ranges of the master shard, with the step count that their parameters are to have."""
        segment = self.segment
        a, b = segment.master_range
        if all(used) and len(set(steps)) == 1:
            yield 0, b - a, steps[0]
            return
        run: tuple[int, int, int] | None = None
        for slot, start, stop in segment.spec.pieces(a, b):
            if used[slot]:
                if run is not None and run[2] == steps[slot]:
                    run = (run[0], stop - a, run[2])
                    continue
                if run is not None:
                    yield run
                run = (start - a, stop - a, steps[slot])
            elif run is not None:
                yield run
                run = None
        if run is not None:
            yield run

    def _update_run(
        self,
        start: int,
        stop: int,
        step: int,
        group: Mapping[str, Any],
        coefficient: Tensor | None,
        block: int,
        out: Tensor | None,
    ) -> None:
        segment = self.segment
        as_they_are = coefficient is None and not block and self.stochastic is None and self.kind is not SGD
        if segment.adopted and as_they_are and segment.master_is_rest:
            self._update_adopted(start, stop, step, group)
            return
        master, grads = segment.master, segment.update_grads
        assert master is not None
        if self.compiled is not None and out is not None:
            at_once = constants(group, self._decoupled(group), step, master.device)
            factor = torch.full((), 1.0, device=master.device) if coefficient is None else coefficient.float()
            self._update_compiled(start, stop, (at_once, factor), block, out)
            return
        count = torch.full((), float(step), device=master.device)  # a fill, where torch.tensor would stop the host
        # Where nothing is cast or multiplied there is nothing to do while a block is in cache.
        narrow = self.kind is SGD and master.itemsize < 4
        if not block and coefficient is None and out is None and grads.dtype == master.dtype and not narrow:
            block = stop - start
        block = block or (DEVICE_BLOCK if accelerator.has_streams(master.device) else CPU_BLOCK)

        def work(starts: Iterator[int]) -> None:
            scratch = torch.empty(min(block, stop - start), dtype=master.dtype, device=master.device)
            for a in starts:
                b = min(a + block, stop)
                grad = grads[a:b]
                if grad.dtype != master.dtype:
                    grad = scratch[: b - a].copy_(grad)
                    if coefficient is not None:
                        grad.mul_(coefficient)
                elif coefficient is not None:
                    grad = torch.mul(grad, coefficient, out=scratch[: b - a])
                states = [master[a:b], *(moment[a:b] for moment in self.here)]
                if self.stochastic is None or master.dtype != torch.bfloat16:
                    self._kernel(states, grad, count, step == 1, group)
                else:
                    self._kernel_rounded(states, grad, count, step, a, group)
                if out is not None:
                    out[a:b].copy_(master[a:b])

        self._spread(range(start, stop, block), work)

    def _update_compiled(self, start: int, stop: int, given: tuple[Tensor, Tensor], block: int, out: Tensor) -> None:
        """A run, by the compiled pass; ``given``: what is the same for all elements, and the factor of gradients."""
        segment, run = self.segment, self.compiled
        assert segment.master is not None
        tensors = [segment.master, *self.here, segment.update_grads, out]
        if not block and accelerator.has_streams(segment.master.device):
            block = DEVICE_BLOCK
        elif not block:  # as many elements for each thread, in whole cache lines
            each = -(-(stop - start) // self.threads.count)
            block = min(COMPILED_BLOCK, max(CPU_BLOCK, -(-each // 64) * 64))

        def work(starts: Iterator[int]) -> None:
            assert run is not None
            for a in starts:
                run(*(each[a : min(a + block, stop)] for each in tensors), *given)

        self._spread(range(start, stop, block), work)

    def _decoupled(self, group: Mapping[str, Any]) -> bool:
        """Whether weight decay is AdamW's."""
        return self.kind is AdamW or group.get("decoupled_weight_decay", False)

    def _spread(self, blocks: Iterable[T], work: Callable[[Iterator[T]], None]) -> None:
        """Does the work of all blocks, on the threads for host memory where the shard is there."""
        master = self.segment.master
        assert master is not None
        if master.device.type == "cpu":
            self.threads.share(blocks, work)
        else:
            work(iter(blocks))

    def _kernel_rounded(
        self, states: list[Tensor], grad: Tensor, count: Tensor, step: int, start: int, group: Any
    ) -> None:
        """One block of 16-bit states, computed in fp32 and rounded stochastically; ``start``: where it begins."""
        wide = [state.float() for state in states]
        self._kernel(wide, grad.float(), count, step == 1, group)
        draw = torch.Generator(grad.device).manual_seed(hash((self.stochastic, step, start)) % 2**63)
        for state, value in zip(states, wide, strict=True):
            round_stochastically(value, state, draw)

    def _update_adopted(self, start: int, stop: int, step: int, group: Mapping[str, Any]) -> None:
        """A run whose gradients are, some of them, where autograd made them: parameter by parameter, in one call for
        each thread."""
        segment = self.segment
        master, flat = segment.master, segment.gradient_flat
        assert master is not None and flat is not None
        count = torch.full((), float(step), device=master.device)
        slots = [(i, s.offset, s.numel) for i, s in enumerate(segment.spec.slots) if start <= s.offset < stop]
        grads = {i: segment.adopted[i].view(-1) if i in segment.adopted else flat[a : a + n] for i, a, n in slots}

        def work(batches: Iterator[list[tuple[int, int, int, int]]]) -> None:
            for batch in batches:
                given = [grads[i][a:b] for i, _, a, b in batch]
                parts = [[whole[at + a : at + b] for _, at, a, b in batch] for whole in (master, *self.here)]
                self._adam(parts[0], given, parts[1:], count, group)

        alone = master.device.type != "cpu" or self.threads.count < 2
        self._spread(_batches(slots, stop - start if alone else CPU_BLOCK), work)

    def _kernel(self, states: list[Tensor], grad: Tensor, count: Tensor, first: bool, group: Any) -> None:
        """One block; ``states`` are its master and moments."""
        master, *moments = states
        if self.kind is SGD:
            buffer = moments[0] if moments and group["momentum"] else None
            # torch's CPU kernel leaves 16-bit parameters as they are (2.13), so these go through fp32.
            narrow = master.itemsize < 4 and not accelerator.has_streams(master.device)
            targets = [master, buffer] if buffer is not None else [master]
            wide = [target.float() for target in targets] if narrow else targets
            fused_sgd_(
                wide[:1],
                [grad.to(wide[0].dtype)],
                wide[1:],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                is_first_step=first,
                grad_scale=None,
                found_inf=None,
            )
            if narrow:
                for target, value in zip(targets, wide, strict=True):
                    target.copy_(value)
            return
        self._adam([master], [grad], [[moment] for moment in moments], count, group)

    def _adam(
        self, masters: list[Tensor], grads: list[Tensor], moments: list[list[Tensor]], count: Tensor, group: Any
    ) -> None:
        """``moments``: averages, squares and, with AMSGrad, the largest of these so far, one of each per master."""
        averages, squares, *largest = moments
        kernel = fused_adamw_ if self._decoupled(group) else fused_adam_
        kernel(
            masters,
            grads,
            averages,
            squares,
            largest[0] if largest else [],
            [count] * len(masters),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=bool(largest),
            maximize=group["maximize"],
            grad_scale=None,
            found_inf=None,
        )


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What an update reads of a group, as it is now."""
    return {name: copy.deepcopy(group[name]) for name in OPTIONS if name in group}


def terms_of(group: Mapping[str, Any], used: Sequence[bool], coefficient: Tensor | None) -> Terms:
    """What an update with these depends on."""
    return Terms(options_of(group), tuple(used), None if coefficient is None else float(coefficient))


def _batches(slots: Sequence[tuple[int, int, int]], block: int) -> list[list[tuple[int, int, int, int]]]:
    """Pieces ``(slot, its offset, start, stop)`` of slots ``(slot, offset, numel)``, each of at most ``block``
    elements, in batches of about as many."""
    batches: list[list[tuple[int, int, int, int]]] = [[]]
    held = 0
    for slot, offset, numel in slots:
        for a in range(0, numel, block):
            b = min(a + block, numel)
            if held and held + b - a > block:
                batches.append([])
                held = 0
            batches[-1].append((slot, offset, a, b))
            held += b - a
    return batches


def round_stochastically(value: Tensor, out: Tensor, draw: torch.Generator) -> None:
    """Rounds fp32 ``value`` to bf16 ``out``, up or down with the probabilities that make the mean of it ``value``."""
    bits = value.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=draw)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    out.copy_(torch.where(torch.isfinite(value), rounded, value))
