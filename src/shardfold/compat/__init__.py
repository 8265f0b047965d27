"""Faces of other libraries over the engine; no logic of training is here."""
