"""Checkpoints that any layout writes and any layout reads.

collect          what of an engine a checkpoint keeps, and what it leaves out
dcp              folders of ``torch.distributed.checkpoint``, written and read
deepspeed        folders that DeepSpeed wrote, as a checkpoint
deepspeed_ranks  which elements a rank of DeepSpeed's has
draft            the folder in which a checkpoint is written, on each host, until it takes its place
elsewhere        files that lie on other hosts, read over the network
files            safetensors files, written and read a few MiB at a time
folders          folders of checkpoints: what may be named in them, which are complete, which are removed
held             what ranks that have stopped hold of a run, together
imports          others' files as a checkpoint
index           what the index says, as values: pieces and where their elements are; what its text may say
inspect          what is in a checkpoint, by its index alone; no torch
lent             copies of other ranks' states that a save reads beside the training
load             loading into an engine of any layout
messages         what ranks tell each other during a save, through the key-value store
names            names that differ from the model's
opened           the same checkpoint on all ranks, wherever its parts are
optimizer_dtensors  the optimizer's state as DTensors, as PyTorch's own calls give it
pickled          files of ``torch.save``, read without running any code of theirs
reader           a checkpoint on disk, read in pieces, without an engine
rng              states of random generators, as values
run_lock         which run a folder belongs to, and which process saves there: one at a time
save             saving: every rank writes what it owns, one makes it a checkpoint
standing_thread  a thread that stands by for what is to be done beside the training
stored           tensors by name that are read when they are asked for
trees            the run's own state as JSON
trust            which objects in files are read, and for whom
verify           whether a checkpoint is what was written
writer           a checkpoint written by one process: what every import ends in
_export           weights into others' files, as a whole or not at all
_fit              whether a checkpoint fits an engine, by its index alone
_load_model            a model with the weights of a checkpoint, without an engine
_outcome          a checkpoint on every host, or none on any
_pt               the file that ``torch.save`` makes, written tensor by tensor
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardfold.checkpoint._export import ExportReport, export_to, new_folder, write_folder
    from shardfold.checkpoint._load_model import load_model
    from shardfold.checkpoint.imports import ImportReport, import_from
    from shardfold.checkpoint.inspect import Contents
    from shardfold.checkpoint.load import LoadReport
    from shardfold.checkpoint.reader import Checkpoint
    from shardfold.checkpoint.save import SaveReport, Saving
    from shardfold.checkpoint.trust import trusted
    from shardfold.checkpoint.verify import Damage, Verification
    from shardfold.checkpoint.writer import Writer

__all__ = [
    "Checkpoint",
    "Contents",
    "Damage",
    "ExportReport",
    "ImportReport",
    "LoadReport",
    "SaveReport",
    "Saving",
    "Verification",
    "Writer",
    "export_to",
    "import_from",
    "load_model",
    "new_folder",
    "trusted",
    "write_folder",
]

_HOMES = {
    "Checkpoint": "reader",
    "Contents": "inspect",
    "Damage": "verify",
    "ExportReport": "_export",
    "ImportReport": "imports",
    "LoadReport": "load",
    "SaveReport": "save",
    "Saving": "save",
    "Verification": "verify",
    "Writer": "writer",
    "export_to": "_export",
    "import_from": "imports",
    "load_model": "_load_model",
    "trusted": "trust",
    "new_folder": "_export",
    "write_folder": "_export",
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: reading a checkpoint needs no part of the engine, reading an index no torch."""
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(f"shardfold.checkpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'shardfold.checkpoint' has no attribute {name!r}")
