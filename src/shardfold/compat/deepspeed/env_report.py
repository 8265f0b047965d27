"""``python -m deepspeed.env_report``: what this environment has."""

from __future__ import annotations

import platform

__all__ = ["main"]


def main() -> None:
    """Prints versions and devices."""
    import torch

    import shardfold
    from shardfold.compat.finder import VERSION

    cuda = f"{torch.version.cuda}, {torch.cuda.device_count()} devices" if torch.cuda.is_available() else "none"
    rows = {
        "python version": platform.python_version(),
        "torch version": torch.__version__,
        "torch cuda version": cuda,
        "deepspeed": f"{VERSION}, the compatibility layer of shardfold {shardfold.__version__}",
        "compiled operators": "none are needed",
    }
    print("DeepSpeed general environment info:")
    for name, value in rows.items():
        print(f"{name:.<24} {value}")


if __name__ == "__main__":
    main()
