"""``deepspeed.runtime.pipe.topology``: ranks as a grid with named axes, and the groups along them. Arithmetic only."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

from shardfold.compat.deepspeed.comm import world

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]


class ProcessTopology:
    """Ranks and their coordinates; along the last axis they are neighbours.

    Args:
        axes: their names.
        dims: how many ranks there are along each.

    Attributes:
        ProcessCoord: a namedtuple with a field for each axis.
        mapping: ``{coordinates: rank}``.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = axes, dims
        self.ProcessCoord: Any = namedtuple("ProcessCoord", axes)
        self.mapping: dict[Any, int] = {
            self.ProcessCoord(*place): rank for rank, place in enumerate(product(*map(range, dims)))
        }

    def __str__(self) -> str:
        return str(self.mapping)

    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.mapping)

    def get_axis_names(self) -> Sequence[str]:
        """The names of the axes, in order."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """How many ranks there are along an axis; 0 of an axis that is not there."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at the coordinates, one for each axis.

        Raises:
            ValueError: not every axis has one; :meth:`filter_match` takes some of them.
            AssertionError: they are outside of the grid.
        """
        if len(coord_kwargs) != len(self.axes):
            raise ValueError(f"get_rank() takes each of {', '.join(self.axes)}; filter_match() takes some of them.")
        place = self.ProcessCoord(**coord_kwargs)
        if place not in self.mapping:
            raise AssertionError(f"key {coord_kwargs} invalid: the grid has {self._said()}.")
        return self.mapping[place]

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank.

        Raises:
            ValueError: there is no such rank.
        """
        for place, number in self.mapping.items():
            if number == rank:
                return place
        raise ValueError(f"rank {rank} not found in topology: the grid has {self._said()}.")

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A rank's coordinates as a part of a file's name: ``"model_01"``."""
        place = self.get_coord(rank)._asdict()
        return outer_sep.join(f"{a}{inner_sep}{i:02d}" for a, i in place.items() if a not in omit_axes)

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks with these coordinates, whatever the others are."""
        wanted = filter_kwargs.items()
        return [n for place, n in self.mapping.items() if all(getattr(place, axis) == i for axis, i in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at one place of an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ in an axis alone; none of an axis that is not there."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        places = product(*(range(self.get_dim(name)) for name in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]

    def _said(self) -> str:
        return ", ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.dims, strict=True))


class PipeDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, and data-parallel ranks that are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, data-parallel ranks, and tensor-parallel ones that are neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """Where this rank is in a grid, and its process groups along each axis; every rank makes it at once.

    Args:
        topology: the grid; None: the prime factors of the number of ranks, to stages and data-parallel ranks in turn.
        process_group: all ranks' alone.

    Raises:
        AssertionError: the grid has another number of ranks than there are.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank, self.world_size = world.get_rank(), world.get_world_size()
        self._topo = topology if topology is not None else _squarish(self.world_size)
        if self._topo.world_size() != self.world_size:
            raise AssertionError(
                f"Invalid Grid: it has {self._topo.world_size()} ranks ({self._topo._said()}), and there are "
                f"{self.world_size}."
            )
        sizes = {axis: max(self._topo.get_dim(axis), 1) for axis in ("data", "pipe", "model")}
        self.data_parallel_size, self.pipe_parallel_size, self.model_parallel_size = sizes.values()
        self.slice_parallel_size = self.model_parallel_size
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1

        models = [sorted(self._topo.get_axis_list("data", i)) for i in range(self.data_parallel_size)]
        own, self.ds_model_proc_group = self._join(models)
        self.ds_model_world_size, self.ds_model_rank = len(own), own.index(self.global_rank)
        self.dp_groups = self._topo.get_axis_comm_lists("data")
        self.dp_group, self.dp_proc_group = self._join(self.dp_groups)
        self.pipe_groups = self._topo.get_axis_comm_lists("pipe")
        self.pp_group, self.pp_proc_group = self._join(self.pipe_groups)
        self.p2p_groups = self._neighbours()
        if self.model_parallel_size > 1:
            self.mp_group: list[int] = []
            self.model_groups = self._topo.get_axis_comm_lists("model")
            self.slice_group, self.slice_proc_group = self._join(self.model_groups)
        else:
            self.slice_group, self.slice_proc_group = self._join([[rank] for rank in range(self.world_size)])

    def _join(self, groups: list[list[int]]) -> tuple[list[int], Any]:
        """Makes process groups of lists of ranks; this rank's list and group."""
        made = [(ranks, world.new_group(ranks)) for ranks in groups]
        return next((ranks, group) for ranks, group in made if self.global_rank in ranks)

    def _neighbours(self) -> list[list[int]]:
        """Of each rank: itself and the one of the next stage, behind the last the first."""
        following = {rank: ranks[(i + 1) % len(ranks)] for ranks in self.pipe_groups for i, rank in enumerate(ranks)}
        return [[rank, following[rank]] for rank in range(self.world_size)]

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineParallelGrid:
        return self  # groups are not copied

    def topology(self) -> ProcessTopology:
        """The grid."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of a stage with this rank's other coordinates, or those given."""
        here = self._topo.get_coord(self.global_rank)
        return self._topo.get_rank(**here._replace(pipe=stage_id, **kwargs)._asdict())

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_stage_id(self) -> int:
        """Of this rank."""
        return self._topo.get_coord(self.global_rank).pipe

    def get_data_parallel_id(self) -> int:
        """Which of the pipelines this rank is in."""
        return self._topo.get_coord(self.global_rank).data

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id
    get_data_parallel_rank = get_data_parallel_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_pipe_parallel_group(self) -> Any:
        """The stages of this rank's pipeline."""
        return self.pp_proc_group

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """The same stage of all pipelines."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """All ranks that have one copy of the model between them."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """Along the axis ``model``; 0 without one."""
        return getattr(self._topo.get_coord(self.global_rank), "model", 0)

    def get_slice_parallel_world_size(self) -> int:
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        return self.slice_proc_group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size


def _squarish(ranks: int) -> ProcessTopology:
    sizes, turn, factor = [1, 1], 0, 2
    while ranks > 1:
        if ranks % factor:
            factor += 1
        else:
            sizes[turn], ranks, turn = sizes[turn] * factor, ranks // factor, 1 - turn
    return PipeDataParallelTopology(*sizes)
