"""Answers of a model that is there: what `generate`, `chat` and `serve` share.

text_stream  text of an answer as its tokens come
"""
