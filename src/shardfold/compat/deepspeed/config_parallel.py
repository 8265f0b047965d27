"""How a config shares all ranks out: among stages of a pipeline, and those of tensor, of sequence and of data.

    rank = (stage, data, sequence, tensor), the last varies fastest

Sizes come from the config, and from what ``deepspeed.initialize`` is told beside it. Ranks that have parts of the same
sequences share parameters, so that states are split over them as over ranks of data: they are the mesh's ``intra``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.errors import did_you_mean

__all__ = [
    "AUTOTP",
    "PIPELINE_AXIS",
    "SEQUENCE_AXIS",
    "TENSOR_AXIS",
    "Said",
    "Sizes",
    "mesh_of",
    "plan_words",
    "sizes_of",
]

SEQUENCE_AXIS, TENSOR_AXIS, PIPELINE_AXIS = "intra", "tensor", "pipeline"
"""The mesh's names of these axes."""

AUTOTP = "tensor_parallel.autotp_size"
SPECS = "tensor_parallel.partition_config"
KNOWN = (
    "use_default_specs",
    "layer_specs",
    "strict_mode",
    "tp_size",
    "embedding_partition_dim",
    "lm_head_patterns",
)
KNOWN_OF_SPEC = (
    "patterns",
    "partition_type",
    "shape",
    "partition_dim",
    "model_types",
    "gather_output",
    "grad_allreduce",
)


class Said(NamedTuple):
    """A number of ranks, and what said it."""

    size: int
    by: str


class Sizes(NamedTuple):
    """Numbers of ranks along each axis."""

    tensor: int
    sequence: int
    data: int
    pipeline: int = 1


def sizes_of(
    get: Callable[[str], Any], given: Mapping[str, Any], ranks: int, told: Mapping[str, Sequence[Said]]
) -> Sizes:
    """The sizes of the axes of ``ranks``; ``told``: what was said beside the config, of ``"autotp"``,
    ``"tensor"``, ``"sequence"`` and ``"pipeline"``.

    Raises:
        DeepSpeedConfigError: two sizes of one axis differ, or they do not multiply up.
    """
    autotp = get(AUTOTP)
    tensor = [*told.get("autotp", ()), *told.get("tensor", ()), *([Said(autotp, AUTOTP)] if autotp else [])]
    of_tp = given.get("tensor_parallel.tp.tp_size", 1)
    if of_tp != 1:
        tensor.append(Said(of_tp, "tensor_parallel.tp.tp_size"))
    sequence = list(told.get("sequence", ()))
    if "sequence_parallel_size" in given:
        sequence.append(Said(given["sequence_parallel_size"], "sequence_parallel_size"))
    stages = list(told.get("pipeline", ()))
    sizes = [_one("tensor", tensor), _one("sequence", sequence), _one("pipeline", stages)]
    data, rest = divmod(ranks, sizes[0] * sizes[1] * sizes[2])
    asked = get("data_parallel_size")
    if rest or (asked is not None and asked != data):
        product = " x ".join(
            [f"data_parallel_size = {asked}"] * (asked is not None)
            + [f"{each.by} = {each.size}" for each in (*tensor[:1], *sequence[:1], *stages[:1])]
        )
        raise DeepSpeedConfigError(
            f"{product} does not multiply up to the {ranks} rank{'s' if ranks > 1 else ''} there are: change the sizes "
            "or the number of ranks."
        )
    return Sizes(sizes[0], sizes[1], data, sizes[2])


def _one(axis: str, said: Sequence[Said]) -> int:
    for one in said[1:]:
        if one.size != said[0].size:
            raise DeepSpeedConfigError(
                f"{said[0].by} says {said[0].size} ranks of {axis}, and {one.by} says {one.size}: give the same, or "
                "leave one out."
            )
    return max(said[0].size, 1) if said else 1


def mesh_of(sizes: Sizes, mesh: dict[str, int] | None) -> dict[str, int] | None:
    """As :class:`shardfold.Engine` takes it; ``mesh``: what the layout asks for.

    Raises:
        DeepSpeedConfigError: the layout asks for groups of another size than those that share sequences.
    """
    if sizes.sequence > 1:
        if mesh is not None and mesh["intra"] != sizes.sequence:
            raise DeepSpeedConfigError(
                f"zero_optimization asks for groups of {mesh['intra']} ranks (zero_hpz_partition_size, "
                f"mics_shard_size), and {sizes.sequence} ranks share sequences: give both the same size."
            )
        mesh = {"inter": sizes.data, SEQUENCE_AXIS: sizes.sequence}
    if sizes.tensor > 1:
        mesh = {**(mesh or {}), TENSOR_AXIS: sizes.tensor}
    if sizes.pipeline > 1:
        mesh = {PIPELINE_AXIS: sizes.pipeline, **(mesh or {})}
    return mesh


# -- which layers are cut


def plan_words(section: Mapping[str, Any], weights: Iterable[str], kind: str | None) -> dict[str, Any]:
    """The words of ``shardfold.Parallel(tensor=...)`` for modules whose weights ``partition_config`` names.

    Args:
        section: ``tensor_parallel.partition_config``.
        weights: names of the model's parameters, as ``layers.0.mlp.up.weight``.
        kind: the model's ``config.model_type``, if it has one.

    Raises:
        DeepSpeedConfigError: a key is unknown, a pattern matches nothing, or a layer would be cut as none is here.
    """
    _check_names(SPECS, section, KNOWN)
    specs: Any = section.get("layer_specs", [])
    if not isinstance(specs, Sequence) or isinstance(specs, str) or not all(isinstance(s, Mapping) for s in specs):
        raise DeepSpeedConfigError(f"{SPECS}.layer_specs is {specs!r}: it is a list of sections.")
    names, words = list(weights), dict[str, Any]()
    for number, spec in enumerate(specs):
        where = f"{SPECS}.layer_specs[{number}]"
        _check_names(where, spec, KNOWN_OF_SPEC)
        kinds: Any = spec.get("model_types")
        if kinds and str(kind).lower() not in [str(each).lower() for each in kinds]:
            continue
        word = _word(where, spec)
        for pattern in spec.get("patterns", []):
            found = [name for name in names if re.match(pattern, name)]
            if not found:
                raise DeepSpeedConfigError(
                    f"{where}.patterns has {pattern!r}, which matches no parameter of the model: give regular "
                    "expressions for names such as 'layers.0.mlp.up.weight'."
                )
            for name in found:
                words.setdefault(name.rpartition(".")[0], word)
    return words


def _word(where: str, spec: Mapping[str, Any]) -> Any:
    kind = str(spec.get("partition_type", "column")).lower()
    if kind not in ("column", "row", "skip"):
        raise DeepSpeedConfigError(
            f"{where}.partition_type is {kind!r}: it is one of 'column', 'row', 'skip'."
            f"{did_you_mean(kind, ('column', 'row', 'skip'))}"
        )
    if kind == "skip":
        return "partial" if spec.get("grad_allreduce") else "replicated"
    shape, dim = spec.get("shape"), spec.get("partition_dim", 0 if kind == "column" else 1)
    if shape is not None:
        if kind == "column" and dim == 0 and len(shape) == 2 and isinstance(shape[0], int) and shape[0] > 0:
            return ("column", shape[0])
        raise DeepSpeedConfigError(
            f"{where}.shape is {shape!r} along partition_dim {dim}: what is cut here is a column of n equal matrices, "
            "one behind the other: [n, -1] along 0."
        )
    if dim != (0 if kind == "column" else 1):
        raise DeepSpeedConfigError(f"{where}.partition_dim is {dim}: columns are cut along 0, rows along 1.")
    return "gathered" if spec.get("gather_output") and kind == "column" else kind


def _check_names(where: str, section: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in section:
        if name not in known:
            raise DeepSpeedConfigError(f"{where} has the unknown key {name!r}.{did_you_mean(str(name), known)}")
