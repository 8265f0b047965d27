"""One call of one operation: what it reads and writes, computed on the CPU on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardfold.testing.simulated.device import SimulatedDevice
from shardfold.testing.simulated.memory import NAME
from shardfold.testing.simulated.nested import mapped
from shardfold.testing.simulated.signature import Signature
from shardfold.testing.simulated.special import resize
from shardfold.torch_internals import below_autograd

__all__ = ["Operation"]

INDICES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Operations that take indices of the CPU."""


class Operation:
    """One call of one operation.

    Attributes:
        reads, writes: its tensors on the device.
        outputs: its results: arguments, where it gives these back, and None for what is to be made.
        hides_generator: whether it draws random numbers and cannot be told from where.
    """

    def __init__(
        self, device: SimulatedDevice, op: Any, known: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.device, self.op, self.known = device, op, known
        self.args, self.kwargs = args, kwargs
        self.reads: list[Tensor] = []
        self.writes: list[Tensor] = []
        given = known.given(args, kwargs)
        for value, written in zip(given, known.written, strict=True):
            self._sort(value, self.writes if written else self.reads)
        self.outputs: list[Any] = [None if k is None else given[k] for k in known.aliased]
        self.hides_generator = known.random and "generator" not in known.names
        if known.random and not self.hides_generator:
            generator = self._given_generator()
            # How many numbers it draws may depend on what it reads, which is there later: then it takes one now.
            self._draws_from(_seeded(generator) if self.reads else generator)

    @property
    def name(self) -> str:
        """For people."""
        return self.known.name.removeprefix("aten::")

    def _sort(self, value: Any, into: list[Tensor]) -> None:
        if isinstance(value, Tensor):
            if value.device.type == NAME:
                into.append(value)
            elif value.dim():
                self._foreign(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._sort(item, into)

    def _foreign(self, value: Tensor) -> None:
        """A tensor of another device."""
        name = self.name
        if name in INDICES:
            self.device.host_sync(f"{name} with an index on the CPU")
            return
        self.device.findings.mix(name, self.device.here())
        raise RuntimeError(f"{name}: expected all tensors on one device, but found {NAME}:0 and {value.device}")

    # -- computing

    def compute(self) -> Any:
        """Runs it now, on the CPU; results that are no arguments are tensors of the CPU."""
        aliases: list[tuple[Tensor, Tensor]] = []

        def alias(tensor: Tensor) -> Tensor:
            aliases.append((tensor, self.device.allocator.alias(tensor)))
            return aliases[-1][1]

        with below_autograd(), self._numbers():
            got = self.op(*self.on_cpu(self.args, alias), **self.on_cpu(self.kwargs, alias))
        for tensor, bare in aliases:
            if bare.shape != tensor.shape:  # an out= that was resized
                resize(self.device, tensor, bare.shape)
                self.device.allocator.alias(tensor).copy_(bare)
        return got

    # -- random numbers

    def _given_generator(self) -> torch.Generator:
        """The argument, or the device's."""
        given = [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, torch.Generator)]
        return given[0] if given else self.device.generator

    def _draws_from(self, generator: torch.Generator) -> None:
        """Its random numbers come from there."""
        at = self.known.names.index("generator")
        if at < len(self.args):
            self.args = (*self.args[:at], generator, *self.args[at + 1 :])
        else:
            self.kwargs = {**self.kwargs, "generator": generator}

    @contextmanager
    def _numbers(self) -> Iterator[None]:
        """Inside, the CPU's generator, which some operations draw from whatever they are given, is the device's."""
        if not self.hides_generator:
            yield
            return
        before = torch.get_rng_state()
        torch.set_rng_state(self.device.generator.get_state())
        try:
            yield
        finally:
            self.device.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)

    @staticmethod
    def on_cpu(values: Any, alias: Callable[[Tensor], Tensor]) -> Any:
        """The values with tensors and devices of the CPU in the place of ours."""
        return mapped(partial(_of_other_device, alias=alias, other=torch.device("cpu")), values)

    @staticmethod
    def on_meta(values: Any) -> Any:
        """The values with tensors and devices that have shapes only."""
        values = mapped(lambda value: None if isinstance(value, torch.Generator) else value, values)
        return mapped(partial(_of_other_device, alias=_shape, other=torch.device("meta")), values)

    # -- results

    @property
    def single(self) -> bool:
        """Whether its result is no tuple."""
        return len(self.known.aliased) == 1

    def as_results(self, got: Any) -> Any:
        """By result."""
        return (got,) if self.single else got

    def finish(self, got: Any) -> Any:
        """Gives computed results memory of the device."""
        if not self.known.aliased:
            return None
        results, made = self.as_results(got), list[Tensor]()
        for k in self.known.fresh:
            self.outputs[k] = mapped(lambda value: self._moved(value, made), results[k])
        if made:
            self.device.note(self.name, [], made)
        return self.result

    def _moved(self, value: Any, made: list[Tensor]) -> Any:
        if not isinstance(value, Tensor):
            return value
        out = self.device.allocate(value.shape, value.stride(), value.dtype)
        self.device.allocator.alias(out).copy_(value)
        made.append(out)
        return out

    @property
    def result(self) -> Any:
        return self.outputs[0] if self.single else tuple(self.outputs)


def _seeded(generator: torch.Generator) -> torch.Generator:
    """Another one, which one number of this one decides."""
    seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
    return torch.Generator().manual_seed(int(seed))


def _of_other_device(value: Any, alias: Callable[[Tensor], Tensor], other: torch.device) -> Any:
    if isinstance(value, Tensor):
        return alias(value) if value.device.type == NAME else value
    return other if isinstance(value, torch.device) and value.type == NAME else value


def _shape(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
