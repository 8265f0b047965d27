"""``python -m shardfold.compat PROGRAM ARGUMENTS...``: a program whose processes find this layer as ``deepspeed``;
``python -m shardfold.compat --install-command [FOLDER]``: the command ``deepspeed``, which starts ``shardfold run``."""

import os
import sys

from shardfold.compat.command import install_command
from shardfold.compat.finder import environment
from shardfold.errors import UsageError

if len(sys.argv) < 2:
    sys.exit(
        "usage: python -m shardfold.compat PROGRAM ARGUMENTS... (e.g. accelerate launch train.py), or "
        "--install-command [FOLDER]"
    )
if sys.argv[1] == "--install-command":
    if further := sys.argv[3:]:
        sys.exit(f"--install-command takes one folder and nothing more: leave out {' '.join(further)}.")
    try:
        print(install_command(*sys.argv[2:3]))
    except (UsageError, OSError) as error:
        sys.exit(str(error))
    sys.exit()
try:
    os.execvpe(sys.argv[1], sys.argv[1:], environment())
except OSError as error:
    sys.exit(f"{sys.argv[1]!r} cannot be run: {error.strerror}.")
