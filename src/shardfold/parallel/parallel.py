"""How ranks share a model: the axes of their mesh, and what is cut along which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import TYPE_CHECKING, Any

from shardfold.errors import ConfigError
from shardfold.parallel.pipeline.costs import PieceCosts
from shardfold.parallel.plan import Given
from shardfold.plan.axes import Axis
from shardfold.plan.checks import described, known_arguments

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Parallel"]


@known_arguments
@dataclass(frozen=True, kw_only=True, repr=False)
class Parallel:
    """The mesh of the ranks, and how they share the model along its axes.

    Attributes:
        mesh: sizes of ``inter``, ``intra``, ``expert``, ``sequence``, ``tensor`` and ``pipeline``, e.g. ``{"intra":
            8}``, a list of :class:`Axis`, or a ``DeviceMesh`` of PyTorch's with all ranks and these names of dimensions
            (its process groups stay yours: the engine makes its own); None: ``intra`` is the ranks of one node. Along
            ``expert`` ranks read other samples and have other experts (see ``parallel.experts``).
        tensor: how modules are cut along the axis of tensor: ``"auto"``, by the model's own plan, or words by patterns
            of module paths, as ``{"*.q_proj": "column", "*.o_proj": "row"}``; see ``parallel.plan``. A model without a
            plan is traced by ``"auto"``, on inputs that are guessed, or on those of ``Traced(tokens)``. None: not at
            all.
        sequence_parallel: what flows between the layers that ``tensor`` cuts is divided along its sequence, over the
            same ranks: norms, dropout, residuals (arXiv 2205.05198).
        attention: how it crosses an axis of sequence: ``"ulysses"`` (by heads), ``"ring"`` (keys travel), or
            ``"auto"``, which None is too: by heads where ranks divide them. See :func:`shardfold.sequence_shard`.
        pipeline: on a mesh with an axis of pipeline, in which order its stages run the micro-batches of
            ``engine.train_batch()``: ``"1f1b"``, ``"gpipe"``, ``"zb-h1"``, or, with two stages on each rank,
            ``"interleaved:2"``, ``"looped-bfs:2"``, ``"zbv"`` or ``"v-half"`` (see ``parallel.pipeline.order``);
            ``"pipedream"`` and ``"2bw"``, which train with weights of steps before; or an order of your own, as text or
            the path of a file (see ``parallel.pipeline.text``).
        stages: paths of the modules with which stages begin, but the first; None cuts the model such that the stage
            with most parameters, tables of embeddings not counted, has as few as it can; what
            :func:`shardfold.measure_pieces` gives cuts it such that the slowest stage is as fast as it can be.

    Examples:
        >>> sf.Parallel(mesh={"tensor": 2}, tensor="auto").mesh
        {'tensor': 2}
    """

    mesh: Mapping[str, int] | Sequence[Axis] | DeviceMesh | None = None
    tensor: Given | None = None
    sequence_parallel: bool = False
    attention: str | None = None
    pipeline: str | PathLike[str] = "1f1b"
    stages: Sequence[str] | PieceCosts | None = None

    def __repr__(self) -> str:
        said = [(each, getattr(self, each.name)) for each in fields(self)]
        return f"Parallel({', '.join(f'{each.name}={value!r}' for each, value in said if value != each.default)})"

    @staticmethod
    def of(given: Any) -> Parallel:
        """What an engine's ``parallel=`` says: itself, a mesh alone, or None.

        Raises:
            ConfigError: it is a text or a class, which is none of these.
        """
        if isinstance(given, str | type):
            raise ConfigError(
                f"parallel= is {described(given)}: give a mesh, as in {{'intra': 8}}, or "
                "sf.Parallel(mesh={'tensor': 2}, tensor='auto')."
            )
        return given if isinstance(given, Parallel) else Parallel(mesh=given)
