"""Memory of each kind: ``device``, ``host`` and ``disk``, by one protocol (``tier``); ``pages`` of the host are given
back at once; ``limit``: how much memory of the host there is.

It imports ``errors`` only.
"""
