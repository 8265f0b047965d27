"""Which DeepSpeed this is the face of."""

from shardfold.compat.finder import VERSION

__all__ = ["git_branch", "git_hash", "version"]

version = VERSION
git_hash = git_branch = None
