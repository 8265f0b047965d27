"""The loader that ``initialize(training_data=...)`` returns, and one that begins again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from shardfold.compat.deepspeed.comm import get_rank, get_world_size
from shardfold.compat.deepspeed.refused import WrongArgument

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]


class RepeatingLoader:
    """An iterator over a loader that begins again when the loader is at its end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """Micro-batches of this rank's share of a dataset.

    Args:
        dataset: of map or iterable style.
        batch_size: samples of a micro-batch on this rank.
        pin_memory: for a GPU.
        local_rank: whether it is -1 is not asked: every rank has its share.
        tput_timer: started with each batch, if given.
        collate_fn: makes a batch of samples; None: PyTorch's.
        num_local_io_workers: processes that read.
        data_sampler: None: a ``DistributedSampler``, which shuffles; call its ``set_epoch`` for another order.
        data_parallel_world_size, data_parallel_rank: whose share it is; None: of ``torch.distributed``.
        dataloader_drop_last: whether an incomplete last batch is left out.
        deepspeed_dataloader_config: is not read.

    Attributes:
        post_process_func: called with each batch and the sampler's state, if set; gives the batch that is used.

    Raises:
        WrongArgument: it is no dataset.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool = False,
        local_rank: int = 0,
        tput_timer: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Any = None,
    ) -> None:
        stream = isinstance(dataset, IterableDataset)
        if not stream and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise WrongArgument(
                f"initialize(training_data=...) was given a {type(dataset).__name__}: give a torch Dataset."
            )
        if data_sampler is None and not stream:
            data_sampler = DistributedSampler(
                dataset,
                get_world_size() if data_parallel_world_size is None else data_parallel_world_size,
                get_rank() if data_parallel_rank is None else data_parallel_rank,
            )
        self.dataset, self.batch_size = dataset, batch_size
        self.data_sampler: Any = data_sampler
        self.collate_fn, self.tput_timer = collate_fn, tput_timer
        self.post_process_func: Callable[[Any, Any], Any] | None = None
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler,
            collate_fn=collate_fn,
            drop_last=dataloader_drop_last,
            pin_memory=pin_memory,
            num_workers=num_local_io_workers or 0,
        )
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> DeepSpeedDataLoader:
        self._batches = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self.dataloader)
        if self.tput_timer is not None:
            self.tput_timer.start()
        batch = next(self._batches)
        if self.post_process_func is not None:
            state = self.data_sampler.state_dict() if hasattr(self.data_sampler, "state_dict") else {}
            batch = self.post_process_func(batch, state)
        return batch
