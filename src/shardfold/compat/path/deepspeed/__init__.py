"""Stands on the path of child processes: becomes the compatibility layer for DeepSpeed when it is imported."""

from shardfold.compat.finder import enter

enter()
