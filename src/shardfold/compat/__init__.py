"""Interfaces of other libraries over the engine; no logic of training is here.

``shardfold.compat.install()`` makes every ``import deepspeed`` mean :mod:`shardfold.compat.deepspeed`, in this process
and in those that it starts, so that scripts and libraries written for DeepSpeed run unchanged:

    import shardfold as sf

    sf.compat.install()
    import deepspeed  # and transformers, accelerate, ... find it

Call it before the first of them is imported, as they look for DeepSpeed when they are. Where a script is not to be
edited, or another program starts it, ``python -m shardfold.compat PROGRAM ARGUMENTS...`` runs the program with the
environment that :func:`environment` gives.

    command    the command ``deepspeed``, written on request
    deepspeed  DeepSpeed's public interface, by calls of the engine
    finder     how ``import deepspeed`` finds this layer
"""

from shardfold.compat.finder import ELASTIC, VERSION, environment, install, uninstall

__all__ = ["ELASTIC", "VERSION", "environment", "install", "uninstall"]
