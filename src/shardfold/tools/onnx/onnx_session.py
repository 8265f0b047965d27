"""A model of ONNX under ONNX Runtime: steps of a decoder, greedy texts, and what an evaluation asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardfold.tools.onnx._layer_graph import past_names

__all__ = ["DecoderSteps", "OnnxSession", "continuations", "positions_of"]

Array = npt.NDArray[Any]


class DecoderSteps(Protocol):
    """A decoder that is asked step by step."""

    def step(self, ids: Tensor, mask: Tensor, past: Any) -> tuple[Tensor, Any]:
        """Logits (B, L, vocabulary) of `ids` (B, L), and what the next step takes as `past`; None: nothing is before.

        `mask` (B, P + L) is 1 where a token is, past ones included, and 0 where one is missing in front.
        """
        ...


def positions_of(mask: Tensor, length: int) -> Tensor:
    """Positions of the last `length` tokens (B, L): those that are missing in front do not count."""
    return (mask.cumsum(-1) - 1).clamp(min=0)[:, -length:]


class OnnxSession:
    """A model of ONNX.

    Args:
        path: of the graph; its weights lie beside it.
        threads: of ONNX Runtime; 0: as many as there are cores.
    """

    def __init__(self, path: Path, threads: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3  # warnings are about optimizations that were not made
        self.session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs: dict[str, list[Any]] = {value.name: value.shape for value in self.session.get_inputs()}
        self.outputs: list[str] = [value.name for value in self.session.get_outputs()]

    @property
    def num_layers(self) -> int:
        """Layers whose keys and values are kept."""
        return sum(name.startswith("past_key_values.") and name.endswith(".key") for name in self.inputs)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All outputs; what the model does not take is left out."""
        given = {name: value.numpy() for name, value in inputs.items() if name in self.inputs}
        found: Sequence[Array] = self.session.run(None, given)
        return dict(zip(self.outputs, map(torch.from_numpy, found), strict=True))

    def step(self, ids: Tensor, mask: Tensor, past: Any) -> tuple[Tensor, Any]:
        """See :class:`DecoderSteps`."""
        if past is None:
            past = [
                torch.zeros(len(ids), self.inputs[name][1], 0, self.inputs[name][3])
                for layer in range(self.num_layers)
                for name in past_names(layer)
            ]
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions_of(mask, ids.shape[1])}
        names = [name for layer in range(self.num_layers) for name in past_names(layer)]
        found = self.run(inputs | dict(zip(names, past, strict=True)))
        logits, *present = found.values()
        return logits, present

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of whole texts, as an evaluation asks for them."""
        ids = inputs["input_ids"]
        return self.step(ids, torch.ones_like(ids), None)[0]


def continuations(
    model: DecoderSteps, prompts: Sequence[Sequence[int]], count: int
) -> tuple[list[list[int]], npt.NDArray[np.float32]]:
    """Greedy texts of prompts that may differ in length, all at once; none ends before `count` tokens.

    Returns:
        The tokens behind each prompt, and how far the likeliest was above the second, (prompts, count).
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    past: Any = None
    tokens: list[Tensor] = []
    gaps: list[Tensor] = []
    with torch.no_grad():
        for _ in range(count):
            logits, past = model.step(ids, mask, past)
            best = logits[:, -1].float().topk(2)
            ids = best.indices[:, :1]
            tokens.append(ids)
            gaps.append(best.values[:, 0] - best.values[:, 1])
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return torch.cat(tokens, 1).tolist(), cast("npt.NDArray[np.float32]", torch.stack(gaps, 1).numpy())
