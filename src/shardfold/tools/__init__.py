"""Commands, and what they are made of: ``cli``, recipes, the benchmark, and what is printed and drawn.

It may import anything but ``testing``.
"""
