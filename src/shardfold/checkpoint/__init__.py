"""Checkpoints that any layout writes and any layout reads.

format    what the index says: pieces, and where their elements are       trees     the run's own state as JSON
files     safetensors files, written and read in pieces of a few MiB      folders   a folder is there whole, or not
collect   what an engine has to keep          save      all ranks write, one makes it a checkpoint
reader    a checkpoint without an engine      load      into the shards of any layout
"""

from shardfold.checkpoint.load import LoadReport
from shardfold.checkpoint.reader import Checkpoint
from shardfold.checkpoint.save import SaveReport, Saving

__all__ = ["Checkpoint", "LoadReport", "SaveReport", "Saving"]
