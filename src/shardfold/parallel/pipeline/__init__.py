"""Stages of layers: which pieces of a model are whose, what flows between them, and what brings it there."""
