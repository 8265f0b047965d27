"""A layout in words: the table, the units, what they cost and the program that will run.

An operation of a program is for all devices, optimizers and micro-batches. What is known of these when the program is
shown is printed behind it: that an operation does less than its words, as it is done, or nobody needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from shardfold.plan.axes import Mesh
from shardfold.plan.bind import Bound, bind
from shardfold.plan.cost import (
    Moved,
    Sent,
    moves,
    resting_bytes,
    section_traffic,
    step_of,
    traffic,
)
from shardfold.plan.format import typed
from shardfold.plan.holders import death_told, holders, holders_told, usual_hosts
from shardfold.plan.layout import Layout, Precision, Sizes, Tier
from shardfold.plan.lifetimes import ALONE, Behaviour, peak_bytes
from shardfold.plan.offload import with_staying
from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec
from shardfold.plan.presets import named
from shardfold.plan.program import ROUND, Op

__all__ = ["Remarks", "explain", "explain_preset", "usual_blocks"]


SHOWN = 3
"""Blocks whose program is printed in full."""


def explain(
    table: Layout,
    bound: Bound,
    held: Mapping[tuple[str, Tier], float],
    micro_batches: int = 1,
    update: Mapping[Sent, tuple[int, float]] | None = None,
    parts: Sequence[tuple[str, Layout]] = (),
    activations: Sequence[str] = (),
    moved: Mapping[Moved, tuple[int, float]] | None = None,
    behaviour: Behaviour = ALONE,
    layers: Sequence[str] = (),
    instead: str = "",
    own_step: bool = False,
    one_pass: bool = False,
    per_host: int | None = None,
    waits: Sequence[str] = (),
) -> str:
    """The table, the units, what they cost and the program, as text.

    ``update`` is what the optimizer itself sends, ``parts`` what rules of ``precision=`` give to parts of the model,
    ``activations`` what happens to what autograd saves in units, in lines, ``layers`` how layers are cut along an axis
    and what they send, in lines, ``moved`` what travels between tiers, ``behaviour`` how the device and
    its transport use memory. ``instead`` stands where the program would, of many units; those that are alike then have
    one line. ``own_step``: the optimizer updates all units at once; ``one_pass``: an update is one compiled
    pass. ``per_host``: ranks of each host; None: not the same on all. ``waits``: how long anybody waits, in lines.
    """
    layout, units, mesh, program = bound.layout, bound.units, bound.mesh, bound.program
    lines = [f"mesh: {' x '.join(f'{axis}={size}' for axis, size in mesh.items())}", "", str(table)]
    lines += ["", "on this mesh and in this precision:", str(layout)]
    alias = layout.aliases()
    if alias:
        lines.append("same bytes: " + ", ".join(f"{a} is {b}" for a, b in alias.items()))
    for patterns, part in parts:
        lines += ["", f"in the precision of {patterns}:", str(part)]
    lines += ["", f"{'unit':<28}{'parameters':>14}{'padding':>10}  segments"]
    for name, unit in _runs(units) if instead else [(unit.name, unit) for unit in units]:
        numel, padding = sum(s.numel for s in unit.segments), sum(s.padding for s in unit.segments)
        kinds = ", ".join(
            f"{typed(s.codes) or s.dtype}{' own' if s.own else ''}{'' if s.trainable else ' frozen'}"
            for s in unit.segments
        )
        held_long = ""
        if unit.root and layout.rest.over:
            held_long = "  (whole through each pass)" if unit.table_or(layout).rest.over else "  (whole on every rank)"
        stays = ""
        if (unit.trainable or layout.shares_params) and unit.table_or(layout).share > layout.share:
            what = "parameters stay" if layout.shares_params else "the optimizer's states stay"
            stays = f"  ({what} on the device)"
        lines.append(f"{name:<28}{numel:>14,}{padding:>10,}  {kinds}{held_long}{stays}")
    if activations:
        lines += ["", *activations]
    if layers:
        lines += ["", *layers]
    lines += ["", "bytes at rest on each rank:"]
    for (state, tier), num_bytes in held.items():
        lines.append(f"  {state:<9}{num_bytes:>18,.0f}{'' if tier is Tier.DEVICE else f'  ({tier})'}")
    besides = peak_bytes(bound, behaviour, rest=0)
    lines += [f"temporary bytes in a step, at most, without activations:{besides:>18,.0f}"]
    found = holders(layout, mesh, per_host or mesh.size, units)
    lines += ["", *holders_told(found, mesh, per_host), *death_told(layout, mesh, found, held)]
    lines += ["", *waits] if waits else []
    batches = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    lines += ["", f"bytes sent by each rank in a step of {batches}:"]
    every = {**traffic(program, layout, units, mesh, micro_batches=micro_batches), **(update or {})}
    for kind, (calls, sent) in every.items():
        lines.append(f"  {kind.purpose:<8}{kind.op:<15}{'+'.join(kind.axes):<13}{calls:>5} calls{sent:>18,.0f}")
    if layout.outer is not None:
        rounds = section_traffic(program, layout, units, mesh, dict.fromkeys(ROUND, 1))
        lines += ["", f"bytes sent by each rank once in {layout.outer.every} steps, in addition:"]
        for kind, (calls, sent) in rounds.items():
            lines.append(f"  {kind.purpose:<8}{kind.op:<15}{'+'.join(kind.axes):<13}{calls:>5} calls{sent:>18,.0f}")
    if moved:
        lines += ["", "bytes that each rank moves between the device and slower tiers in a step:"]
        lines += [f"  {k.tier:<8}{k.op:<28}{calls:>5} calls{n:>18,.0f}" for k, (calls, n) in moved.items()]
    remarks = Remarks(
        bound=bound, streams=behaviour.streams, micro_batches=micro_batches, own_step=own_step, one_pass=one_pass
    )
    return "\n".join([*lines, "", *([instead] if instead else [*_asked(bound), bound.whole.render(remark=remarks.of)])])


def _asked(bound: Bound) -> list[str]:
    """When passes run their operations in another order than is printed, as a remark."""
    if bound.overlap.order == "any":
        return [
            "# Ranks ask each other before each unit of a pass: units come in the order in which the model runs them."
        ]
    passes = ("first", "forward", "eval", "backward", "last")
    if bound.mesh.size == 1 or all(bound.sections[name] == bound.asked[name] for name in passes):
        return []
    return [
        "# Until the order of units is known, ranks ask each other before each unit of a pass: the same operations,",
        "# each unit's when one of them needs it, none ahead and none later.",
    ]


def _runs(units: Sequence[UnitSpec]) -> Iterator[tuple[str, UnitSpec]]:
    """Units that follow each other and differ in their names only, by the first one; and what to call them together."""
    for _, run in groupby(units, key=lambda unit: replace(unit, name="", blocks=unit.blocks and ("",))):
        first, *others = run
        yield f"{first.name} .. {others[-1].name}" if others else first.name, first


def usual_blocks(params: int) -> int:
    """How many blocks decoders of so many parameters have: 12 x width^2 in each, of a width of 128 times their number,
    as in 32 blocks of 4096 for 6.7e9. At least 2, at most 1,000."""
    return min(max(2, round((params / (12 * 128**2)) ** (1 / 3))), 1000)


def explain_preset(
    layout: str | Layout,
    *,
    mesh: Sizes,
    precision: str | Precision = "fp32",
    params: int = 1_000_000_000,
    blocks: int | None = None,
) -> str:
    """As :func:`explain`, for a model of ``params`` parameters with AdamW, cut into a root of 2 % and equal blocks.

    What is held does not depend on the cut, and what is sent only on the sum; what is in memory for a part of a step
    does: it is of a block or two.

    Args:
        layout: a preset's name, or a table.
        mesh: ranks along each axis.
        precision: a policy, or its name.
        params: number of parameters.
        blocks: how many blocks; None: :func:`usual_blocks`, which the first line says.

    Raises:
        LayoutError: the layout or precision is unknown, or does not fit the mesh.
    """
    policy = Precision.named(precision)
    table = named(layout)
    count = usual_blocks(params) if blocks is None else blocks
    mesh = Mesh(Mesh.of(mesh).axes, table.rare)
    ranks = mesh.divisor * mesh.groups
    each = (params - params // 50) // count
    each -= each % ranks if each > ranks else 0  # what does not come out even is the root's, so that blocks are alike
    root = params - each * count
    sizes = {"(root)": root, **dict.fromkeys((f"block.{n}" for n in range(count)), each)}
    layout = table.bind(policy, mesh)
    units = [
        UnitSpec(name, (SegmentSpec((Slot("w", (n,), 0),), -(-n // ranks) * ranks, policy.compute),), name == "(root)")
        for name, n in sizes.items()
    ]
    if table.share < 1:
        units = with_staying(units, layout, lambda _: table.near().bind(policy, mesh))
    bound = bind(layout, units, mesh, clip=True)
    instead = ""
    if count > SHOWN:
        instead = f"the program, of 2 of the {count} blocks:\n{bind(layout, units[:3], mesh, clip=True).whole}"
    held = resting_bytes(layout, units, mesh, padded=True)
    moved = moves(bound.program, layout, units, mesh, step_of(1, bound.program))
    text = explain(table, bound, held, moved=moved, instead=instead, per_host=usual_hosts(mesh))
    why = "as many as decoders of that size have; --blocks says another number" if blocks is None else "as given"
    cut = f"{count} block{'s' if count > 1 else ''} ({why})"
    return f"{params:,} parameters: {root:,} in the root, the others in {cut}\n{text}"


# -- operations that do less than their words


PASSES = ("backward", "last", "closing", "late")


@dataclass(frozen=True, kw_only=True)
class Remarks:
    """Remarks on the operations of what is bound.

    Attributes:
        bound: what runs.
        streams: whether the device has streams.
        micro_batches: of a step.
        own_step: the optimizer's own ``step()`` updates all units at once.
        one_pass: gradients are cast and multiplied, states updated and parameters cast in one compiled pass.
    """

    bound: Bound
    streams: bool
    micro_batches: int = 1
    own_step: bool = False
    one_pass: bool = False

    def of(self, section: str, op: Op) -> str:
        """Of one operation of a section; empty: it does what it says."""
        if section == "eval" and op.verb == "END" and self._stays():
            return "and what a backward would read is freed"
        unit = self.bound.by_name.get(op.unit)
        say = _SAID.get(op.verb)
        return say(self, section, op, unit.table_or(self.bound.layout)) if say is not None and unit is not None else ""

    def _stays(self) -> bool:
        """Whether a forward leaves units full for its backward."""
        tables = [unit.table_or(self.bound.layout) for unit in self.bound.units]
        return any(t.held is not None and not t.held.over and t.comes_and_goes and not t.gathers_once for t in tables)

    def _add(self, section: str, op: Op, table: Layout) -> str:
        if section == "late":
            return ""
        return "none in the first micro-batch" if self.micro_batches > 1 else "none in the only micro-batch"

    def _grads(self, section: str, op: Op, table: Layout) -> str:
        once = self.bound.overlap.reduce_once and self.micro_batches > 1 and section in ("backward", "last")
        return "in the first micro-batch of a step" if once else ""

    def _store(self, section: str, op: Op, table: Layout) -> str:
        if op.source == "log":
            return "" if self.streams else "it has come there"
        if op.source != "grads":
            return ""
        if section in PASSES:
            there = not self.streams and table.grads.tier is Tier.HOST and table.grads.over
            return "the reduction has written there" if there else ""
        return "the optimizer's own step() takes them along" if self.own_step else ""

    def _update(self, section: str, op: Op, table: Layout) -> str:
        done = "by the optimizer's own step() at STEP; here the compute-dtype copy, where there is one"
        return done if self.own_step else "in one pass with the casts and the factor" if self.one_pass else ""

    def _hold(self, section: str, op: Op, table: Layout) -> str:
        return "where the model is in training mode" if section == "eval" else ""

    def _free(self, section: str, op: Op, table: Layout) -> str:
        return "but what a step keeps" if section == "eval" and table.gathers_once else ""


_SAID: dict[str, Callable[[Remarks, str, Op, Layout], str]] = {
    "ADD": Remarks._add,
    "GRADS": Remarks._grads,
    "STORE": Remarks._store,
    "UPDATE": Remarks._update,
    "HOLD": Remarks._hold,
    "FREE": Remarks._free,
}
