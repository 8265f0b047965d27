"""``shardfold doctor``: what is wrong with an installation, what costs speed, and what this machine can do.

doctor          what ``shardfold doctor`` prints
_diagnoses      what is wrong with an installation, or costs speed: one line each, with how to mend it
_forward_rates  what a forward takes in which each of some texts has one token
_rates          what this machine can do: rates of products by dtype, of copies, of collectives by size, of the disk
"""
