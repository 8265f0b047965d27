"""``python -m shardfold.compat PROGRAM ARGUMENTS...``: a program whose processes find this layer as ``deepspeed``."""

import os
import sys

from shardfold.compat.finder import environment

if len(sys.argv) < 2:
    sys.exit("usage: python -m shardfold.compat PROGRAM ARGUMENTS... (e.g. accelerate launch train.py)")
try:
    os.execvpe(sys.argv[1], sys.argv[1:], environment())
except OSError as error:
    sys.exit(f"{sys.argv[1]!r} cannot be run: {error.strerror}.")
