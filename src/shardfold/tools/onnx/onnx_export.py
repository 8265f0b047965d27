"""A trained model as ONNX, compared with its source before it has its name: `shardfold ckpt export --to onnx`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardfold.checkpoint import new_folder
from shardfold.errors import ConfigError
from shardfold.tools.extras import sentence
from shardfold.tools.onnx._few_bits import GRAPH, BitsCost, ScoredData, num_bytes, round_weights
from shardfold.tools.onnx._tensorrt_operators import missing_operators

__all__ = ["FEW_BITS", "OnnxReport", "export_onnx"]

FEW_BITS = (8, 4)
INLINE = 256
"""Bytes of a tensor from which on it lies beside the graph."""


@dataclass(frozen=True, kw_only=True)
class OnnxReport:
    """What was written.

    Attributes:
        path: the folder.
        kind: decoder, encoder or image.
        num_bytes: of graph and weights.
        error: of the fp32 graph's outputs, over the largest or 1.
        tokens: greedy tokens that were the source's.
        layers: how many the model has, and how many PyTorch exported; the others are repeated.
        packed: whether an encoder's layers have no tokens that the mask leaves out.
        operators: of ONNX, each once.
        cost: of few bits; None: it is in fp32.
        seconds: of all of it.
    """

    path: Path
    kind: str
    num_bytes: int
    error: float
    tokens: int
    layers: tuple[int, int]
    packed: bool
    operators: tuple[str, ...]
    cost: BitsCost | None
    seconds: float

    def __str__(self) -> str:
        layers, exported = self.layers
        made = (
            f"{layers} layers, {exported} exported and the others repeated" if exported < layers else "exported whole"
        ) + ", without padding" * self.packed
        said = [
            f"{self.path}: {self.kind}, {self.num_bytes / 2**20:.1f} MiB; {made}; {self.seconds:.1f} s",
            f"Compared with the source: outputs within {self.error:.1e}"
            + (f", {self.tokens} greedy tokens the same" if self.tokens else ""),
        ]
        if self.cost is not None:
            said.append(str(self.cost))
        lacking = missing_operators(self.operators)
        said.append(
            f"{len(self.operators)} operators; by TensorRT's published table (nothing was run there) "
            + (f"it lacks {', '.join(lacking)}" if lacking else "it has all of them")
        )
        return "\n".join(said)


def export_onnx(
    source: str | Path,
    target: str | Path,
    *,
    bits: int | None = None,
    data: Sequence[Path] = (),
    threads: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> OnnxReport:
    """Writes a model as ONNX, with all that its readers want beside it: config, tokenizer, ``genai_config.json``.

    It is written beside its place, compared with the source, and has its name only once both say the same. In memory
    are the model in fp32 and ONNX Runtime's copy of it.

    Args:
        source: a run of ``shardfold tune`` or ``shardfold train``, a folder of transformers, or an adapter of peft.
        target: a folder that does not exist yet.
        bits: 8 or 4: matrices are rounded by ONNX Runtime; None: fp32.
        data: files or folders of rows, by which the cost of few bits is told, as ``shardfold eval`` reads them.
        threads: of ONNX Runtime; 0: as many as there are cores.
        say: is told what is under way.

    Raises:
        ConfigError: the model cannot be exported, or says something else as ONNX; nothing is left of what was written.
        CheckpointError: the target exists, or the disk is full.
    """
    began = time.perf_counter()
    if bits is not None and bits not in FEW_BITS:
        raise ConfigError(f"--bits {bits}: weights are rounded to 8 or 4 bits; without it they stay fp32.")
    if data and bits is None:
        raise ConfigError("--data says nothing without --bits: it is what the cost of few bits is measured on.")
    try:
        import onnx_ir  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        if (words := sentence("export to ONNX", error)) is None:
            raise
        raise ConfigError(f"{words}.") from None
    from shardfold.tools.onnx._compared import SourceAnswers
    from shardfold.tools.onnx._onnx_source import OnnxSource

    with new_folder(target) as draft:
        say("loading")
        opened = OnnxSource.open(Path(source))
        if data and opened.kind != "decoder":
            raise ConfigError("--data: bits per byte are of decoders, and this is none: leave it out.")
        answers = SourceAnswers(opened)
        draft.mkdir()
        error, exported, packed, operators = _written(opened, answers, draft, threads, say)
        layers, context = opened.num_layers, opened.context
        _beside(opened, draft)
        kind, tokenizer, greedy = opened.kind, opened.tokenizer, answers.greedy
        del opened
        cost = None
        if bits is not None:
            say(f"rounding to {bits} bits")
            cost = round_weights(draft, bits, answers, ScoredData(tokenizer, context, tuple(data), threads))
            import onnx

            graph = onnx.load(str(draft / GRAPH), load_external_data=False).graph
            operators = sorted({node.op_type for node in graph.node})
        size = num_bytes(draft)
    return OnnxReport(
        path=Path(target),
        kind=kind,
        num_bytes=size,
        error=error,
        tokens=greedy,
        layers=(layers, exported),
        packed=packed,
        operators=tuple(operators),
        cost=cost,
        seconds=time.perf_counter() - began,
    )


def _written(
    source: Any, answers: Any, draft: Path, threads: int, say: Callable[[str], None]
) -> tuple[float, int, bool, list[str]]:
    """Writes the graph in fp32 and compares it: by layers if that can be, of an encoder without padding.

    Returns:
        The error, how many layers PyTorch exported, whether there is no padding, and the names of operators.
    """
    import onnx_ir

    from shardfold.tools.onnx._layer_graph import LayerGraph, LayersDiffer
    from shardfold.tools.onnx.onnx_session import OnnxSession

    ways: list[tuple[Any, bool]] = (
        [(source.layers, False), (None, False)] if source.layers is not None else [(None, False)]
    )
    if source.kind == "encoder" and source.layers is not None:
        ways.insert(0, (source.layers, True))
    found = None
    for layers, packed in ways:
        say("exporting" if layers is not None else "exporting all layers")
        try:
            graph = LayerGraph(source.call(packed=packed), layers, source.num_layers)
        except LayersDiffer:
            continue
        except Exception as error:  # whatever a model's code does under the exporter
            if layers is not None:
                continue
            root: BaseException = error
            while root.__cause__ is not None:
                root = root.__cause__
            lines = [line.strip() for line in str(root).splitlines() if line.strip()]
            raise ConfigError(
                f"a {type(source.model).__name__} cannot be exported: PyTorch's exporter says "
                f"{type(root).__name__}: {' '.join(lines[:2])[:300]}"
            ) from error
        for file in draft.iterdir():
            file.unlink()
        onnx_ir.save(graph.graph_model, draft / GRAPH, external_data=f"{GRAPH}.data", size_threshold_bytes=INLINE)
        say("comparing")
        found = answers.compared(OnnxSession(draft / GRAPH, threads))
        if found.same:
            return found.error, graph.exported, packed, graph.operators
        if layers is not None and not packed and graph.exported == source.num_layers:
            break  # it is the whole already
    assert found is not None
    raise ConfigError(
        f"the graph of a {type(source.model).__name__} does not say what its source does: outputs are "
        f"{found.error:.1e} apart"
        + (f", and the greedy text from token {found.differs} on" if found.differs is not None else "")
        + ". Nothing was written."
    )


def _beside(source: Any, draft: Path) -> None:
    """Config, tokenizer, chat template, and what onnxruntime-genai asks for."""
    if source.config is not None:
        source.config.save_pretrained(draft)
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(draft)
    if source.files is not None:
        from shardfold.tools.tune.merge import BESIDE, TOKENIZER

        patterns = BESIDE if source.tokenizer is not None else (*BESIDE, *TOKENIZER)
        for file in (each for pattern in patterns for each in source.files.folder.glob(pattern)):
            (draft / file.name).write_bytes(file.read_bytes())
    if source.kind == "decoder":
        generation = source.generation()
        _write_json(draft / "generation_config.json", generation)
        _write_json(draft / "genai_config.json", _genai(source, generation))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _genai(source: Any, generation: dict[str, Any]) -> dict[str, Any]:
    """What onnxruntime-genai reads first."""
    text = source.config.get_text_config()
    call = source.call()
    assert call.past is not None
    end = generation.get("eos_token_id")
    pad = generation.get("pad_token_id")
    first = end[0] if isinstance(end, list) else end
    inputs = {name: name for name in call.inputs}
    inputs |= {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    outputs = {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
    decoder = {
        "session_options": {"provider_options": []},
        "filename": GRAPH,
        "head_size": call.past[0].shape[3],
        "hidden_size": text.hidden_size,
        "num_attention_heads": text.num_attention_heads,
        "num_hidden_layers": text.num_hidden_layers,
        "num_key_value_heads": call.past[0].shape[1],
        "inputs": inputs,
        "outputs": outputs,
    }
    model = {
        "type": "decoder",
        "bos_token_id": generation.get("bos_token_id", first or 0),
        "eos_token_id": end if end is not None else [],
        "pad_token_id": pad if pad is not None else first or 0,
        "vocab_size": text.vocab_size,
        "context_length": source.context,
        "decoder": decoder,
    }
    search = {"max_length": source.context, "do_sample": False, "past_present_share_buffer": False}
    return {"model": model, "search": search}
