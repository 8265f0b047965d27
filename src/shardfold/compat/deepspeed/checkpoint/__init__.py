"""Checkpoints' helpers."""
