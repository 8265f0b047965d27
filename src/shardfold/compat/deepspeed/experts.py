"""The axis of experts that a model's layers of ``MoE`` ask for."""

from __future__ import annotations

from torch import nn

from shardfold.compat.deepspeed.moe.layer import MoE
from shardfold.compat.deepspeed.refused import WrongArgument

__all__ = ["with_experts"]


def with_experts(mesh: dict[str, int] | None, model: nn.Module) -> dict[str, int] | None:
    """The sizes of an engine's mesh, with an axis of experts where the model's layers ask for one.

    Raises:
        WrongArgument: they ask for other sizes.
    """
    sizes = {module.ep_size for module in model.modules() if isinstance(module, MoE)} - {1}
    if len(sizes) > 1:
        raise WrongArgument(
            f"layers of MoE have ep_size {' and '.join(map(str, sorted(sizes)))}: there is one axis of experts; give "
            "all layers the same."
        )
    return {**(mesh or {}), "expert": sizes.pop()} if sizes else mesh
