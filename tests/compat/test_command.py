"""The command ``deepspeed``, which is written on request and starts ``shardfold run --as-deepspeed``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardfold.compat.command import install_command
from shardfold.compat.finder import VERSION
from shardfold.errors import UsageError


def test_the_command_starts_a_script(tmp_path: Path) -> None:
    """With DeepSpeed's options, on as many ranks; the script finds the compatibility layer. Written twice it is one."""
    command = install_command(tmp_path)
    assert install_command(tmp_path) == command == tmp_path / "deepspeed" and os.access(command, os.X_OK)
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, deepspeed\nprint(deepspeed.__version__, os.environ['WORLD_SIZE'], sys.argv[1:])\n"
    )
    options = ["--num_gpus", "1", "--no_local_rank", str(script), "--epochs", "3"]
    done = subprocess.run([str(command), *options], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and f"{VERSION} 1 ['--epochs', '3']" in done.stdout, done


def test_another_program_of_that_name_stays(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").write_text("#!/bin/sh\n")
    with pytest.raises(UsageError, match="is another program of that name"):
        install_command(tmp_path)
    assert (tmp_path / "deepspeed").read_text() == "#!/bin/sh\n"
    with pytest.raises(UsageError, match="is not a folder"):
        install_command(tmp_path / "nowhere")


@pytest.mark.soak
def test_it_is_asked_for_at_a_command_line(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "shardfold.compat", "--install-command"]
    made = subprocess.run([*line, str(tmp_path)], capture_output=True, text=True, check=False)
    assert made.returncode == 0 and Path(made.stdout.strip()) == tmp_path / "deepspeed"
    further = subprocess.run([*line, str(tmp_path), "train.py", "-x"], capture_output=True, text=True, check=False)
    said = "--install-command takes one folder and nothing more: leave out train.py -x.\n"
    assert (further.returncode, further.stdout, further.stderr) == (1, "", said)
    refused = subprocess.run([*line, str(tmp_path / "nowhere")], capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "is not a folder" in refused.stderr
