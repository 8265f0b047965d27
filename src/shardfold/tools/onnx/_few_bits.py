"""Weights of a graph in 8 or 4 bits, by ONNX Runtime's own quantizer, and what that costs."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardfold.errors import ConfigError

__all__ = ["GRAPH", "BitsCost", "ScoredData", "num_bytes", "round_weights"]

GRAPH = "model.onnx"

LONG = 128
"""Greedy tokens over which rounded activations must change nothing, if the context has so many."""

BLOCK = 32
"""Weights that share a scale and a zero point."""


@dataclass(frozen=True, kw_only=True)
class BitsCost:
    """What few bits cost.

    Attributes:
        bits: 8 or 4.
        accuracy: of ``MatMulNBits``: 4 where activations are rounded to 8 bits too; 0: they are not.
        num_bytes: of graph and weights, before and after.
        differs: the first greedy token that is another one than before, from 0; None: all are the same.
        tokens: greedy tokens that were compared.
        bits_per_byte: before and after, on the data that were given; None: there were none.
    """

    bits: int
    accuracy: int
    num_bytes: tuple[int, int]
    differs: int | None
    tokens: int
    bits_per_byte: tuple[float, float] | None = None

    def __str__(self) -> str:
        before, after = (count / 2**20 for count in self.num_bytes)
        said = f"int{self.bits}: {before:.1f} MiB are {after:.1f}; accuracy_level {self.accuracy}"
        if self.bits_per_byte is not None:
            first, second = self.bits_per_byte
            said += f"; bits per byte {first:.4f} before, {second:.4f} after ({second / first - 1:+.2%})"
        if self.tokens:
            same = f"all {self.tokens} greedy tokens are the same"
            said += f"; {same if self.differs is None else f'greedy texts differ from token {self.differs} on'}"
        return said


@dataclass
class ScoredData:
    """Bits per byte of graphs on the same data."""

    tokenizer: Any
    context: int
    data: Sequence[Path]
    threads: int

    def of(self, folder: Path) -> float | None:
        """None: there are no data."""
        if not self.data:
            return None
        from shardfold.tools.onnx._scored_graph import bits_per_byte
        from shardfold.tools.onnx.onnx_session import OnnxSession

        session = OnnxSession(folder / GRAPH, self.threads)
        return bits_per_byte(session, self.tokenizer, self.context, self.data)


def round_weights(draft: Path, bits: int, answers: Any, scored: ScoredData) -> BitsCost:
    """Puts a graph of few bits in the place of the one that is there.

    ``accuracy_level`` 4, which rounds activations too and is faster, is taken only where greedy texts stay as they are
    without it.
    """
    from shardfold.tools.onnx.onnx_session import OnnxSession, continuations

    def text(folder: Path) -> Any:
        if answers.kind != "decoder":
            return None
        count = max(answers.greedy, min(LONG, scored.context - 8))
        return continuations(OnnxSession(folder / GRAPH, scored.threads), answers.prompts, count)[0]

    before, first = num_bytes(draft), scored.of(draft)
    folders = {accuracy: draft / f"accuracy-{accuracy}" for accuracy in (0, 4)}
    for accuracy, folder in folders.items():
        folder.mkdir()
        _quantize(draft / GRAPH, folder / GRAPH, bits, accuracy)
    texts = {accuracy: text(folder) for accuracy, folder in folders.items()}
    accuracy = 4 if texts[4] is not None and texts[4] == texts[0] else 0
    for file in list(folders[accuracy].iterdir()):
        file.replace(draft / file.name)
    for folder in folders.values():
        shutil.rmtree(folder)
    after = scored.of(draft)
    return BitsCost(
        bits=bits,
        accuracy=accuracy,
        num_bytes=(before, num_bytes(draft)),
        differs=answers.first_difference(texts[accuracy]) if answers.kind == "decoder" else None,
        tokens=answers.greedy,
        bits_per_byte=(first, after) if first is not None and after is not None else None,
    )


def _quantize(source: Path, target: Path, bits: int, accuracy: int) -> None:
    """Writes a graph whose matrices have few bits: ONNX Runtime's ``MatMulNBits``.

    What a matrix of the embedding is used for a second time, as a tied head, stays as it is.

    Args:
        source: a graph whose weights lie beside it.
        target: the graph to write.
        bits: 8 or 4.
        accuracy: 4 rounds activations to 8 bits as well, 0 leaves them as they are.

    Raises:
        ConfigError: nothing in there can be rounded.
    """
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    logger = logging.getLogger(MatMulNBitsQuantizer.__module__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the quantizer, of what it does itself
            quantizer = MatMulNBitsQuantizer(
                onnx.load(str(source)), bits=bits, block_size=BLOCK, is_symmetric=False, accuracy_level=accuracy
            )
            quantizer.process()
    finally:
        logger.setLevel(level)
    model: Any = quantizer.model
    if not any(node.op_type == "MatMulNBits" for node in model.model.graph.node):
        raise ConfigError(f"--bits {bits}: the graph has no matrix products with weights, so nothing would change.")
    model.save_model_to_file(str(target), use_external_data_format=True)


def num_bytes(folder: Path) -> int:
    """Of a graph and its weights."""
    return sum(file.stat().st_size for file in folder.glob(f"{GRAPH}*"))
