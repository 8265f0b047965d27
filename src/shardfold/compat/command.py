"""The command ``deepspeed``: a file of one line that starts ``shardfold run --as-deepspeed``, written on request.

A package that was installed by itself would take the name from a DeepSpeed that is there; so nothing does it unasked.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardfold.errors import UsageError

__all__ = ["install_command"]

LINE = "from shardfold.compat.deepspeed.launcher.runner import main; main()"


def install_command(folder: str | Path | None = None) -> Path:
    """Writes the command, which scripts then find as ``deepspeed``; again it does nothing.

    Args:
        folder: one of ``PATH``; None: that of this interpreter.

    Returns:
        The file.

    Raises:
        UsageError: there is another command of that name, or no such folder.
    """
    path = Path(folder if folder is not None else Path(sys.executable).parent) / "deepspeed"
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder: give one that is in PATH, for the command deepspeed.")
    if path.exists() and LINE not in path.read_text(errors="replace"):
        raise UsageError(
            f"{path} is another program of that name, as DeepSpeed's own: uninstall it, or give another folder of PATH "
            "that comes before it."
        )
    path.write_text(f"#!{sys.executable}\n{LINE}\n")
    path.chmod(0o755)
    return path
