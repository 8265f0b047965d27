"""Which samples each rank reads, and a position in them that does not depend on the number of ranks.

The order of an epoch is a function of (seed, epoch, length) alone, computed where it is asked for and stored nowhere.
All ranks together walk it from front to back: a global batch is the next ``num_ranks * batch_size`` samples, each
rank's share a contiguous piece of it. So where a run stands is two numbers, the epoch and the samples of it that were
consumed, and they mean the same on any number of ranks.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils import data

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan.checks import check_flags, described, is_integer, known_arguments

__all__ = ["Loader", "Sampler", "seed_generators", "seed_of", "shuffled"]

# Of 4, 6, 8, 12, 16 and 24, chi-squared over the permutations of 6 elements (30,000 seeds) sees a bias up to 12.
ROUNDS = 16
MOST = 2**62  # samples
#: Options of ``DataLoader`` that say which samples come.
ORDER = ("batch_sampler", "batch_size", "drop_last", "generator", "sampler", "shuffle")


def shuffled(positions: npt.NDArray[np.int64], length: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Which elements stand at ``positions`` of a pseudo-random permutation of ``range(length)``.

    No table is made: time and memory are those of ``positions``, wherever they lie. The permutation is a Feistel
    network over the numbers below a * b >= length, a and b next to the root of length, whose rounds add modulo a and b,
    and what falls beyond length is permuted again until it does not: "generalized Feistel" and "cycle walking" of Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002). It shuffles, and hides nothing. The round function is
    the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).

    Args:
        positions: (n,) int64, each from 0 to ``length - 1``.
        length: at most ``MOST``.

    Returns:
        (n,) int64.
    """
    digest = hashlib.shake_256(f"{seed}/{epoch}".encode()).digest(8 * ROUNDS)
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    root = math.isqrt(length - 1) + 1
    a, b = np.uint64(root), np.uint64(-(-length // root))
    found = positions.astype(np.uint64)
    beyond = np.arange(len(found))
    while len(beyond):
        y, x = np.divmod(found[beyond], a)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            x = (x + _mixed(y ^ even)) % a
            y = (y + _mixed(x ^ odd)) % b
        found[beyond] = x + a * y
        beyond = beyond[found[beyond] >= length]
    return found.astype(np.int64)


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))) >> np.uint64(1)  # 63 bits: nothing that is added to it overflows


class _Position(NamedTuple):
    epoch: int
    consumed: int  # samples of it, by all ranks; less than the length


@known_arguments
class Sampler(data.Sampler[list[int]]):
    """This rank's batches of indices, and how far all ranks are: ``DataLoader(dataset, batch_sampler=Sampler(...))``.

    One pass over it is what is left of an epoch; the next pass is the next epoch, in another order. All ranks yield the
    same number of batches. Global batches stay the same for any number of ranks as long as ``num_ranks * batch_size``
    does; where that changes, the samples still come in the same order, each once per epoch, cut otherwise.

    If the epoch ends within a global batch, the batch is short and shared evenly: ranks differ by at most one sample.
    If fewer samples than ranks are left, it is filled from the next epoch up to one for each rank; that epoch then
    starts behind them. So each sample is in each epoch once.

    A loader with workers asks for batches ahead of the training, and moves the position with them: use a
    :class:`Loader`, or take ``batches()``, which does not move it, and call ``advance()`` after each batch that was
    used.

    Args:
        dataset: something with a length, or the length itself.
        batch_size: samples per rank and batch.
        shuffle: False reads every epoch in the order of the dataset.
        seed: of the order.
        rank, num_ranks: this data-parallel rank and how many there are; None: those of an engine's mesh that is open
            and has axes on which ranks read the same, else of ``torch.distributed``, else of
            ``torchrun``'s environment, else one. Ranks that read the same samples (tensor parallelism) give the same
            rank.
        drop_last: leaves out what is left of an epoch where it is less than a global batch; each sample is in an epoch
            at most once then.
        fill_last: fills that batch from the next epoch, which starts behind: no batch is short.

    Raises:
        ConfigError: an argument is not usable, the dataset has no length, or ``drop_last`` drops every sample.

    Examples:
        >>> sampler = sf.Sampler(10, 2, shuffle=False, rank=1, num_ranks=2)  # of rank 1 of two
        >>> list(sampler)
        [[2, 3], [6, 7], [9]]
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        num_ranks: int | None = None,
        drop_last: bool = False,
        fill_last: bool = False,
    ) -> None:
        if (rank is None) != (num_ranks is None):
            raise ConfigError(f"rank={rank!r} beside num_ranks={num_ranks!r}: give both or neither.")
        place = _rank_and_ranks() if rank is None or num_ranks is None else (rank, num_ranks)
        self.length = _length(dataset)
        self.batch_size = batch_size
        self.shuffle = shuffle
        if not is_integer(seed):
            raise ConfigError(f"the sampler's seed is {described(seed)}, but must be an integer.")
        self.seed = int(seed)
        check_flags("Sampler", shuffle=shuffle, drop_last=drop_last, fill_last=fill_last)
        self.rank, self.num_ranks = place
        self.drop_last = drop_last
        self.fill_last = fill_last
        for name, least in (("length", 1), ("batch_size", 1), ("num_ranks", 1), ("rank", 0)):
            value = getattr(self, name)
            if not is_integer(value, least):
                raise ConfigError(
                    f"the sampler's {name} is {described(value)}, but must be an integer of at least {least}."
                )
        if self.length > MOST:
            raise ConfigError(f"the sampler's length is {self.length}, but can be 2**62 at most.")
        if self.rank >= self.num_ranks:
            raise ConfigError(f"rank {self.rank} is not one of {self.num_ranks}: they count from 0.")
        if drop_last and fill_last:
            raise ConfigError("drop_last and fill_last are two ways to end an epoch: give one of them.")
        if drop_last and self.length < self.global_batch:
            raise ConfigError(
                f"drop_last drops every sample: there are {self.length}, and a global batch has {self.global_batch} "
                f"({self.num_ranks} ranks x {batch_size}); give a smaller batch_size or fill_last=True."
            )
        self._at = _Position(0, 0)

    @property
    def global_batch(self) -> int:
        """Samples per batch of all ranks together."""
        return self.num_ranks * self.batch_size

    @property
    def least(self) -> int:
        """Samples that a global batch has at least: fewer than others where one is short."""
        return self.global_batch if self.fill_last or self.drop_last else self.num_ranks

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._at.epoch

    @property
    def consumed(self) -> int:
        """Samples of that epoch that all ranks together have consumed."""
        return self._at.consumed

    def __len__(self) -> int:
        """Batches of an epoch that is read from its start."""
        return self.length // self.global_batch if self.drop_last else -(-self.length // self.global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields what :meth:`batches` does; each counts as consumed when it is handed out."""
        for batch in self.batches():
            self.advance()
            yield batch

    def batches(self) -> Iterator[list[int]]:
        """Yields this rank's batches from the present position to the end of the epoch, and does not move it."""
        at, epoch = self._at, self._at.epoch
        while at.epoch == epoch:
            yield self._share(at, self.rank)
            at = self._after(at)

    def batches_of(self, ranks: Sequence[int], of: int | None = None) -> Iterator[list[int]]:
        """Yields of each global batch what each of these ranks reads, in their order, from the present position on and
        without an end; does not move it. It is how one rank reads for several.

        Args:
            ranks: from 0 to ``num_ranks - 1``, as often as their batches are to come; ``-1 - rank``: of that one two
                samples alone.
            of: among how many ranks each global batch is shared out, evenly; None: ``num_ranks``.
        """
        at = self._at
        while True:
            for rank in ranks:
                yield self._share(at, rank, of) if rank >= 0 else self._share(at, -1 - rank)[:2]
            at = self._after(at)

    def advance(self, num_batches: int = 1) -> None:
        """Moves the position behind that many global batches.

        Raises:
            ConfigError: it is no integer >= 0.
        """
        if not is_integer(num_batches, 0):
            raise ConfigError(f"sampler.advance({described(num_batches)}): it is a number of batches, an integer >= 0.")
        for _ in range(num_batches):
            self._at = self._after(self._at)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of ``epoch``, unless it is the present one already: then the position stays.

        Not needed, as the epoch advances by itself; it is here for loops that call it.

        Raises:
            ConfigError: it is no integer >= 0.
        """
        if not is_integer(epoch, 0):
            raise ConfigError(f"set_epoch({described(epoch)}): epochs are integers that count from 0.")
        if epoch != self._at.epoch:
            self._at = _Position(int(epoch), 0)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on: plain integers and booleans, equal on all ranks."""
        return {"length": self.length, "shuffle": self.shuffle, "seed": self.seed, **self._at._asdict()}

    def share_among(self, num_ranks: int) -> None:
        """From the next batch on each global batch is cut for so many ranks, at least 1."""
        self.num_ranks, self.rank = num_ranks, min(self.rank, num_ranks - 1)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that was saved on any number of ranks, with any batch size; from the next pass on.

        Raises:
            ConfigError: it lacks an entry, or is of another length, seed or ``shuffle``; or has no such position.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping):
            raise ConfigError(f"the sampler's state is {described(state)}: load what state_dict() returned.")
        if missing := sorted(own.keys() - state.keys()):
            raise ConfigError(f"the sampler's state lacks {', '.join(missing)}: load what state_dict() returned.")
        for name in ("length", "shuffle", "seed"):
            if state[name] != own[name]:
                raise ConfigError(
                    f"the sampler's state has {name} {state[name]!r}, but this sampler {own[name]!r}: samples would "
                    "come twice or not at all; make the sampler as it was when it was saved."
                )
        for name, most in (("epoch", math.inf), ("consumed", self.length)):
            if not is_integer(state[name], 0, most):
                raise ConfigError(
                    f"the sampler's state has {name} {described(state[name])}, which is not a position: load what "
                    "state_dict() returned."
                )
        self._at = self._settled(state["epoch"], state["consumed"])

    def _size(self, at: _Position) -> int:
        """Samples of the global batch that comes next."""
        if self.fill_last or self.drop_last:
            return self.global_batch
        return max(min(self.global_batch, self.length - at.consumed), self.num_ranks)

    def _share(self, at: _Position, rank: int, of: int | None = None) -> list[int]:
        """A rank's share of the global batch that comes next; it may reach into the epochs behind."""
        size = self._size(at)
        start, stop = (at.consumed + size * each // (of or self.num_ranks) for each in (rank, rank + 1))
        share: list[int] = []
        while start < stop:
            epochs, first = divmod(start, self.length)
            number = min(stop - start, self.length - first)
            share += self._indices(np.arange(first, first + number), at.epoch + epochs).tolist()
            start += number
        return share

    def _indices(self, positions: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        """What stands at these positions of an epoch, ``(n,)``."""
        return shuffled(positions, self.length, self.seed, epoch) if self.shuffle else positions

    def _after(self, at: _Position) -> _Position:
        epochs, consumed = divmod(at.consumed + self._size(at), self.length)
        return self._settled(at.epoch + epochs, consumed)

    def _settled(self, epoch: int, consumed: int) -> _Position:
        if self.drop_last and self.length - consumed < self.global_batch:
            return _Position(epoch + 1, 0)
        return _Position(epoch, consumed)


@known_arguments
class Loader(data.DataLoader[Any]):
    """A ``DataLoader`` over a :class:`Sampler` whose position is what was handed out, however far workers are ahead.

    A batch counts as consumed when the loop gets it: save between the step on a batch and the next batch. A loop that
    was left is continued by the next one. Nothing is drawn from torch's global generator; worker processes are seeded
    by (seed, epoch, position, rank), so a random transform draws other numbers after a resume in mid-epoch than it
    would have without: draw from the index where that matters.

    Args:
        dataset: map-style; its length is the sampler's.
        sampler: whose position this loader moves.
        options: ``DataLoader``'s, but for those of order and chance: ``num_workers``, ``collate_fn``, ...

    Raises:
        ConfigError: the sampler is none or of another length, the dataset is iterable, or ``DataLoader`` does not take
            an option, or it is the sampler's.

    Examples:
        >>> data = torch.arange(10)
        >>> loader = sf.Loader(data, sf.Sampler(data, 2, shuffle=False))
        >>> [batch.tolist() for batch in loader][:2]
        [[0, 1], [2, 3]]
    """

    def __init__(self, dataset: data.Dataset[Any], sampler: Sampler, **options: Any) -> None:
        if not isinstance(sampler, Sampler):
            raise ConfigError(f"Loader: the sampler is {described(sampler)}: give a shardfold.Sampler of the dataset.")
        _check_options(options)
        if (length := _length(dataset)) != sampler.length:
            raise ConfigError(
                f"the dataset has {length} samples, its sampler {sampler.length}: make it of this dataset."
            )
        self._follows, self._ahead = sampler, _Ahead(sampler)
        self._seeds = torch.Generator()
        super().__init__(dataset, batch_sampler=self._ahead, generator=self._seeds, **options)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        for batch in self._begun(None):
            self._follows.advance()
            yield batch

    def batches_of(self, ranks: Sequence[int], of: int | None = None) -> Iterator[Any]:
        """As :meth:`Sampler.batches_of`: the batches of these ranks, without an end, and the position stays."""
        return self._begun(ranks, of)

    def _begun(self, ranks: Sequence[int] | None, of: int | None = None) -> Iterator[Any]:
        sampler = self._follows
        rank = sampler.rank if ranks is None else ranks[0]
        self._seeds.manual_seed(seed_of(sampler.seed, sampler.epoch, sampler.consumed, rank))
        self._ahead.ranks, self._ahead.of = ranks, of
        return super().__iter__()

    @property
    def follows(self) -> Sampler:
        """The sampler, whose position this loader moves."""
        return self._follows

    def state_dict(self) -> dict[str, Any]:
        """The sampler's, behind the last batch that was handed out."""
        return self._follows.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the sampler's position; the next loop starts there."""
        self._follows.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """See :meth:`Sampler.set_epoch`."""
        self._follows.set_epoch(epoch)


class _Ahead(data.Sampler[list[int]]):
    """What a ``DataLoader`` reads its sampler through: it runs ahead and leaves the position where it is."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.ranks: Sequence[int] | None = None  # for which it reads; None: for its own, to the end of an epoch
        self.of: int | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return self.sampler.batches() if self.ranks is None else self.sampler.batches_of(self.ranks, self.of)


def seed_of(*place: int) -> int:
    """A seed for a place in a run, as (seed, epoch, position, rank): 56 bits."""
    text = "/".join(map(str, place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def seed_generators(seed: int) -> None:
    """Those of ``random``, numpy and torch begin at this seed of at most 56 bits."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.manual_seed(seed)


def _check_options(options: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: ``DataLoader`` does not have an option, or it is one of order and chance.
    """
    known = {*inspect.signature(data.DataLoader).parameters} - {"dataset", *ORDER}
    for name in options:
        if name in ORDER:
            raise ConfigError(f"Loader({name}=...): the order of samples is the sampler's: give that to the Sampler.")
        if name not in known:
            raise ConfigError(f"Loader({name}=...): DataLoader has no such option.{did_you_mean(name, known)}")
    if not is_integer(workers := options.get("num_workers", 0), 0):
        raise ConfigError(f"Loader(num_workers={described(workers)}): it is a number of processes, an integer >= 0.")


def _length(dataset: Any) -> int:
    """
    Raises:
        ConfigError: it has none, or no samples by index: a position in it is not known.
    """
    if is_integer(dataset):
        return int(dataset)
    if dataset is None or isinstance(dataset, (str, bytes, bool, float)):
        raise ConfigError(f"the dataset is {described(dataset)}: give a map-style dataset, or the number of samples.")
    if isinstance(dataset, data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{type(dataset).__name__} is read from front to back and has no samples by index, of which a sampler "
            "could give each rank its own: give a map-style dataset (__len__ and __getitem__), or read yours with a "
            "plain DataLoader whose dataset yields every num_ranks-th sample, and save its position yourself."
        )
    return len(dataset)


_PLACES: WeakKeyDictionary[object, tuple[int, int]] = WeakKeyDictionary()


def ranks_read_alike(owner: object, rank: int, num_ranks: int) -> None:
    """While ``owner`` lives, some ranks read the same samples: this one as ``rank`` of ``num_ranks`` that do not."""
    _PLACES[owner] = rank, num_ranks


def ranks_read_apart(owner: object) -> None:
    """Takes back :func:`ranks_read_alike`."""
    _PLACES.pop(owner, None)


def _rank_and_ranks() -> tuple[int, int]:
    """This rank and the number of ranks: of the meshes that are open where some ranks read the same, else of all."""
    if len(known := set(_PLACES.values())) == 1:
        return known.pop()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
