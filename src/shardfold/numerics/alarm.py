"""What each step notices of inf and NaN by itself, and what it then says.

Steps that are finite pay for nothing but a look at the losses on the host and one byte in a reduction that there is
anyway. Whatever costs more comes after something was noticed: all ranks look for its place together, and a
:class:`ActivationWatch` of the modules' outputs is opened once lowering the loss scale has not helped.
"""

from __future__ import annotations

from itertools import groupby
from logging import getLogger
from math import isfinite

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.errors import NonFiniteError
from shardfold.numerics.clipping import Clip
from shardfold.numerics.forensics import ActivationWatch, NumericsReport, examine
from shardfold.numerics.scaling import Scaler
from shardfold.sharding.model import ShardedModel

__all__ = ["Alarm"]

LOG = getLogger("shardfold")


class Alarm:
    """Of one engine.

    Attributes:
        report: what was found in the last step, None if it was finite.
        watch: of the outputs of modules, the user's or the alarm's own.
    """

    def __init__(self, model: ShardedModel, scaler: Scaler | None, clip: Clip | None) -> None:
        self._model, self._scaler, self._clip = model, scaler, clip
        self._losses: dict[int, Tensor] = {}  # of the micro-batches since the last step, as engine.backward() got them
        self._values: dict[int, float] = {}  # of those losses that were read
        self._attempt = -1
        self._rung = False  # in the step before, with no loss scale
        self.watch: ActivationWatch | None = None
        self._own: ActivationWatch | None = None  # ours, not the user's
        self.report: NumericsReport | None = None
        self._num_examined = 0

    def note(self, loss: Tensor) -> None:
        """A micro-batch's loss, a tensor of one element."""
        if self._attempt != self._model.run.attempt:
            self._attempt = self._model.run.attempt
            self._losses.clear()
            self._values.clear()
        self._losses[self._model.run.micro_batch] = loss.detach()
        self._values.pop(self._model.run.micro_batch, None)

    def hear(self, watch: ActivationWatch | None) -> None:
        """See :class:`Notes`."""
        self.watch = watch

    def count(self) -> int:
        self._num_examined += 1
        return self._num_examined

    def bad_losses(self) -> list[int]:
        """The micro-batches since the last step whose loss on this rank is inf or NaN."""
        return [micro for micro, finite in self._known().items() if not finite]

    def good_losses(self) -> list[int]:
        """Those whose loss is finite."""
        return [micro for micro, finite in self._known().items() if finite]

    def _known(self) -> dict[int, bool]:
        current = self._attempt == self._model.run.attempt
        if not current:
            return {}
        self.read()
        return {micro: isfinite(value) for micro, value in self._values.items()}

    def read(self, beside: Tensor | None = None) -> float:
        """Reads the losses that were not read yet and, ``beside`` them, a 0-d number, whose value is returned (0.0 if
        there is none). Of each device once, because that stops the host until the device has come so far."""
        asked: dict[int | None, Tensor] = {k: loss for k, loss in self._losses.items() if k not in self._values}
        if beside is not None:
            asked[None] = beside
        values: dict[int | None, float] = {}
        for device in dict.fromkeys(each.device for each in asked.values()):
            here = {k: each.double().reshape(()) for k, each in asked.items() if each.device == device}
            values.update(zip(here, torch.stack(list(here.values())).tolist(), strict=True))
        self._values.update((micro, value) for micro, value in values.items() if micro is not None)
        return values.get(None, 0.0)

    def raised(self) -> bool:
        """Whether a loss of this rank is not finite. On a GPU that would wait for the device, so the answer is False
        where no loss scale waits for it anyway."""
        waits = not accelerator.has_streams(self._model.device) or self._scaler is not None
        return waits and bool(self.bad_losses())

    def look(self, *, overflowed: bool, raised: bool) -> None:
        """Before an update: gradients overflowed on some rank under a loss scale, a loss of some rank is not finite;
        every rank calls it with the same."""
        scaler, clip = self._scaler, self._clip
        self.report = None
        if overflowed and scaler is not None:
            self.report = self.examine(only_gradients=not scaler.last_chance)
        elif raised and not (clip is not None and clip.error_if_nonfinite):
            self.report = self.examine()
            if self._model.rank == 0 and not self._rung:
                LOG.warning(
                    "%s. The step is done all the same, as there is no loss scale that would skip it, and weights that "
                    "become inf or NaN stay so: a checkpoint from before brings finite ones back. "
                    "Clip(norm=..., error_if_nonfinite=True) would raise instead.",
                    self.report.first,
                )
        self._rung = raised and not overflowed

    def settle(self) -> None:
        """After a step under a loss scale: watches the modules while the scale cannot be lowered any more."""
        scaler = self._scaler
        if scaler is None or not scaler.stuck:
            self.close()
        elif self.watch is None:
            self._own = ActivationWatch.over(self._model, self)

    def examine(self, *, only_gradients: bool = False) -> NumericsReport:
        """Looks at everything; all ranks are known to be at the same place."""
        return examine(self._model, self, only_gradients=only_gradients)

    def close(self) -> None:
        """Ends the alarm's own watch."""
        if self._own is not None:
            self._own.close()
            self._own = None

    def failure(self) -> NonFiniteError:
        """What to raise where lowering the scale is not the remedy; the same sentence on every rank."""
        model, scaler, report = self._model, self._scaler, self.report
        assert scaler is not None and report is not None
        floor = f"{scaler.rule.floor:g}"
        runs = [(scale, len(list(run))) for scale, run in groupby(scaler.last_scales)]
        scales = ", ".join(f"{scale:g}" + (f" ({count} times)" if count > 1 else "") for scale, count in runs)
        rates = sorted({float(group["lr"]) for group in model.optimizer.param_groups}) if model.optimizer else []
        kinds = {finding.kind for finding in report.findings}
        said = (
            f"step {model.run.steps + 1}: gradients were inf or NaN {scaler.stuck} times in a row although the loss "
            f"scale is at its floor of {floor} (it was {scales}): {report.first}. "
        )
        if kinds & {"parameter", "buffer"}:
            said += "Skipped steps change no weights, so they were so before: load values that are finite."
        elif "loss" in kinds:
            said += (
                "The loss itself does not depend on the scale: unless the batches have inf, weights have grown until "
                "forward overflows. Go back to weights of before, with a tenth of the learning rate (now "
                f"{', '.join(f'{rate:g}' for rate in rates)}; under a schedule of its peak)."
            )
        else:
            said += (
                f"The loss is finite, so gradients times {floor} are more than fp16 can hold: let the scale fall "
                "further with loss_scale=LossScale(floor=2.0**-14), or use precision='bf16'."
            )
        return NonFiniteError(f"{said}\n{report.table()}")
