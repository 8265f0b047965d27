"""Memory of each kind: ``device``, ``host`` and ``disk``, by one protocol (``tier``); ``pages`` of the host are given
back at once.

It imports ``errors`` only.
"""
