"""Memory of each kind: ``device``, ``host`` and ``disk``; ``pages`` of the host are given back at once.

It imports ``errors`` only.
"""
