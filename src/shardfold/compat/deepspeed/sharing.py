"""How an engine shares ranks out: among those of data, of sequence, of tensor and of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardfold.compat.deepspeed.config import Settings
from shardfold.compat.deepspeed.crossing import cross
from shardfold.compat.deepspeed.mpu import mark_slices
from shardfold.compat.deepspeed.ranks import NOW, Ways
from shardfold.compat.deepspeed.tensor import check_same_batch, plan_of

if TYPE_CHECKING:
    from torch import nn

    from shardfold.engine.engine import Engine

from torch import nn

from shardfold.compat.deepspeed.moe.layer import MoE
from shardfold.compat.deepspeed.refused import WrongArgument

__all__ = ["Sharing", "with_experts"]


class Sharing:
    """The part of a ``DeepSpeedEngine`` that knows which ranks are parallel in which way.

    Attributes:
        dp_world_size: ranks that read other samples.
        sequence_parallel_size: ranks that have parts of the same sequences.
        seq_dp_world_size: ranks that share parameters, which are both.
        mp_world_size: ranks that share each layer.
        data_parallel_group, seq_parallel_group, seq_data_parallel_group: of these; None: this rank alone.
        mesh_device: of ``initialize(mesh_param=...)``, or None.
        checkpoint_mp_rank: this rank's number among those that share each layer.
    """

    _core: Engine
    _settings: Settings
    _ways: Ways
    _uncross: Callable[[], None]
    _compared: bool

    def _share_out(self) -> None:
        sizes = self._settings.sizes
        ways = self._ways = NOW.enter(sizes.tensor, sizes.sequence, sizes.pipeline)
        self.dp_world_size, self.mp_world_size = ways.data, ways.tensor
        self.seq_dp_world_size, self.sequence_parallel_size = ways.data * ways.sequence, ways.sequence
        self.data_parallel_group, self.seq_data_parallel_group = ways.data_group, ways.reading_group
        self.seq_parallel_group, self.mesh_device = ways.sequence_group, NOW.mesh_device
        self.checkpoint_mp_rank = ways.tensor_rank
        self._compared, self._uncross = ways.tensor == 1, lambda: None

    def _tensor_plan(self, model: nn.Module) -> Any:
        """How the model is cut; None: not at all, or by layers of its own."""
        if self.autotp_size() > 1:
            return plan_of(model, self._settings)
        if self._ways.tensor > 1:
            mark_slices(model)
        return None

    def _cross(self, model: nn.Module) -> None:
        """Attention of the model crosses the ranks that share sequences, where it is made to."""
        if self.sequence_parallel_size > 1:
            self._uncross = cross(model, self._core)

    def _compare_batch(self, inputs: Any, options: Any) -> None:
        if not self._compared:
            self._compared = True
            check_same_batch(self._core, [inputs, options])

    def autotp_size(self) -> int:
        """How many ranks share each layer of a model that is cut by itself; 0: it is not."""
        return self._settings["tensor_parallel.autotp_size"]

    def get_data_parallel_rank(self) -> int:
        """This rank's number among those that read other samples."""
        return self._ways.data_rank

    def get_model_parallel_rank(self) -> int:
        """This rank's number among those that share each layer."""
        return self._ways.tensor_rank

    get_tensor_parallel_rank = get_model_parallel_rank

    def get_sequence_parallel_group(self) -> Any:
        """Of the ranks that have parts of the same sequences; None: this rank alone."""
        return self._ways.sequence_group


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
