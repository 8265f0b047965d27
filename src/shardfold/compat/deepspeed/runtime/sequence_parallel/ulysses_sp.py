"""Ulysses (2309.14509) for models of transformers: their attention crosses ranks, and batches are cut for it.

    mpu = UlyssesSPAttentionHF.register_with_transformers(...)     before or behind the model is made
    engine = deepspeed.initialize(model=model, mpu=mpu, ...)[0]
    loader = UlyssesSPDataLoaderAdapter(loader, ...)               each rank gets its part of each rank's batch

Gradients are the mean of all ranks', as of data. The loss that DeepSpeed's documentation writes gathers the ranks'
losses with gradients (``torch.distributed.nn.functional.all_gather``), so that a rank's own has N times its weight.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.compat.deepspeed.crossing import axis_for
from shardfold.compat.deepspeed.ranks import NOW
from shardfold.compat.deepspeed.refused import WrongArgument, WrongCall
from shardfold.compat.deepspeed.runtime.sequence_parallel.tiles import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from shardfold.compat.deepspeed.utils.logging import logger
from shardfold.nn.axis_group import AxisGroup
from shardfold.parallel.attention import refuse_options
from shardfold.parallel.batch import IGNORED, read_documents
from shardfold.parallel.cut import CONTIGUOUS, CutBatch
from shardfold.parallel.ulysses import across_heads, check_heads, ulysses_attention
from shardfold.torch_internals import version_of

__all__ = [
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]

OURS = "sdpa"
"""The implementation in whose place the library's own attention is computed; others are called."""
MASKED = ("eager", "paged|eager", "flex_attention")


class UlyssesSPAttentionHF(nn.Module):
    """Attention of models of transformers in which each rank has some heads of whole sequences.

    Args:
        attn: as ``ALL_ATTENTION_FUNCTIONS`` of transformers has one.
        batch_size: of micro-batches; any is taken.
        attn_head_count: heads of queries, which the ranks divide.
        attn_head_size: elements of a head.
        kv_head_count: heads of keys and values; fewer than ranks are repeated.
        num_hidden_layers: of the model.
        process_group: the ranks that share sequences.
        seq_length_is_variable: False: all sequences have the given lengths.
        local_seq_length, global_seq_length: of a rank's part and of whole sequences.
        disable_in_eval: in evaluation each rank attends to its own tokens alone, as those of whole sequences.

    Raises:
        ConfigError: the ranks do not divide the heads.
    """

    def __init__(
        self,
        attn: Callable[..., Any],
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: Any,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        super().__init__()
        self.attn, self._group, self._registered = attn, process_group, False
        self.world_size = dist.get_world_size(process_group)
        self.batch_size, self.num_hidden_layers = batch_size, num_hidden_layers
        self.attn_head_count, self.attn_head_size = attn_head_count, attn_head_size
        self.global_kv_head_count = kv_head_count
        self.seq_length_is_variable = seq_length_is_variable
        self.local_seq_length, self.global_seq_length = local_seq_length, global_seq_length
        self.disable_in_eval = disable_in_eval
        self.core_attn_implementation: str | None = None
        self._last: tuple[Any, int | None, tuple[CutBatch, Tensor]] | None = None
        check_heads(attn_head_count, self.world_size)

    @property
    def process_group(self) -> Any:
        """The ranks that share sequences; of what was registered those of the engine that was made last, because ranks
        that share layers may come between them."""
        return NOW.ways.sequence_group if self._registered else self._group

    @property
    def sp_rank(self) -> int:
        """This rank's place among them."""
        return dist.get_rank(self.process_group)

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As transformers calls an attention.

        Args:
            module: the layer, of an engine's model.
            query, key, value: ``(batch, heads, tokens, dim)`` of this rank's tokens.
            attention_mask: is not used: ``position_ids`` tell of documents, and padding is on the right.

        Returns:
            ``(batch, tokens, heads, dim)``, and None in place of the weights.

        Raises:
            WrongCall: there are no ``position_ids``, sequences are of another length than was said, or no engine has
                the module.
            ConfigError: the attention has what is not built.
        """
        softcap, window = kwargs.get("softcap"), kwargs.get("sliding_window")
        ours = self.core_attn_implementation == OURS
        if softcap is not None and not (ours and (module.training or not self.disable_in_eval)):
            raise WrongArgument(
                f"attention has soft-capped scores (softcap={softcap}), which cross ranks with "
                "core_attn_implementation='sdpa' and without disable_in_eval alone: take these."
            )
        if self.disable_in_eval and not module.training:
            return self.attn(module, query, key, value, attention_mask, *args, **kwargs)
        axis = axis_for(module, None if self._registered else self._group)
        cut, positions = self._cut(axis, query, kwargs.get("position_ids"))
        window = None if window is None or window >= cut.length else window
        if window is not None and not ours:
            raise WrongArgument(
                f"attention has a sliding window of {window} tokens, which crosses ranks with "
                f"core_attn_implementation='sdpa' alone, and sequences have {cut.length}: take that, or shorter ones."
            )
        refuse_options(module, kwargs)
        if not ours:
            out = self._called(module, query, key, value, axis, cut, args, {**kwargs, "position_ids": positions})
        else:
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            dropout = kwargs.get("dropout", 0.0) if module.training else 0.0
            out = ulysses_attention(
                query,
                key,
                value,
                axis,
                cut,
                causal=causal,
                scale=kwargs.get("scaling"),
                dropout=dropout,
                window=window,
                softcap=softcap,
            )
        return out.transpose(1, 2).contiguous(), None

    def _called(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        axis: AxisGroup,
        cut: CutBatch,
        args: Any,
        options: Mapping[str, Any],
    ) -> Tensor:
        """The implementation that was asked for, on whole sequences: flash attention reads documents off positions."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attn(module, q, k, v, None, *args, **options)[0].transpose(1, 2).contiguous()

        return across_heads(query, key, value, axis, cut.sizes, attend)

    def _cut(self, axis: AxisGroup, query: Tensor, positions: Any) -> tuple[CutBatch, Tensor]:
        """How sequences lie on the ranks, and all of their positions, once for all layers of a forward."""
        if not isinstance(positions, Tensor) or positions.dim() != 2:
            raise WrongCall(
                "attention over ranks that share sequences needs position_ids (batch, tokens) of whole sequences in "
                "every forward: UlyssesSPDataLoaderAdapter makes and cuts them."
            )
        version = version_of(positions)  # None: they may have been changed, and nobody would know
        if version is not None and self._last is not None and self._last[0]() is positions and self._last[1] == version:
            return self._last[2]
        tokens, length = query.shape[2], query.shape[2] * axis.size
        if positions.shape[1] != tokens or (not self.seq_length_is_variable and tokens != self.local_seq_length):
            raise WrongCall(
                f"attention gets {tokens} tokens and {positions.shape[1]} positions of this rank"
                + f", and sequences were said to have {self.global_seq_length}" * (not self.seq_length_is_variable)
                + ": cut batches with UlyssesSPDataLoaderAdapter."
            )
        all_positions = axis.all_gather(positions, 1)
        documents = read_documents({"position_ids": all_positions}, query.shape[0], length)
        found = CutBatch.of(length, axis.size, CONTIGUOUS, documents, query.shape[0]), all_positions
        self._last = ref(positions), version, found
        return found

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> ModuleType | None:
        """From now on models of transformers with this implementation of attention cross ranks.

        Args:
            model_name_or_path: a model with a ``config``, or a name or folder of one.
            core_attn_implementation: ``"sdpa"``, for which the library's own attention is computed, or another that
                needs no mask, as ``"flash_attention_2"``, which is called; None: the model's.
            sequence_parallel_size: ranks that share sequences; 1: nothing happens.
            micro_batch_size: of the loaders.
            seq_length: of all sequences, where it is not variable.
            seq_length_is_variable: False: each sequence has ``seq_length`` tokens.
            disable_in_eval: evaluation reads whole sequences on each rank.
            max_length: the older name of ``seq_length``.

        Returns:
            The ``mpu`` for ``deepspeed.initialize``; None for one rank.

        Raises:
            WrongArgument: a ``ValueError``: the implementation is unknown, needs a mask or is not the model's, or there
                is no length.
            ConfigError: the ranks do not divide the heads.
        """
        if sequence_parallel_size == 1:
            return None
        if max_length is not None:
            logger.warning("register_with_transformers(max_length=...) is deprecated: give seq_length.")
            seq_length = seq_length or max_length
        if not seq_length_is_variable and (seq_length is None or seq_length % sequence_parallel_size):
            raise WrongArgument(
                f"register_with_transformers(seq_length={seq_length}): give seq_length_is_variable=True, or the length "
                f"of all sequences, a multiple of the {sequence_parallel_size} ranks."
            )
        from shardfold.compat.deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

        config, core_attn_implementation = _config_of(model_name_or_path, core_attn_implementation)
        registry, core = _registered(core_attn_implementation)
        mpu.initialize_sequence_parallel(sequence_parallel_size)
        heads = config.num_attention_heads
        attention = cls(
            attn=core,
            batch_size=micro_batch_size,
            attn_head_count=heads,
            attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            kv_head_count=getattr(config, "num_key_value_heads", None) or heads,
            num_hidden_layers=config.num_hidden_layers,
            process_group=mpu.get_sequence_parallel_group(),
            seq_length_is_variable=seq_length_is_variable,
            disable_in_eval=disable_in_eval,
            local_seq_length=None
            if seq_length_is_variable or seq_length is None
            else seq_length // sequence_parallel_size,
            global_seq_length=None if seq_length_is_variable else seq_length,
        )
        attention.core_attn_implementation, attention._registered = core_attn_implementation, True
        registry[core_attn_implementation] = attention
        return mpu


def _config_of(model: Any, implementation: str | None) -> tuple[Any, str]:
    """Of its text, and the implementation of attention.

    Raises:
        WrongArgument: the model has another implementation of attention.
    """
    if hasattr(model, "config"):
        its = getattr(model.config, "_attn_implementation", None)
        implementation = implementation or its
        if its is not None and its != implementation:
            raise WrongArgument(
                f"register_with_transformers(core_attn_implementation={implementation!r}), but the model's config has "
                f"attn_implementation={its!r}: give both the same."
            )
        return model.config.get_text_config(), implementation or OURS
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).get_text_config(), implementation or OURS


def _registered(implementation: str) -> tuple[Any, Callable[..., Any]]:
    """transformers' registry of attention, and what it has, or had, under a name.

    Raises:
        WrongArgument: it has none, or one that needs a mask.
    """
    if implementation in MASKED:
        raise WrongArgument(
            f"{implementation!r} attention takes a mask of all tokens by all tokens, which is not cut: choose 'sdpa' "
            "or flash attention."
        )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as REGISTRY

    if implementation not in REGISTRY:
        raise WrongArgument(
            f"{implementation!r} is not an implementation of attention: transformers has "
            f"{', '.join(REGISTRY.valid_keys())}."
        )
    found: Any = REGISTRY[implementation]
    return REGISTRY, found.attn if isinstance(found, UlyssesSPAttentionHF) else found


class UlyssesSPDataLoaderAdapter:
    """A loader that gives each rank its part of the sequences of all ranks that share them, one rank's after the other.

    Each of N ranks reads a batch of its own; the next N batches are these, of which a rank gets the part that it works
    on. ``labels`` are shifted before the cut, into ``shift_labels``. ``position_ids`` are made where there are none.
    Tensors are on the CPU.

    Args:
        dl: yields dicts of tensors ``(batch, tokens, ...)`` with ``input_ids`` and ``labels``, and numbers and texts.
        sp_rank, sp_group, sp_world_size: of the ranks that share sequences.
        device: of the tensors that are sent.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size = dl, sp_rank, sp_group, sp_world_size
        self.device = device
        self.iter: Iterator[Any] | None = None
        self.micro_batches: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        self.iter = iter(self.dl)
        self.micro_batches.clear()
        return self

    def __next__(self) -> dict[str, Any]:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def set_epoch(self, epoch: int) -> None:
        """Of the loader's sampler, if it has one that asks."""
        its: list[Any] = [self.dl, *(getattr(self.dl, name, None) for name in ("sampler", "batch_sampler"))]
        for each in its:
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
                return

    def refill(self) -> None:
        """Reads a batch on each rank, and gets this rank's parts of all.

        Raises:
            StopIteration: there are no more.
            WrongCall: on all ranks: loaders are of different lengths.
            WrongArgument: on all ranks: one has a batch that cannot be cut, or ``sp_group`` is not the engine's.
        """
        _check_group(self.sp_group)
        if self.iter is None:
            self.iter = iter(self.dl)
        batch, said = next(self.iter, None), ""
        if batch is not None:
            try:
                batch = _prepared(batch, self.sp_world_size)
            except WrongArgument as error:
                said = str(error)
        mine: dict[str, Any] = {} if batch is None or said else batch
        shapes = {name: list(v.shape) if isinstance(v, Tensor) else {"": v} for name, v in mine.items()}
        told = [json.loads(text) for text in self._everyone(json.dumps([batch is not None, said, shapes]))]
        if not any(there for there, _, _ in told):
            self.iter = None
            raise StopIteration
        for _, problem, _ in told:
            if problem:
                raise WrongArgument(problem)
        if not all(there for there, _, _ in told):
            raise WrongCall(
                f"the loaders of the {self.sp_world_size} ranks that share sequences have different numbers of "
                "batches: drop or fill up the last ones."
            )
        all_shapes = [shapes for _, _, shapes in told]
        if len({tuple(shapes) for shapes in all_shapes}) > 1:
            raise WrongArgument(f"ranks that share sequences have batches with other names: {all_shapes}.")
        found: list[dict[str, Any]] = [{} for _ in told]
        for name in shapes:
            for other, part in enumerate(self._exchanged(mine[name], [each[name] for each in all_shapes])):
                found[other][name] = part
        self.micro_batches.extend(found)

    def _everyone(self, text: str) -> list[str]:
        """What each rank says, by rank."""
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.sp_world_size)]
        dist.all_gather(sizes, torch.tensor([len(mine)], device=self.device), group=self.sp_group)
        lengths = [int(size) for size in sizes]
        mine = F.pad(mine, (0, max(lengths) - len(mine)))
        told = [torch.empty_like(mine) for _ in lengths]
        dist.all_gather(told, mine, group=self.sp_group)
        return [each[:length].cpu().numpy().tobytes().decode() for each, length in zip(told, lengths, strict=True)]

    def _exchanged(self, value: Any, theirs: list[Any]) -> list[Any]:
        """This rank's parts of a tensor of each rank; of what is no tensor, each rank's."""
        if not isinstance(value, Tensor):
            return [each[""] for each in theirs]
        ranks = self.sp_world_size
        parts = value.to(self.device).chunk(ranks, dim=1)
        shapes = [(shape[0], shape[1] // ranks, *shape[2:]) for shape in theirs]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        goes = torch.cat([part.reshape(-1) for part in parts])
        comes = goes.new_empty(sum(sizes))
        dist.all_to_all_single(comes, goes, sizes, [part.numel() for part in parts], group=self.sp_group)
        came = comes.cpu().split(sizes)
        return [part.view(shape) for part, shape in zip(came, shapes, strict=True)]


def _check_group(group: Any) -> None:
    """
    Raises:
        WrongArgument: the engine that was made last has other ranks that share sequences, as where ranks that share
            layers come between them.
    """
    its = NOW.ways.sequence_group
    if its is None or group is None:
        return
    mine, theirs = dist.get_process_group_ranks(group), dist.get_process_group_ranks(its)
    if mine != theirs and NOW.ways.tensor > 1:
        raise WrongArgument(
            f"UlyssesSPDataLoaderAdapter(sp_group=...) has the ranks {mine}, and the engine's that share sequences are "
            f"{theirs}: ask deepspeed.utils.groups._get_sequence_parallel_group() behind deepspeed.initialize()."
        )


def _prepared(batch: Any, ranks: int) -> dict[str, Any]:
    """A batch of whole sequences, with positions and shifted labels.

    Raises:
        WrongArgument: it cannot be cut.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
        raise WrongArgument("UlyssesSPDataLoaderAdapter: batches are dicts of tensors with 'input_ids'.")
    found: dict[str, Any] = dict(batch)
    rows, length = found["input_ids"].shape[:2]
    if length % ranks:
        raise WrongArgument(
            f"UlyssesSPDataLoaderAdapter: sequences of {length} tokens are not divisible by the {ranks} ranks that "
            f"share them: pad them, as with pad_to_multiple_of={ranks}."
        )
    for name, value in found.items():
        if isinstance(value, Tensor) and (value.dim() < 2 or value.shape[1] != length):
            raise WrongArgument(
                f"UlyssesSPDataLoaderAdapter: {name!r} has the shape {tuple(value.shape)}, and input_ids are "
                f"({rows}, {length}): tensors are (batch, tokens, ...)."
            )
    mask = found.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask.long().diff(dim=1) > 0).any()):
        raise WrongArgument(
            "UlyssesSPDataLoaderAdapter: attention_mask has padding before tokens, which attention over ranks does not "
            "set apart: pad on the right, or give position_ids that begin anew."
        )
    try:
        json.dumps({name: value for name, value in found.items() if not isinstance(value, Tensor)})
    except (TypeError, ValueError):
        raise WrongArgument(
            "UlyssesSPDataLoaderAdapter: a batch has what is neither a tensor nor a number, text, list or dict of "
            "these, and is not sent to other ranks: leave it out."
        ) from None
    if "position_ids" not in found:
        found["position_ids"] = torch.arange(length, device=found["input_ids"].device).expand(rows, length)
    if "labels" in found:
        labels = found.pop("labels")
        found["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return found
