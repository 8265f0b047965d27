"""What a run is carried by: the device of a rank, how long ranks wait for each other, and checks that cost time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from shardfold.plan.checks import known_arguments
from shardfold.plan.layout import Layout
from shardfold.plan.patience import usual_patience

__all__ = ["Runtime"]


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where an engine runs and how it watches over its ranks; no number of a training depends on it, but for the
    rounding of what is compiled.

    Attributes:
        device: None: this local rank's GPU, or other accelerator, if there is one, else the CPU. One without a number,
            as ``"cuda"``, is this local rank's. It becomes the current one.
        timeout: seconds until a collective that does not finish raises.
        patience: seconds until ranks that run parts of the model in contradicting orders raise, and until one that says
            nothing is named; by default what the launcher was given (``shardfold run --patience``), 10.
        debug: freed memory is filled with NaN instead, so that stale aliases show.
        checksums: each step looks whether bytes of states and of gathered parameters have changed that nobody wrote,
            and whether ranks that should have the same have it; it raises before anything is updated with them, and
            says which rank, unit and state. With copies (``survive``) it comes from a rank that has the same, and a
            step whose gradients were made with it is skipped. What rests in files is not looked at. See
            ``sharding.checksums``.
        survive: ``"rank"``: another rank holds a copy of what the optimizer has on each, where none has the same
            anyway, so that :class:`ElasticRun` goes on without one that dies; ``"host"``: one on another host does.
            Short for the column ``copies`` of the layout (see ``plan.copies``). None: as the layout says.
        exact: the gradient of each micro-batch is added to those before it by itself, in the order of ranks, and the
            norm is summed without rounding: with :meth:`ElasticRun.batches` losses and weights are the same to the bit,
            however many ranks there are. Short for ``ordered`` of the layout's ``reduce`` (see ``plan.layout.Wire``).
        compile: ``"blocks"``: the forward of each unit that is more than one layer is compiled, and units of one kind
            share a graph; ``"blocks:aot_eager"`` by another backend of ``torch.compile`` than inductor. None: nothing.

    Examples:
        >>> on_the_cpu = sf.Engine(nn.Linear(8, 8), optimizer=adam, runtime=sf.Runtime(device="cpu", timeout=60.0))
        >>> on_the_cpu.device
        device(type='cpu')
    """

    device: str | torch.device | None = None
    timeout: float = 1800.0
    patience: float = field(default_factory=usual_patience)
    debug: bool = False
    checksums: bool = False
    survive: str | None = None
    exact: bool = False
    compile: str | None = None

    def in_table(self, table: Layout) -> Layout:
        """The table with what :attr:`survive` and :attr:`exact` ask for."""
        table = table if self.survive is None else table.replace(copies=self.survive)
        return table.replace(reduce=replace(table.reduce, ordered=True)) if self.exact else table
