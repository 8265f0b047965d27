"""``deepspeed.checkpoint.ds_to_universal``: a checkpoint that any stage and number of ranks loads, of another one.

Checkpoints of the engine are such already, so they are copied; those that DeepSpeed wrote are converted.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from shardfold.checkpoint.folders import INDEX
from shardfold.checkpoint.imports import import_from
from shardfold.compat.deepspeed.whole_files import written_whole
from shardfold.errors import CheckpointError

__all__ = ["LATEST_UNIVERSAL", "convert", "main", "parse_arguments"]

LATEST_UNIVERSAL = "latest_universal"


def convert(input_folder: str | Path, output_folder: str | Path) -> None:
    """Writes the checkpoint ``output_folder`` and names it in the file ``latest_universal`` beside it.

    Raises:
        CheckpointError: there is no checkpoint in ``input_folder``, or something in ``output_folder``.
    """
    source, target = Path(input_folder), Path(output_folder)
    if target.exists():
        raise CheckpointError(f"{target} is there already: choose another folder, or remove it.")
    if (source / INDEX).is_file():
        _copy_whole(source, target)
    else:
        import_from(source, target)
    with written_whole(target.parent / LATEST_UNIVERSAL) as draft:
        draft.write_text(target.name)


def _copy_whole(source: Path, target: Path) -> None:
    """The copy takes its place when it is complete; if another process was faster, its copy stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.urandom(6).hex()}.writing")
    try:
        shutil.copytree(source, draft)
        os.rename(draft, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="Makes a checkpoint one that any stage and number of ranks loads.")
    parser.add_argument("--input_folder", required=True, help="the checkpoint: the folder of one tag")
    parser.add_argument("--output_folder", required=True, help="the folder to write")
    for name, default in (("num_extract_workers", 4), ("num_merge_workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help="has no effect")
    for name in ("keep_temp_folder", "inject_missing_state"):
        parser.add_argument(f"--{name}", action="store_true", help="has no effect")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="has no effect")
    return parser.parse_args(arguments)


def main(args: argparse.Namespace | None = None) -> None:
    """The command line."""
    args = args if args is not None else parse_arguments()
    convert(args.input_folder, args.output_folder)


if __name__ == "__main__":
    main()
