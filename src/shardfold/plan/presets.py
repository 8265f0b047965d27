"""The names people know, as values of the table: one line and one paper each.

Every preset is derived from another with ``edit`` or ``replace``; none of them is a branch anywhere else.
"""

from __future__ import annotations

from shardfold.errors import LayoutError, did_you_mean
from shardfold.plan.checks import described
from shardfold.plan.layout import DATA_AXES, Cell, Layout, Tier, Wire

__all__ = [
    "LOSSY",
    "NAMES",
    "PRESETS",
    "ddp",
    "fsdp2",
    "hpz",
    "hsdp",
    "infinity",
    "name_of",
    "named",
    "offload",
    "zero1",
    "zero2",
    "zero3",
    "zeropp",
]

#: Everything on every rank (Li et al., arXiv 2006.15704).
ddp = Layout()
#: Optimizer states split (ZeRO, arXiv 1910.02054, section 5.1).
zero1 = ddp.edit("master", "moments", over=DATA_AXES)
#: Gradients split too, reduced as they appear (section 5.2).
zero2 = zero1.edit("grads", over=DATA_AXES)
#: Parameters split too, gathered unit by unit (section 5.3).
zero3 = zero2.edit("params", over=DATA_AXES)
#: Only the master copy rests; it is cast while it is gathered (PyTorch FSDP2's idea; arXiv 2304.11277).
fsdp2 = zero3.replace(params=None)
#: Everything split within a node and replicated between nodes (MiCS, arXiv 2205.00119; PyTorch HSDP).
hsdp = ddp.edit("params", "grads", "master", "moments", over=("intra",))
#: ``zero2`` whose gradients go to host memory, where the optimizer's states rest and are updated (ZeRO-Offload, arXiv
#: 2101.06840).
offload = zero2.edit("grads", "master", "moments", tier=Tier.HOST)
#: ``zero3`` of which nothing rests on the device: parameters come from host memory unit by unit, on one rank too
#: (ZeRO-Infinity, arXiv 2104.07857).
infinity = zero3.edit("params", "grads", "master", "moments", tier=Tier.HOST)
#: ``zero3`` with a second copy split within a node for backward (hpZ of ZeRO++, arXiv 2306.10209, section 3.2).
hpz = zero3.replace(held=Cell(dtype="compute", over=("intra",)))

#: ``hpz`` that gathers blocks of int8 and reduces blocks of int4, each in two hops (ZeRO++, sections 3.1 and 3.3).
zeropp = hpz.replace(gather=Wire(format="int8", hops=2), reduce=Wire(format="int4", hops=2))


class Presets(dict[str, Layout]):
    """Those that train as plain PyTorch does; asked for by name, it has the others too."""

    def __missing__(self, name: str) -> Layout:
        """
        Raises:
            LayoutError: the name is unknown.
        """
        return named(name)


PRESETS: dict[str, Layout] = Presets(
    ddp=ddp, zero1=zero1, zero2=zero2, zero3=zero3, fsdp2=fsdp2, hsdp=hsdp, hpz=hpz, offload=offload, infinity=infinity
)

LOSSY: dict[str, Layout] = {
    "zeropp": zeropp,
}
"""Those whose formats round what travels: they train close to plain PyTorch, where the others train as it does."""

NAMES = (*PRESETS, *LOSSY)


def named(layout: str | Layout) -> Layout:
    """The preset of that name, or the layout itself; a format behind ``+`` is its column ``base``, as in
    ``"zero3+nf4/64"``.

    Raises:
        LayoutError: the name is unknown; the message suggests the nearest.
    """
    if isinstance(layout, Layout):
        return layout
    if not isinstance(layout, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"layout= is {described(layout)}: it is a Layout or the name of one: {', '.join(NAMES)}.")
    name, _, base = layout.partition("+")
    if base and name in NAMES:
        return named(name).replace(base=base)
    if layout not in NAMES:
        raise LayoutError(f"layout {layout!r} is unknown.{did_you_mean(layout.replace('+', 'p'), NAMES)}")  # zero++
    return PRESETS.get(layout) or LOSSY[layout]


def name_of(layout: Layout) -> str | None:
    """Of the preset that has the same states and formats; None: it is none of them."""
    mine = layout.cells(), layout.gather, layout.reduce
    every = {**PRESETS, **LOSSY}.items()
    return next((name for name, each in every if (each.cells(), each.gather, each.reduce) == mine), None)
