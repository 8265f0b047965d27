"""``shardfold doctor``: what is wrong with an installation, what costs speed, and what this machine can do.

checks   what is wrong with an installation, or costs speed: one line each, with how to mend it
command  what ``shardfold doctor`` prints
measure  what this machine can do: rates of products by dtype, of copies, of collectives by size, of the disk
"""
