"""Checkpoints that any layout writes and any layout reads.

format    what the index says: pieces, and where their elements are       trees     the run's own state as JSON
files     safetensors files, written and read in pieces of a few MiB      folders   a folder is there whole, or not
collect   what an engine has to keep          save      all ranks write, one makes it a checkpoint
messages  what ranks tell each other then     load      into the shards of any layout
paths     what a checkpoint may name        checked   what an index may say
trust     objects, read without their code
reader    a checkpoint without an engine      inspect   what is in one        verify    whether it is as it was written

and the doors: tensors are read when they are asked for, one at a time

stored    tensors by name, of a checkpoint or of safetensors files        names     names that differ from the model's
export    to others' files: safetensors, torch.save, DCP                  model     into a module, to be used
imports   from others' files                                              writer    a checkpoint without an engine
deepspeed a run that DeepSpeed saved, of which ``deepspeed_ranks`` says   pickled   files of torch.save, whose objects
          what its ranks have                                                       are kept as data
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardfold.checkpoint.export import export_to
    from shardfold.checkpoint.imports import ImportReport, import_from
    from shardfold.checkpoint.inspect import Contents
    from shardfold.checkpoint.job import SaveReport, Saving
    from shardfold.checkpoint.load import LoadReport
    from shardfold.checkpoint.model import load_model
    from shardfold.checkpoint.reader import Checkpoint
    from shardfold.checkpoint.trust import trusted
    from shardfold.checkpoint.verify import Damage, Verification
    from shardfold.checkpoint.writer import Writer

__all__ = [
    "Checkpoint",
    "Contents",
    "Damage",
    "ImportReport",
    "LoadReport",
    "SaveReport",
    "Saving",
    "Verification",
    "Writer",
    "export_to",
    "import_from",
    "load_model",
    "trusted",
]

_HOMES = {
    "Checkpoint": "reader",
    "Contents": "inspect",
    "Damage": "verify",
    "ImportReport": "imports",
    "LoadReport": "load",
    "SaveReport": "job",
    "Saving": "job",
    "Verification": "verify",
    "Writer": "writer",
    "export_to": "export",
    "import_from": "imports",
    "load_model": "model",
    "trusted": "trust",
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: reading a checkpoint needs no part of the engine, reading an index no torch."""
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(f"shardfold.checkpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'shardfold.checkpoint' has no attribute {name!r}")
