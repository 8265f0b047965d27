"""DeepSpeed's JSON: read into :class:`Settings` for this layer, and as the ``DeepSpeedConfig`` that clients know.

config_source     a dict, a file or base64 -> a dict
config_keys       the table: every key, and what it does here
config_check      the walk: every key known, of its type, legal
config_precision, config_hyper                   dtypes, layout, loss scale; optimizer, schedule
config_read       all of these, and the batch triad -> Settings
config_text       in words: notes, effective values, the table of docs/from-deepspeed.md
"""

from shardfold.compat.deepspeed.config_check import Note
from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.config_read import Settings, read
from shardfold.compat.deepspeed.config_text import said
from shardfold.compat.deepspeed.config_view import DeepSpeedConfig, Section

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError", "Note", "Section", "Settings", "read", "said"]
