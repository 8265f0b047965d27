"""``deepspeed.runtime.pipe.schedule``: what a stage of a pipeline does at which step. Arithmetic only.

The engine runs orders of its own (see :mod:`shardfold.parallel.pipeline.stage_order`), of which 1F1B is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from shardfold.compat.deepspeed.lazy import attach
from shardfold.compat.deepspeed.runtime.utils import call_to_str

__all__ = [
    "BackwardPass",
    "BufferOpInstruction",
    "CommitP2P",
    "DataParallelSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
]


class PipeInstruction:
    """One thing that a stage does. What it is given by keyword is its attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """Updates the weights."""


class ReduceGrads(PipeInstruction):
    """Reduces gradients over the data-parallel ranks of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Reduces gradients of weights that several stages share."""


class CommitP2P(PipeInstruction):
    """Starts the sends and receives that were queued."""


class BufferOpInstruction(PipeInstruction):
    """One that reads or writes a buffer of a micro-batch."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Reads inputs or labels."""


class ForwardPass(BufferOpInstruction):
    """Forward of the stage."""


class BackwardPass(BufferOpInstruction):
    """Backward of the stage."""


class SendActivation(BufferOpInstruction):
    """To the next stage."""


class RecvActivation(BufferOpInstruction):
    """From the stage before."""


class SendGrad(BufferOpInstruction):
    """To the stage before, of the activations that it sent."""


class RecvGrad(BufferOpInstruction):
    """From the next stage, of the activations that this one sent."""


class PipeSchedule(ABC):
    """Iterates over steps; each is a list of instructions.

    Args:
        micro_batches: of one batch.
        stages: of the pipeline.
        stage_id: whose steps these are.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.it: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The steps, from the first to the last."""

    def num_pipe_buffers(self) -> int:
        """How many micro-batches' activations the stage has at once."""
        return self.micro_batches

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        self.it = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self.it is None:
            self.it = self.steps()
        return next(self.it)

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """Buffers are used in turn."""
        assert self._valid_micro_batch(micro_batch_id)
        return micro_batch_id % self.num_pipe_buffers()


class DataParallelSchedule(PipeSchedule):
    """One stage: forward and backward of each micro-batch, then the update."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for i in range(self.micro_batches):
            last: list[PipeInstruction] = [ReduceGrads(), OptimizerStep()] if i == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *last]

    def num_pipe_buffers(self) -> int:
        return 1


class InferenceSchedule(PipeSchedule):
    """Forward alone: at each step a micro-batch goes on by a stage."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            here = step - self.stage_id  # the micro-batch
            comes, goes = self._valid_micro_batch(here), self._valid_micro_batch(here - 1)
            done: list[PipeInstruction] = []
            if comes and (self.is_first_stage or self.is_last_stage):
                done.append(LoadMicroBatch(self._place(step)))
            sends = [SendActivation(1 - self._place(step))] if goes and not self.is_last_stage else []
            receives = [RecvActivation(self._place(step))] if comes and not self.is_first_stage else []
            # Neighbours pair up: one sends while the other receives.
            done += [*sends, *receives] if self.stage_id % 2 == 0 else [*receives, *sends]
            if comes:
                done.append(ForwardPass(self._place(step)))
            yield done

    def _place(self, step: int) -> int:
        return (step + self.stage_id) % 2

    def num_pipe_buffers(self) -> int:
        return 2


class TrainSchedule(PipeSchedule):
    """Each stage alternates between a forward and a backward, so that it keeps no more activations than it has to."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        total = 2 * (self.micro_batches + self.stages - 1)
        before = -1
        for step in range(total):
            here, forward = self._step_to_micro_batch(step)
            current = self._buffer_idx(here) if self._valid_micro_batch(here) else None
            previous = self._buffer_idx(before) if self._valid_micro_batch(before) else None
            yield [*self._exchange(forward, current, previous), *self._work(forward, current), *self._end(step, total)]
            before = here

    def num_pipe_buffers(self) -> int:
        """The stages from here on, but 2 at least, and no more than there are micro-batches."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """Which micro-batch (outside of the batch: none) goes forward (True) or backward at a step."""
        if (step_id - self.stage_id) % 2 == 0:
            return (step_id - self.stage_id) // 2, True
        return (step_id + self.stage_id + 1) // 2 - self.stages, False

    def _exchange(self, forward: bool, current: int | None, previous: int | None) -> list[PipeInstruction]:
        """With the stage before in front of a forward, with the next one in front of a backward."""
        done: list[PipeInstruction] = []
        if forward and not self.is_first_stage:
            done += [SendGrad(previous)] if previous is not None else []
            done += [RecvActivation(current)] if current is not None else []
        if not forward and not self.is_last_stage:
            done += [RecvGrad(current)] if current is not None else []
            done += [SendActivation(previous)] if previous is not None else []
        return done

    def _work(self, forward: bool, current: int | None) -> list[PipeInstruction]:
        if current is None:
            return []
        if not forward:
            return [BackwardPass(current)]
        loads = self.is_first_stage or self.is_last_stage
        return [*([LoadMicroBatch(current)] if loads else []), ForwardPass(current)]

    def _end(self, step: int, total: int) -> list[PipeInstruction]:
        return [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()] if step == total - 1 else []


__getattr__, __dir__ = attach(__name__)
