"""What one rank refuses, all refuse: a rank that raises alone would leave the others waiting for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardfold.comm.polling import come
from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.torch_internals import default_store

__all__ = ["RefusedElsewhere", "together"]

LIMIT = 1800.0  # seconds that a rank waits for the others to come
GRACE = 5.0  # seconds that a rank that raises stays, so that the others can read why: it may serve the store


class RefusedElsewhere(WrongArgument):
    """Another rank refused what all were about to do."""


@contextmanager
def together(call: str) -> Iterator[None]:
    """What is inside raises on every rank if it raises on any: there as it is, and elsewhere with its words.

    Nothing inside waits for other ranks. Every rank enters.

    Args:
        call: for messages.

    Raises:
        RefusedElsewhere: another rank raised.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    rank, ranks = dist.get_rank(), dist.get_world_size()
    default = default_store()
    number = default.add(f"shardfold/{call}/{rank}", 1)
    store = dist.distributed_c10d.PrefixStore(f"shardfold/{call}/{number}", default)
    keys = [str(other) for other in range(ranks)]
    try:
        yield
    except Exception as error:
        store.set(keys[rank], f"{type(error).__name__}: {error}")
        come(store, keys, GRACE)
        raise
    store.set(keys[rank], "")
    if not come(store, keys, LIMIT):
        raise RefusedElsewhere(f"{call}: not every rank came to it in {LIMIT:.0f} s.")
    for other, said in enumerate(store.get(key).decode() for key in keys):
        if said:
            raise RefusedElsewhere(f"{call} was refused on rank {other}: {said}")
