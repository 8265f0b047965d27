"""The optimizer that ``initialize`` returns: the inner one's groups, and the engine's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.compat.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from shardfold.sharding.shard import values_of

if TYPE_CHECKING:
    from shardfold.compat.deepspeed.config import Settings
    from shardfold.engine.engine import Engine
    from shardfold.plan.report import StepReport

__all__ = [
    "BF16_Optimizer",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "EngineOptimizer",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
    "optimizer_class",
]


class EngineOptimizer(DeepSpeedOptimizer, Optimizer):
    """Shows an engine's optimizer; whatever it does, the engine does.

    Also a ``torch.optim.Optimizer``, so that any learning-rate schedule takes it.

    Attributes:
        optimizer: the inner one, as it was given or made of the config.
        report: of the last step, or None.
    """

    def __init__(self, core: Engine) -> None:  # no super().__init__: groups and state are the inner one's
        self.report: StepReport | None = None
        self.follow(core)

    def follow(self, core: Engine) -> None:
        """From now on it is this engine's."""
        assert core.optimizer is not None
        self._core = core
        self.optimizer: Optimizer = core.optimizer

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.state, "param_groups": self.param_groups}

    # -- the inner optimizer's

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner one's, the very dicts; their tensors are this rank's pieces, flat and in the master's dtype."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.defaults

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What is kept of each of this rank's pieces that has been updated, by the tensor in the groups."""
        update = self._core._updater
        assert update is not None
        found: dict[Tensor, dict[str, Any]] = {}
        for pieces in update._pieces.values():
            for piece in pieces:
                once = update.kept_once(piece.segment, piece.slot)
                each = {name: values_of(values) for name, _, values in update.stored(piece.segment, piece.slot)}
                if once.get("step", 1) and (once or each):
                    found[piece.tensor] = {**once, **each}
        return found

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters of the model that train from the next forward on."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Of this rank's pieces, in the form of PyTorch's optimizers; it loads on the same rank of the same layout.

        Checkpoints (``engine.save_checkpoint``) load under any layout and number of ranks."""
        tensors = [p for group in self.param_groups for p in group["params"]]
        number = {id(tensor): i for i, tensor in enumerate(tensors)}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [number[id(p)] for p in group["params"]]}
            for group in self.param_groups
        ]
        scaler = self._core.loss_scale
        return {
            "state": {number[id(tensor)]: kept for tensor, kept in self.state.items()},
            "param_groups": groups,
            "loss_scale": scaler.state_dict() if scaler is not None else None,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Takes what :meth:`state_dict` gave on this rank.

        Raises:
            WrongArgument: it is of other groups or pieces.
        """
        update = self._core._updater
        assert update is not None
        groups, state = state_dict["param_groups"], state_dict["state"]
        counts = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != counts:
            raise WrongArgument(
                f"optimizer.load_state_dict() was given groups of {[len(group['params']) for group in groups]} pieces "
                f"and has {counts} on this rank: states of another layout load with engine.load_checkpoint()."
            )
        tensors = [p for group in self.param_groups for p in group["params"]]
        for group, given in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in given.items() if k != "params"})
        places = {id(piece.tensor): piece for pieces in update._pieces.values() for piece in pieces}
        with torch.no_grad():
            for i, tensor in enumerate(tensors):
                piece = places[id(tensor)]
                update.forget(piece.segment, [piece.slot])
                for name, value in state.get(i, {}).items():
                    if isinstance(value, Tensor) and value.shape == tensor.shape and name != "step":
                        whole = value.new_zeros(piece.segment.spec.slots[piece.slot].numel)
                        whole[piece.segment.own_piece(piece.slot)[1]] = value
                        update.take_state(piece.segment, piece.slot, name, whole)
                    else:
                        update.take_value(piece.segment, piece.slot, name, value)
        if self._core.loss_scale is not None and state_dict.get("loss_scale") is not None:
            self._core.loss_scale.load_state_dict(state_dict["loss_scale"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients since the last step."""
        if self._core.micro_batch:
            self._core.zero_grad()

    # -- the engine's

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The update alone; ``engine.step()`` also counts it and steps the schedule."""
        if closure is not None:
            raise WrongArgument("optimizer.step(closure) is not here: run forward and engine.backward(loss) before it.")
        self.report = self._core.step()
        # What a schedule looks at to warn of being stepped first: the inner step is not what runs.
        self.optimizer._opt_called = self._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Of a loss that is taken as it is; ``engine.backward`` divides it by the number of micro-batches."""
        self._core.backward(loss, retain_graph=retain_graph)

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, on all ranks, as gradients were inf or NaN."""
        return self.report is not None and self.report.skipped

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by; 1.0 without fp16."""
        return self._core.loss_scale.scale if self._core.loss_scale is not None else 1.0

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        scaler = self._core.loss_scale
        return scaler is not None and scaler.rule.growth > 1

    def scale_if_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale."""
        return self._core.scale(loss)


class FP16_Optimizer(EngineOptimizer):  # DeepSpeed's name
    """Of stage 0 in fp16 or bf16, over an Adam that the config names."""


class FP16_UnfusedOptimizer(EngineOptimizer):  # DeepSpeed's name
    """Of stage 0 in fp16 or bf16, over any other optimizer."""


class DeepSpeedZeroOptimizer(EngineOptimizer, ZeROOptimizer):
    """Of stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(EngineOptimizer, ZeROOptimizer):  # DeepSpeed's name
    """Of stage 3.

    Attributes:
        parameter_offload: what clients take hooks off with.
    """


class BF16_Optimizer(EngineOptimizer, ZeROOptimizer):  # DeepSpeed's name
    """Of stage 1 in bf16 where gradients are accumulated in fp32 by ``data_types.grad_accum_dtype``."""


def optimizer_class(settings: Settings, inner: Optimizer) -> type[EngineOptimizer]:
    """Which class the returned optimizer is of, by the stage, the precision and the inner optimizer."""
    sixteen = settings["fp16.enabled"] or settings["bf16.enabled"]
    if settings.stage == 3:
        return DeepSpeedZeroOptimizer_Stage3
    asked = settings.origins["data_types.grad_accum_dtype"] == "given" and settings["data_types.grad_accum_dtype"]
    if settings.stage == 1 and settings["bf16.enabled"] and asked == "fp32":
        return BF16_Optimizer
    if settings.stage:
        return DeepSpeedZeroOptimizer
    if not sixteen:
        return EngineOptimizer
    if settings.optimizer is None:
        fused = type(inner).__name__ == "FusedAdam"
    else:
        name, params = settings.optimizer
        fused = name in ("Adam", "AdamW") and not params.get("torch_adam")
    return FP16_Optimizer if fused else FP16_UnfusedOptimizer
