"""The batch triad: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks."""

from __future__ import annotations

from typing import NamedTuple

from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError

__all__ = ["Batch", "solve"]

GIVEN, DERIVED, DEFAULT = "given", "derived", "default"


class Batch(NamedTuple):
    """The three numbers, and where each came from."""

    train: int
    micro: int
    accumulate: int
    origins: tuple[str, str, str]


def solve(train: int | None, micro: int | None, accumulate: int | None, ranks: int, ranks_from: str) -> Batch:
    """The third of any two; of one, with one backward per step.

    Raises:
        DeepSpeedConfigError: they do not multiply up, or neither batch size is given; every number is in the message,
            and where it came from.
    """
    if train is None and micro is None:
        raise DeepSpeedConfigError(
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given"
            + (f", only gradient_accumulation_steps = {accumulate}" if accumulate else "")
            + ": give one of them."
        )
    by_default = accumulate is None and (train is None or micro is None)
    origins = (
        DERIVED if train is None else GIVEN,
        DERIVED if micro is None else GIVEN,
        DEFAULT if by_default else DERIVED if accumulate is None else GIVEN,
    )
    if by_default:
        accumulate = 1
    if accumulate is None:
        assert train is not None and micro is not None
        accumulate = train // (micro * ranks)
    elif micro is None:
        assert train is not None
        micro = train // (accumulate * ranks)
    elif train is None:
        train = micro * accumulate * ranks
    assert train is not None and micro is not None
    batch = Batch(train, micro, accumulate, origins)
    if not batch.micro or not batch.accumulate or batch.train != batch.micro * batch.accumulate * ranks:
        raise DeepSpeedConfigError(_mismatch(batch, ranks, ranks_from))
    return batch


def _mismatch(batch: Batch, ranks: int, ranks_from: str) -> str:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    parts = [
        f"{name} = {'?' if origin == DERIVED else number} ({'to be derived' if origin == DERIVED else origin})"
        for name, number, origin in zip(names, batch[:3], batch.origins, strict=True)
    ]
    return (
        f"the batch sizes do not multiply up: {parts[0]} must be {parts[1]} x {parts[2]} x {ranks} ranks "
        f"({ranks_from}){_product(batch, ranks)}."
    )


def _product(batch: Batch, ranks: int) -> str:
    if DERIVED not in batch.origins:
        return f", which is {batch.micro * batch.accumulate * ranks}"
    others = batch.accumulate if batch.origins[1] == DERIVED else batch.micro
    return f", and {batch.train} is not a multiple of {others} x {ranks} = {others * ranks}"
