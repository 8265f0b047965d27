"""How large batches are, and the loader that makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset

from shardfold.compat.deepspeed.config import DeepSpeedConfig, Settings
from shardfold.compat.deepspeed.ranks import NOW, Ways
from shardfold.compat.deepspeed.refused import WrongArgument, WrongCall
from shardfold.compat.deepspeed.runtime.dataloader import DeepSpeedDataLoader

if TYPE_CHECKING:
    from shardfold.compat.deepspeed.utils.timer import ThroughputTimer
    from shardfold.engine.engine import Engine

__all__ = ["Batches"]


class Batches:
    """The part of a ``DeepSpeedEngine`` that tells and changes the batch triad."""

    _core: Engine
    _settings: Settings
    _config: DeepSpeedConfig
    _ways: Ways
    local_rank: int
    tput_timer: ThroughputTimer
    collate_fn: Callable[[list[Any]], Any] | None
    training_dataloader: DeepSpeedDataLoader | None

    def _tell_boundary(self) -> None:
        raise NotImplementedError

    def _divide_by(self, accumulate: int) -> None:
        """So many micro-batches are in a step, or losses come divided by their number."""
        self._core.accumulate = accumulate
        if self._settings["gradient_allreduce_op"] == "sum":
            handlers = self._core._runner.handlers
            handlers.set_scale(handlers.scale * self._core.mesh.data_ranks)
            self._core._runner.handlers.set_factors()

    def train_batch_size(self) -> int:
        """Samples per update on all ranks."""
        assert self._config.train_batch_size is not None
        return self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and backward."""
        assert self._config.train_micro_batch_size_per_gpu is not None
        return self._config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._core.accumulate

    def get_batch_info(self) -> tuple[int, int, int]:
        """``train_batch_size``, ``train_micro_batch_size_per_gpu``, ``gradient_accumulation_steps``."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of micro-batches per update; their size stays. The next update has the new number.

        Raises:
            WrongArgument: a ``ValueError``: it is no multiple of the ranks' micro-batches.
            WrongCall: there are gradients of an update that has begun, divided by the old number.
        """
        ranks = self._settings.world_size
        part = self.train_micro_batch_size_per_gpu() * ranks
        if train_batch_size <= 0 or train_batch_size % part:
            raise WrongArgument(
                f"engine.set_train_batch_size({train_batch_size}): it must be divisible by the micro-batches of all "
                f"ranks, {self.train_micro_batch_size_per_gpu()} x {ranks} = {part}."
            )
        if (begun := self._core.micro_batch) and train_batch_size // part != self._core.accumulate:
            raise WrongCall(
                f"engine.set_train_batch_size({train_batch_size}) while gradients of {begun} of the "
                f"{self._core.accumulate} micro-batches of an update are there, which were divided by that number: "
                "call it behind the step() that updates, or engine.zero_grad() first."
            )
        self._config.train_batch_size = train_batch_size
        self._config.gradient_accumulation_steps = train_batch_size // part
        self._divide_by(train_batch_size // part)
        self._tell_boundary()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the size of micro-batches, and with it that of the batch; their number stays."""
        self._config.train_micro_batch_size_per_gpu = micro_batch_size
        self._config.train_batch_size = micro_batch_size * self._core.accumulate * self._settings.world_size

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader of this rank's share of a dataset; ranks that share layers, or sequences by other means than
        ``UlyssesSPDataLoaderAdapter``, read the same.

        Args:
            dataset: of map or iterable style.
            batch_size: None: the micro-batch's.
            route: ``"train"`` shuffles; ``"eval"`` and ``"predict"`` do not.
            pin_memory: for a GPU.
            data_sampler: None: PyTorch's ``DistributedSampler``.
            collate_fn: None: the one given to ``initialize``, or PyTorch's.
            num_local_io_workers: processes that read.
        """
        ways = self._ways
        apart = NOW.sharing > 1  # the adapter wants a batch of each rank
        ranks = (ways.data * ways.sequence, ways.reading_rank) if apart else (ways.data, ways.data_rank)
        if data_sampler is None and route != "train":
            data_sampler = DistributedSampler(dataset, *ranks, shuffle=False)
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            data_parallel_world_size=ranks[0],
            data_parallel_rank=ranks[1],
            collate_fn=collate_fn or self.collate_fn,
            data_sampler=data_sampler,
            local_rank=self.local_rank,
            dataloader_drop_last=self._settings.drop_last,
            tput_timer=self.tput_timer if route == "train" else None,
            pin_memory=pin_memory and torch.cuda.is_available(),
            num_local_io_workers=num_local_io_workers,
        )

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        """Whether it has ``__getitem__`` and ``__len__``."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        """Whether it is an ``IterableDataset``."""
        return isinstance(obj, IterableDataset)

    def set_data_post_process_func(self, post_process_func: Callable[[Any, Any], Any]) -> None:
        """Of the training loader: called with each batch."""
        if self.training_dataloader is not None:
            self.training_dataloader.post_process_func = post_process_func
