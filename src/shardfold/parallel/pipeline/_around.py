"""Buffers of the modules around the pieces, which forward writes.

Every stage runs the code around the pieces, on each micro-batch up to its own last piece. A rank with several stages
would write there once for each of them. So each has values of its own of what is written, that go from micro-batch to
micro-batch as the whole model's do; those of a rank's last stage, which runs the most of the code, are what stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

__all__ = ["Around"]


class Around:
    """What the stages of a rank write around the pieces of a model.

    Args:
        model: the whole.
        stages: of this rank.
    """

    def __init__(self, model: nn.Module, stages: Sequence[int]) -> None:
        self._model, self._last = model, max(stages)
        self._own: dict[tuple[int, str], Tensor] = {}  # by stage and name, in the batch under way
        self._under: tuple[int, Sequence[str]] = (self._last, ())
        self._kept: dict[str, Tensor] = {}  # what others' values are in the place of

    @contextmanager
    def of(self, stage: int, written: Sequence[str]) -> Iterator[None]:
        """Inside, a forward is that of a stage, which writes the buffers of these names."""
        self._under = stage, written if stage != self._last else ()
        try:
            yield
        finally:
            for name, kept in self._kept.items():
                self._own[stage, name] = self._buffers(name)[_own(name)]
                self._buffers(name)[_own(name)] = kept
            self._kept.clear()
            self._under = self._last, ()

    def attach(self) -> Callable[[], None]:
        """From now on it hears of the model's forward, until what is returned is called."""
        return self._model.register_forward_pre_hook(lambda *_: self._begin()).remove

    def _begin(self) -> None:
        """Behind the engine, which has made the values of ranks equal that read other samples."""
        stage, written = self._under
        for name in written:
            here = self._buffers(name)
            if name not in self._kept and (kept := here[_own(name)]) is not None:
                self._kept[name] = kept
                here[_own(name)] = self._own.get((stage, name), kept.clone())

    def forget(self) -> None:
        """The batch is over."""
        self._own.clear()

    def _buffers(self, name: str) -> dict[str, Tensor]:
        return self._model.get_submodule(name.rpartition(".")[0])._buffers  # pyright: ignore[reportReturnType]


def _own(name: str) -> str:
    return name.rpartition(".")[2]
