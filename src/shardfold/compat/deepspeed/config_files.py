"""What ``device: "nvme"`` needs before an engine is made: folders, and an update that goes unit by unit."""

from __future__ import annotations

import os
import tempfile

from torch.optim import Optimizer

from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.config_offload import path_of
from shardfold.compat.deepspeed.config_read import Settings
from shardfold.optim.fused import why_not_fused
from shardfold.plan.checks import on_this_rank

__all__ = ["check_files"]


def check_files(settings: Settings, optimizer: Optimizer | None, local_rank: int) -> None:
    """Makes the folders of ``nvme_path`` that are not there, as DeepSpeed does.

    Raises:
        DeepSpeedConfigError: no file can be made in one, or the optimizer steps over all of its states at once. It
            names the key.
    """
    for state, folder in settings.offload_folders.items():
        key = f"{path_of(state)}nvme_path"
        if folder is None:
            continue
        here = on_this_rank(folder, str(local_rank))
        try:
            os.makedirs(here, exist_ok=True)
            with tempfile.TemporaryFile(dir=here):
                pass
        except OSError as error:
            raise DeepSpeedConfigError(
                f"{key} is {folder!r}, where no file can be made: {error.strerror}; name a folder that can be written "
                "to."
            ) from error
    filed = [state for state in settings.offload_folders if state != "params"]
    if filed and optimizer is not None and (why := why_not_fused(optimizer)):
        device = f"{path_of(filed[0])}device"
        raise DeepSpeedConfigError(
            f"{device} is 'nvme', where states come unit by unit: that works for AdamW, Adam and SGD, but {why}, or "
            f"give {device}: 'cpu'."
        )
