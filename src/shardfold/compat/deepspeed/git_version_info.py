"""Which DeepSpeed's interface this is, and what it was built with: nothing."""

from shardfold.compat.finder import VERSION

version = VERSION
git_hash = git_branch = "unknown"
installed_ops: dict[str, bool] = {}  # nothing is compiled
torch_info = {
    "version": "0.0",
    "bf16_support": False,
    "cuda_version": "0.0",
    "nccl_version": "0.0",
    "hip_version": "0.0",
}


__all__ = ["git_branch", "git_hash", "installed_ops", "torch_info", "version"]
