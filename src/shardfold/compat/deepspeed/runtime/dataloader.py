"""The loader that ``initialize(training_data=...)`` returns, and one that begins again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

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
        collate_fn: makes a batch of samples; None: PyTorch's.
        data_sampler: None: a ``DistributedSampler``, which shuffles; call its ``set_epoch`` for another order.
        drop_last: whether an incomplete last batch is left out.
        world_size, rank: whose share it is.

    Attributes:
        post_process_func: called with each batch and the sampler's state, if set; gives the batch that is used.

    Raises:
        WrongArgument: it is no dataset.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        world_size: int,
        rank: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        data_sampler: Any = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
    ) -> None:
        stream = isinstance(dataset, IterableDataset)
        if not stream and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise WrongArgument(
                f"initialize(training_data=...) was given a {type(dataset).__name__}: give a torch Dataset."
            )
        if data_sampler is None and not stream:
            data_sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
        self.dataset, self.batch_size = dataset, batch_size
        self.data_sampler: Any = data_sampler
        self.collate_fn = collate_fn
        self.post_process_func: Callable[[Any, Any], Any] | None = None
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset, batch_size=batch_size, sampler=data_sampler, collate_fn=collate_fn, drop_last=drop_last,
            pin_memory=pin_memory, num_workers=num_workers,
        )  # fmt: skip
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> DeepSpeedDataLoader:
        self._batches = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self.dataloader)
        batch = next(self._batches)
        if self.post_process_func is not None:
            state = self.data_sampler.state_dict() if hasattr(self.data_sampler, "state_dict") else {}
            batch = self.post_process_func(batch, state)
        return batch
